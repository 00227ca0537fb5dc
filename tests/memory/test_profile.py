"""`lather profile`: bytes by layer and segment from first principles, tables, files, and the
options that change them."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from planned_configs import config_of
from rich.console import Console

from bench.rehearsed_steps import COMMON
from forked import fresh_python
from lather.cli import main
from lather.config.fields import merged
from lather.config.toml_file import config_from_mapping, values_of_config
from lather.memory import profile_report as report
from lather.memory.ledger import BETWEEN_SEGMENTS
from lather.memory.profile import KeptTensor, Profile, layer_of, micro_batch_size, profile
from lather.memory.workers import Assumed, worker_processes
from lather.models.families import FAMILIES
from lather.models.gated_mlp import MEMORY_MODES
from models.tiny import FAMILY_TABLES
from tiny_run import command, write_config

MIB = 2**20
ROWS = 2 * 16
"""Tokens in a micro-batch of the tiny configuration: D = 16, F = 8, E = 4, K = 2, a dense and an
MoE block with a shared expert."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("profile"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    """Run the command and return its lines."""
    capsys.readouterr()
    assert main(["profile", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [" ".join(line.split()) for line in out.splitlines()]


def document(path: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(path.read_text())
    return parsed


def test_a_layer_keeps_what_its_formulas_say() -> None:
    """A layer of T = 32 tokens in fp32 keeps its output (D) between its segments; for the experts
    gate and up (2 K F), and indices of K pairs. `tests/memory/test_plan.py` counts attention."""
    with worker_processes() as pool:
        found = pool.submit(profile, config_of("adamw"), Assumed()).result(timeout=120)
    tokens, hidden, chosen, width = 32, 64, 2, 32
    assert (found.layers, found.num_tokens) == (
        ("embed_tokens", "layers.0", "layers.1", "head"),
        32,
    )
    assert found.by_segment("embed_tokens") == {BETWEEN_SEGMENTS: 4 * tokens * hidden}
    for layer in ("layers.0", "layers.1"):
        sizes = found.by_segment(layer)
        assert sizes[BETWEEN_SEGMENTS] == 4 * tokens * hidden
        indices = sizes["experts"] - 4 * tokens * chosen * 2 * width
        assert 8 * tokens * 2 * chosen <= indices < 8 * tokens * 2 * chosen + 200
    # the rotary tables are made by the first layer, and shared
    extra = found.bytes("layers.0", "attention") - found.bytes("layers.1", "attention")
    assert extra == 2 * 4 * tokens * 16
    assert found.bytes() == sum(found.bytes(layer) for layer in found.layers)
    assert found.bytes(weights=True) == 0


def test_in_bf16_the_numbers_of_a_norm_are_those_of_its_layer() -> None:
    """Norms that write rounded rows keep fp32 numbers of the rows, like others."""
    with worker_processes() as pool:
        config = config_of("adamw", precision="bf16")
        found = pool.submit(profile, config, Assumed()).result(timeout=120)
    tokens, hidden = 32, 64
    assert found.by_segment("embed_tokens") == {BETWEEN_SEGMENTS: 4 * tokens * hidden}
    extra = found.bytes("layers.0", "attention") - found.bytes("layers.1", "attention")
    assert extra == 2 * 4 * tokens * 16  # the rotary tables


def test_tables_json_and_picture(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = tmp_path / "p.png", tmp_path / "p.json"
    lines = run(capsys, config, "--json", numbers, "--out", out)
    assert {"embed_tokens", "layers.0", "layers.1", "head"} <= set(lines)
    assert "one micro-batch of 2 x 16 tokens, fp32, memory saved" in lines
    assert lines[-2:] == [str(numbers), str(out)]
    assert matplotlib.image.imread(out).std() > 0
    written = document(numbers)
    assert (written["micro_batch_size"], written["model"]["hidden_size"]) == (2, 16)
    (kept,) = written["profiles"].values()
    assert kept["num_tokens"] == ROWS
    gate_up = [
        tensor["bytes"]
        for tensor in kept["tensors"]
        if (tensor["layer"], tensor["segment"], tensor["shape"][-1:])
        == ("layers.1", "experts", [2 * 8])
    ]
    assert gate_up == [ROWS * 2 * 2 * 8 * 4]  # T K 2F elements in fp32
    assert sum(tensor["bytes"] for tensor in kept["tensors"]) == sum(
        kept["activation_bytes"].values()
    )


def test_comparison_of_all_modes(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, numbers = tmp_path / "p.png", tmp_path / "p.json"
    options = ("--train.precision", "bf16", "--train.recompute", "shared_experts")
    lines = run(capsys, config, "--compare", *options, "--json", numbers, "--out", out)
    profiles = document(numbers)["profiles"]
    assert tuple(profiles) == MEMORY_MODES
    sizes = {mode: sum(kept["activation_bytes"].values()) for mode, kept in profiles.items()}
    assert sizes["recompute"] < sizes["saved"] < sizes["reference"]
    cells = ["model"]
    for mode, size in sizes.items():
        cells.append(f"{size / ROWS / 1024:,.2f}")
        if mode != "reference":
            cells.append(f"{size / sizes['reference']:.2f} x")
    assert " ".join(cells) in lines
    assert all(kept["rounded_weight_bytes"] > 0 for kept in profiles.values())
    assert all("shared_experts" not in kept["activation_bytes"] for kept in profiles.values())
    assert matplotlib.image.imread(out).std() > 0


def test_documents_need_a_mask(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = []
    for options, ending in (([], ""), (["--data.packed-attention"], ", 4 documents per sequence")):
        lines = run(capsys, config, *options, "--json", tmp_path / "p.json")
        assert f"one micro-batch of 2 x 16 tokens, fp32{ending}, memory saved" in lines
        (kept,) = document(tmp_path / "p.json")["profiles"].values()
        sizes.append(kept["activation_bytes"]["attention"])
    assert sizes[1] > sizes[0]


def test_a_mesh_changes_the_micro_batch_alone() -> None:
    """A data rank has 4 micro-batches of 2 of the 16 sequences on 2 x 2 ranks."""
    config = config_of("adamw", parallel={"pp": 2, "ep": 2}, batch_size=16)
    config = replace(config, train=replace(config.train, micro_batch_size=0))
    assert micro_batch_size(config) == 2


RECOMPUTED = ("attention", "experts", "shared_experts")


KINDS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"train.recompute": RECOMPUTED},
    "adapters": {"lora.rank": 8},
}
ALWAYS = (("recomputed", "llama"), ("kept", "deepseek_v3"))
THIRD_LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 3, "sliding_window": 100},
    "deepseek_v3": {"num_nextn_predict_layers": 1},
}
"""Options of models whose third layer is looked at: one with sinks and a window, and one that
predicts a second token."""
GRID = [
    pytest.param(family, kind, marks=[pytest.mark.grid] * ((kind, family) not in ALWAYS))
    for kind in KINDS
    for family in ("qwen3_moe", "deepseek_v2", "llama", "gpt_oss", "deepseek_v3")
]


@pytest.mark.parametrize(("family", "kind"), GRID)
def test_a_context_rank_keeps_its_slices(family: str, kind: str) -> None:
    """With sequences of twice and four times as many tokens, a layer keeps no more than in one
    process of its own tokens. (The first layer makes masks and rotary tables for all.)"""
    sizes = {**COMMON, **FAMILY_TABLES[family].wide, **THIRD_LAYERS.get(family, {})}
    model = FAMILIES[family].config(**sizes)
    configs = []
    for cp in (1, 2, 4):
        values = {"train.sequence_length": 256 * cp, "parallel.cp": cp, **KINDS[kind]}
        values["train.precision"] = "bf16"
        base = replace(config_of("adamw"), model=model)
        configs.append(config_from_mapping(merged(values_of_config(base), values)))
    with worker_processes() as pool:
        found = list(pool.map(profile, configs, [Assumed("gpu")] * 3, timeout=240))
    assert [each.num_tokens for each in found] == [256] * 3
    layer = "layers.2" if family in THIRD_LAYERS else "layers.1"
    alone, *divided = [each.bytes(layer) for each in found]
    assert divided[0] == pytest.approx(divided[1], rel=0.005)
    assert 0 < max(divided) <= 1.005 * alone


def test_files_are_written_for_a_reader_that_leaves_early(config: Path, tmp_path: Path) -> None:
    """The reader of `lather profile ... | head` leaves; here before the first line, so that the
    pipe is closed whatever the machine's speed."""
    arguments = ("profile", config, "--json", tmp_path / "p.json", "--out", tmp_path / "p.png")
    process = fresh_python(command(*arguments)[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0, process.stderr.read()
    assert process.stderr.read() == ""
    assert {path.name for path in tmp_path.iterdir()} == {"p.json", "p.png"}


# --- from made-up tensors -------------------------------------------------------------------------


def tensor(layer: str, segment: str, mib: int, *, is_weight: bool = False) -> KeptTensor:
    return KeptTensor(layer, segment, "mm", (mib, 2**18), "float32", mib * MIB, is_weight)


def example(scale: int = 1) -> Profile:
    """Three layers, of which two are alike, and an embedding."""
    blocks = [
        kept
        for layer in ("layers.1", "layers.2")
        for kept in (
            tensor(layer, BETWEEN_SEGMENTS, 8),
            tensor(layer, "experts", 3 * scale),
            tensor(layer, "experts", 32, is_weight=True),
        )
    ]
    first = tensor("layers.0", "attention", 2)
    return Profile((tensor("embed_tokens", BETWEEN_SEGMENTS, 1), first, *blocks), 1024)


def printed(show: Callable[[Console], None]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_layers_that_keep_the_same_are_shown_once() -> None:
    assert report.alike(example()) == [["embed_tokens"], ["layers.0"], ["layers.1", "layers.2"]]
    lines = printed(lambda console: report.print_tensors(example(), console))
    start = lines.index("layers.1-2: 2 layers, each")
    assert [line for line in lines[start + 1 :] if line and "─" not in line] == [
        "made by shape dtype MiB holds",
        "experts 3.00",
        "mm 3 x 262144 float32 3.00 activation",
        "mm 32 x 262144 float32 32.00 rounded weight",
        "between segments 8.00",
        "mm 8 x 262144 float32 8.00 activation",
    ]


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        (["head"], "head"),
        (["layers.1", "layers.2", "layers.3", "layers.5"], "layers.1-3, 5"),
        (["layers.0", "layers.2"], "layers.0, 2"),
    ],
    ids=str,
)
def test_names_of_alike_layers(layers: list[str], name: str) -> None:
    assert report.name_of(layers) == name


def test_totals_and_comparison() -> None:
    lines = printed(lambda console: report.print_totals(example(), console))
    assert "MiB attention experts between segments activations rounded weights" in lines
    assert "layers.1-2 (each) - 3.00 8.00 11.00 32.00" in lines
    assert "model 2.00 6.00 17.00 25.00 64.00" in lines
    assert "KiB per token 2.00 6.00 17.00 25.00" in lines
    dense = replace(example(), has_experts=False)
    lines = printed(lambda console: report.print_totals(dense, console))
    assert "MiB attention feed-forward between segments activations rounded weights" in lines
    profiles = {"saved": example(), "reference": example(scale=5)}
    lines = printed(lambda console: report.print_comparison(profiles, console))
    assert "experts 6.00 0.20 x 30.00" in lines
    assert "model 25.00 0.51 x 49.00" in lines


def test_layer_of() -> None:
    paths = ("layers.3.mlp.experts", "embed_tokens", "norm", "lm_head")
    assert [layer_of(path) for path in paths] == ["layers.3", "embed_tokens", "head", "head"]
