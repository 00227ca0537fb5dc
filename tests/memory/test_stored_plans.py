"""The plans that docs pages show are those that are stored, and need what the pages say."""

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import plans

ROOT = Path(__file__).parents[2]


def stored_plan(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((plans.FOLDER / f"{name}.json").read_text())
    return found


def test_the_table_of_qwen3_30b_has_every_plan_and_what_fits() -> None:
    lines = [
        line
        for line in (ROOT / "docs/memory.md").read_text().splitlines()
        if line.startswith(("| 16 | ", "| 8 | "))
    ]
    names = []
    for line in lines:
        gpus, mesh, options, needs, *fits = (cell.strip() for cell in line.strip("|").split("|"))
        quoted = re.fullmatch(
            r'\[([\d.]+)\]\(\.\./benchmarks/results/plans/([\w-]+)\.json "GiB that a rank needs"\)',
            needs,
        )
        assert quoted
        document = stored_plan(quoted[2])
        axes = [f"--parallel.{axis}" for axis in re.findall(r"[pe]p \d+", mesh)]
        given = re.findall(r"`(--.+)`", options)
        words = ["configs/qwen3-30b-a3b.toml", f"--world {gpus}", *axes, *given]
        assert " ".join(document["arguments"]) == " ".join(words)
        assert f"{document['needed'] / 2**30:.2f}" == quoted[1]
        assert fits == [
            "yes" if document["needed"] <= size * 2**30 else "no" for size in (64, 79, 139)
        ]
        names.append(quoted[2])
    assert sorted(names) == sorted(
        name for name in plans.PLANS if name.startswith("qwen3-30b-a3b-")
    )


def test_the_table_of_layers_partitioned_by_memory_is_that_of_its_plans() -> None:
    lines = [
        line
        for line in (ROOT / "docs/memory.md").read_text().splitlines()
        if line.startswith("| pp ")
    ]
    assert len(lines) == 2
    for line in lines:
        mesh, layers, even, by_memory, expected, bubble = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        name = f"qwen3-30b-a3b-16-{mesh.replace(', ', '-').replace(' ', '')}-soap_muon"
        uniform, by_size = (stored_plan(f"{name}{end}") for end in ("", "-by-memory"))
        found = by_size["partition"]
        assert [int(count) for count in layers.split()] == found["layers"]
        peaks = [max(rank["peak"] for rank in document["ranks"]) for document in (uniform, by_size)]
        assert [even, by_memory, expected] == [
            f"{size / 2**30:.2f}" for size in (*peaks, found["expected"])
        ]
        assert bubble == f"{100 * found['bubble_uniform']:.1f} % -> {100 * found['bubble']:.1f} %"


def test_plans_are_at_most_four_fifths_of_published_peaks() -> None:
    """The numbers of plans are those of their rows (tests/test_results.py)."""
    page = (ROOT / "docs/memory.md").read_text()
    row = r'\| ([\d.]+) \| \[([\d.]+)\]\(\S+/published-([\w-]+)\.json "[^"]+"\) \| ([\d.]+) \|\n'
    rows = re.findall(row, page)
    assert {f"published-{name}" for _, _, name, _ in rows} == plans.PUBLISHED.keys()
    for published, planned, _, share in rows:
        assert share == f"{float(planned) / float(published):.2f}"
        assert float(share) <= 0.8
    shares = sorted(share for *_, share in rows)
    assert f"need {shares[0]} to {shares[-1]} of it" in (ROOT / "README.md").read_text()


def test_deepseek_v2_needs_what_its_plan_says() -> None:
    needed = stored_plan("deepseek-v2-512-pp8-ep8-soap_muon")["needed"]
    assert f"pp 8, ep 8: {needed / 2**30:.2f} GiB" in (ROOT / "docs/memory.md").read_text()


def test_the_table_of_early_weight_gradients_is_that_of_its_plans() -> None:
    lines = [
        line
        for line in (ROOT / "docs/memory.md").read_text().splitlines()
        if line.startswith("| attention")
    ]
    assert len(lines) == 2
    for line, name in zip(lines, ("attention", "all"), strict=True):
        normal, early = (stored_plan(f"quickstart-deep-{name}{end}") for end in ("", "-early"))
        peaks = [
            f"{rank['peak'] / 2**20:.2f}"
            for document in (normal, early)
            for rank in document["ranks"]
        ]
        price = early["early_weight_gradients"]
        bubbles = [f"{100 * price[key]:.1f} %" for key in ("bubble_normal", "bubble")]
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [*peaks, *bubbles]


def test_the_advice_of_the_page_needs_what_its_plans_say() -> None:
    page = (ROOT / "docs/memory.md").read_text()
    experts = f"{plans.ATTENTION} --moe.memory recompute"
    for options, name in ((plans.ATTENTION, "attention"), (experts, "experts")):
        needed = stored_plan(f"qwen3-30b-a3b-16-pp2-ep8-soap-{name}")["needed"] / 2**30
        line = rf"^ {options} +{needed:.2f} +{80 - needed:.2f} "
        assert re.search(line, page, re.MULTILINE), options
    alone, halved = (
        stored_plan(f"qwen3-30b-a3b-8-ep8-soap{end}")["needed"] / 2**30 for end in ("", "-smaller")
    )
    assert f"needs {alone:.2f} GiB, and {halved:.2f} with" in page


def test_every_stored_plan_has_a_command_that_makes_it_again() -> None:
    assert {path.stem for path in plans.FOLDER.glob("*.json")} == set(plans.PLANS)
    for name, options in plans.PLANS.items():
        document = stored_plan(name)
        assert document["arguments"] == options.split(), name
        assert document["lather"].startswith("lather ")
        assert "dirty" not in document["lather"]
