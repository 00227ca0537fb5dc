"""Every fenced block of README and docs/ is right (`page_blocks` says what that means), in a folder
where the runs that they name exist.

The whole grid also runs their commands (test_page_commands)."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
import torch

from lather import cli
from lather.errors import UserError
from lather.files import read_rows
from lather.train.metrics import ExpertLoadRow, StepRow, ValidationRow
from page_blocks import ROOT, Block, blocks_of, check_block
from tiny_run import write_config

PAGES = [
    page for page in sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]) if blocks_of(page)
]
ELSEWHERE = {
    "writing-a-rule.md": ["python"],
    "optimizers.md": ["python"],
    "adding-a-family.md": ["python", "toml", "bash"],
}
"""Pages and the languages of their blocks that have tests of their own, which need files, a model
or a patched package (test_docs, test_adding_a_family)."""
QUICK = re.compile(
    r"(--version|--help|generate \S+ --(prompt|message) .*|eval [\w/]+|plot runs/mine|plot "
    r"--schedule .*|export runs/\w+ \S+( --adapter)?)$"
)
"""Matches commands that are not only parsed but executed."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make the folder of a checkout in which somebody has trained, with runs, a model in Hugging
    Face's format and adapters; enter it."""
    folder, threads = tmp_path_factory.mktemp("world"), torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("configs", "examples", "benchmarks", "src", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    for file in (ROOT / "examples" / "rules").glob("*.py"):
        (folder / file.name).symlink_to(file)
    small = write_config(folder, steps=4, checkpoint_every=2)
    sizes = {
        "n_routed_experts": 72,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "sample_tokens": 0,
    }
    small.write_text(with_values(small.read_text(), sizes) + "expert_load_every = 2\n")
    large = {
        "n_routed_experts": 64,
        "num_hidden_layers": 64,
        "batch_size": 1024,
        "micro_batch_size": 0,
    }
    # commands for it are only parsed, on any mesh
    (folder / "my.toml").write_text(with_values(small.read_text(), large))
    before = Path.cwd()
    os.chdir(folder)
    for command in (
        "train tiny.toml --run-dir runs/mine --checkpoint.keep-best",
        "export runs/mine models/base --dtype fp32",
        "train tiny.toml --init-from models/base --run-dir runs/tuned --lora.rank 4 "
        "--train.steps 2 --optim.lr 1e-3",
    ):
        assert cli.main(command.split()) == 0, command
    for name in {
        name for page in PAGES for name in re.findall(r"\bruns/([\w-]+)", page.read_text())
    }:
        if not (folder / "runs" / name).exists():
            (folder / "runs" / name).symlink_to("mine")
    (folder / "runs/mine/checkpoints/step-00001000").symlink_to("step-00000004")
    yield folder
    os.chdir(before)
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    sys.modules.pop("shampoo", None)
    torch.set_num_threads(threads)


def with_values(toml: str, values: dict[str, int]) -> str:
    for key, value in values.items():
        toml = re.sub(rf"^{key} = .*$", f"{key} = {value}", toml, flags=re.MULTILINE)
    return toml


def execute(arguments: list[str]) -> None:
    """Run the command, if that is quick."""
    if not QUICK.match(" ".join(arguments)):
        return
    if arguments[0] == "export":
        shutil.rmtree(arguments[2], ignore_errors=True)
    assert (
        cli.main([*arguments, *(["--tokens", "3"] if arguments[0] == "generate" else [])]) == 0
    ), arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_right(page: Path, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")  # dataclasses look up the module that they are defined in
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks_of(page):
        if block.language not in ELSEWHERE.get(page.name, []):
            try:
                check_block(block, vars(module), execute)
            except Exception as error:
                error.add_note(f"{page.name}, line {block.line}")
                raise


def test_rows_of_a_run_have_the_documented_keys_and_no_others(world: Path) -> None:
    rows, kinds = (
        read_rows(world / "runs/mine/metrics.jsonl"),
        {"loss": StepRow, "validation_loss": ValidationRow, "expert_load": ExpertLoadRow},
    )
    for row in rows:
        (kind,) = [cls for key, cls in kinds.items() if key in row]
        optional = {"validation_losses", "average_validation_loss", "average_validation_losses"}
        assert row.keys() - optional == get_type_hints(kind).keys() - optional, row
    assert {key for key in kinds for row in rows if key in row} == set(kinds)


# --- the check itself -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [
        Block("bash", "torchrun --nproc-per-node 2 -m lather train my.toml \\\n    --train.step 3"),
        Block("toml", "[train]\nsteps = 0\n"),
        Block("json", "{1}\n"),
        Block("python", "import tensorflow\n", file="examples/soap_any_model.py"),
    ],
    ids=str,
)
def test_a_wrong_block_is_noticed(block: Block, world: Path) -> None:
    with pytest.raises((AssertionError, UserError, ValueError)):
        check_block(block, {})
