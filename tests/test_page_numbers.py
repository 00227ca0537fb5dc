"""Numbers of README, docs/tour.md and docs/size-a-run.md that have no link to their row are those
of the row, or are counted; Python blocks of the README run."""

import json
import re
from pathlib import Path

import pytest
import torch

import result_tables
from lather.config.toml_file import load_config
from lather.durations import duration
from lather.memory.plan_report import COLUMNS
from lather.models import build_model

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR, SIZES = ((ROOT / "docs" / name).read_text() for name in ("tour.md", "size-a-run.md"))


def test_the_training_that_the_tour_shows_is_that_of_the_row() -> None:
    rows = map(json.loads, (ROOT / "benchmarks/results/quickstart.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["contestant"] == "muon")
    block = re.search(
        r"^lather train configs/quickstart.toml\n```.*?```text\n(.*?)^```$",
        TOUR,
        re.MULTILINE | re.DOTALL,
    )
    assert block
    shown = [
        (int(step), loss)
        for step, loss in re.findall(
            r"^step (\d+): validation loss ([\d.]+)$", block[1], re.MULTILINE
        )
    ]
    assert shown == [(step, f"{loss:.4f}") for step, loss in row["validation"]]
    last = (
        f"{row['first_loss']:.4f} before, {row['loss']:.4f} after "
        f"{row['steps']} steps in {duration(row['seconds'])} of training"
    )
    assert f"validation loss   {last}\n" in block[1]


def test_runs_of_the_quickstart_that_pages_show_have_its_parameters_and_stages() -> None:
    config = load_config(ROOT / "configs/quickstart.toml")
    model = build_model(config.model, device=torch.device("meta"))
    counted = f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.2f}"
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    shown = [number for page in pages for number in re.findall(r"(\S+) M parameters, muon", page)]
    assert len(shown) >= 3
    assert {*shown} == {counted}
    stages = [line for page in pages for line in re.findall(r"layers by stage: ([\d ]+)", page)]
    assert [sum(map(int, line.split())) for line in stages] == [config.model.num_hidden_layers]


@pytest.mark.parametrize(
    ("page", "row"),
    [
        ("memory.md", "qwen3-30b-a3b-16-pp2-ep8-soap_muon"),
        ("size-a-run.md", "deepseek-v2-lite-8-ep8-muon"),
    ],
)
def test_plans_that_pages_show_are_those_of_the_rows(page: str, row: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    plan = json.loads((ROOT / f"benchmarks/results/plans/{row}.json").read_text())
    for rank in plan["ranks"]:
        peak = max(rank["steps"].values(), key=lambda step: step["peak"])
        sums = [sum(peak["kinds"].get(kind, 0) for kind in kinds) for kinds in COLUMNS.values()]
        numbers = " +".join(f"{size / 2**30:.2f}" for size in (*sums, peak["peak"]))
        layers = r"\d+-\d+(, \d+-\d+)?"
        assert re.search(rf"^ {rank['rank']} +{layers} +{numbers}  ", text, re.MULTILINE), rank[
            "rank"
        ]


def test_parameters_and_tokens_of_the_presets_are_counted() -> None:
    presets = sorted((ROOT / "configs").glob("*.toml"))
    assert len(presets) == 15
    for preset in presets:
        config = load_config(preset)
        model = build_model(config.model, device=torch.device("meta"))
        sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        number, chosen = config.model.num_routed_experts, config.model.num_experts_per_tok
        idle = experts * (number - chosen) // max(number, 1)
        active = sum(sizes.values()) - idle
        assert (
            f"| `configs/{preset.name}` | {sum(sizes.values()):,} | {active:,} | {experts:,} |\n"
            in SIZES
        )

        batch, length = config.train.batch_size, config.train.sequence_length
        tokens = batch * length * config.train.steps
        shown = f"{tokens / 1e6:.2f} M" if tokens < 1e9 else f"{tokens / 1e9:,.0f} B"
        share = f"{tokens / active:.1f}" if tokens < active else f"{tokens / active:.0f}"
        assert f"| {preset.stem} | {batch:,} x {length:,} | {shown} | {share} |\n" in SIZES


# --- README ---------------------------------------------------------------------------------------

QUICKSTART, SHORT, NODE, PLAN = (
    "quickstart.jsonl",
    "convergence/short/rows.jsonl",
    "plans/qwen3-30b-a3b-8-ep8-{}.json",
    "plans/qwen3-30b-a3b-16-pp2-ep8-{}.json",
)
NUMBERS = {
    "validation loss of (.*?) to": (QUICKSTART, "muon: first_loss of the quickstart"),
    "7.66 to (.*?) in": (QUICKSTART, "muon: loss of the quickstart"),
    "in (.*?) s on two": (QUICKSTART, "muon: seconds of the quickstart"),
    "rates ends at (.*?) after": (QUICKSTART, "adamw: loss of the quickstart"),
    "final loss after (.*?) of its steps": (SHORT, "qwen-8k: steps of muon to adamw"),
    r"gradients in bf16 \| (.*?) \|": (NODE.format("muon-bf16"), "GiB that a rank needs"),
    r"bf16 gradients \| (.*?) \|": (NODE.format("soap-int8"), "GiB that a rank needs"),
    r"SOAP-Muon, state in 8 bits \| (.*?) \|": (
        "plans/qwen3-30b-a3b-8-soap_muon-int8.json",
        "GiB that a rank needs",
    ),
    r"16 GPUs \| data ranks \| Muon \| (.*?) \|": (
        "plans/qwen3-30b-a3b-16-muon.json",
        "GiB that a rank needs",
    ),
    r"8 GPUs \| data ranks \| Muon \| (.*?) \|": (
        "plans/qwen3-30b-a3b-8-muon.json",
        "GiB that a rank needs",
    ),
    r"\| SOAP \| (.*?) \|": (PLAN.format("soap"), "GiB that a rank needs"),
    r"one-sided SOAP-Muon \| (.*?) \|": (PLAN.format("soap_muon"), "GiB that a rank needs"),
    r"SOAP, state in bf16 \| (.*?) \|": (
        PLAN.format("soap-smaller-bf16"),
        "GiB that a rank needs",
    ),
}
"""Texts around the numbers, the files of their rows, and what `result_tables` calls them."""


@pytest.mark.parametrize("pattern", NUMBERS)
def test_numbers_are_those_of_the_rows(pattern: str) -> None:
    file, title = NUMBERS[pattern]
    (shown,) = re.findall(pattern, README)
    assert not result_tables.wrong_number(shown, result_tables.RESULTS / file, title)


def test_python_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
        assert names["loss"].item() < 0.5  # type: ignore[attr-defined]
