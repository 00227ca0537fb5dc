"""The examples run, and docs/optimizers.md says what the code does: its options, defaults and bytes of state."""

import inspect
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lather import optim
from lather.optim import KLSOAP, REKLS, SOAP, StackedSOAP, state_bytes

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "optimizers.md").read_text()


def run_example(name: str, num_ranks: int = 0) -> str:
    """`num_ranks`: under torchrun; 0: without."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_soap_any_model() -> None:
    lines = run_example("soap_any_model.py").splitlines()
    assert [line.split()[0] for line in lines] == ["SOAP", "AdamW"]
    for line in lines:
        first, last = re.search(r" 1: ([\d.]+)", line), re.search(r"last ten: ([\d.]+)", line)
        assert first
        assert last
        assert float(last[1]) < 0.3 * float(first[1]), line


def test_the_optimizer_part_of_soap_any_model_has_at_most_six_lines() -> None:
    source = (ROOT / "examples" / "soap_any_model.py").read_text()
    body = re.search(r"^def soap\(.*?\n(.*?)\n\n\n", source, re.DOTALL | re.MULTILINE)
    assert body
    assert len(body[1].splitlines()) <= 6


def test_experts_3d() -> None:
    lines = run_example("experts_3d.py").splitlines()
    assert [line.split()[0] for line in lines] == ["per_expert", "stacked", "adamw"]
    for line in lines:
        numbers = re.search(r"loss ([\d.]+) -> ([\d.]+) .* of experts.up ([\d,]+) \(predicted ([\d,]+)\)", line)
        assert numbers
        assert float(numbers[2]) < 0.5 * float(numbers[1]), line
        assert numbers[3] == numbers[4], line


def test_soap_fsdp2_is_the_same_on_one_rank_and_on_two() -> None:
    """The checkpoint in the middle included."""
    losses, sizes = {}, {}
    for num_ranks in (0, 2):
        *steps, state = run_example("soap_fsdp2.py", num_ranks).splitlines()
        losses[num_ranks] = [float(line.split()[-1]) for line in steps]
        sizes[num_ranks] = [int(size.replace(",", "")) for size in state.split(":")[1].split()]
    assert losses[2][-1] < 0.25 * losses[2][0]
    assert losses[0][:2] == pytest.approx(losses[2][:2], rel=0.01)
    assert losses[0] == pytest.approx(losses[2], rel=0.1)  # 200 steps of rounding
    assert sum(sizes[2]) == sum(sizes[0])
    assert max(sizes[2]) < 0.6 * sizes[0][0]


def test_soap_tensor_parallel() -> None:
    *lines, difference = run_example("soap_tensor_parallel.py", 2).splitlines()
    losses = [re.search(r"loss ([\d.]+) -> ([\d.]+)", line) for line in lines]
    assert len({found.groups() for found in losses if found}) == 1
    assert float(difference.split()[-1]) < 1e-4


# --- the page ---------------------------------------------------------------------------------------------------------------------------


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", DOC, re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def tables(title: str) -> list[list[list[str]]]:
    """The tables of a section: rows of cells, header first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", section(title), re.MULTILINE)
    return [[[cell.strip() for cell in row[1:-1].split("|")] for i, row in enumerate(block.splitlines()) if i != 1] for block in blocks]


def signature(rule: type) -> dict[str, Any]:
    parameters = list(inspect.signature(rule.__init__).parameters.values())[2:]  # type: ignore[misc]  # without self and params
    return {one.name: one.default for one in parameters}


def test_the_table_of_options_is_the_signatures() -> None:
    (rows,) = tables("Options")
    assert rows[0][:3] == ["option", "SOAP", "KLSOAP"]
    for column, rule in ((1, SOAP), (2, KLSOAP)):
        documented: dict[str, Any] = {}
        for row in rows[1:]:
            if row[column] != "-":
                name, default = row[0].strip("`"), row[column].strip("`")
                documented[name] = inspect.Parameter.empty if default == "required" else eval(default, {"torch": torch})
        assert documented == signature(rule)


def test_the_presets_are_what_the_page_says() -> None:
    text = section("Which one")
    for rule in (REKLS, StackedSOAP):
        options = ", ".join(f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in rule.preset.items())
        assert f"`{rule.__name__}` is `KLSOAP` with `{options}`" in " ".join(text.split())


@pytest.mark.parametrize(("table", "unit"), [(0, 2**20), (1, 2**30)])
def test_the_memory_tables_are_state_bytes(table: int, unit: int) -> None:
    rows = tables("Memory")[table]
    shapes = [tuple(int(n) for n in cell.split("x")) for cell in rows[0][2:]]
    for row in rows[1:]:
        rule = getattr(optim, row[0].strip("`"))
        given = re.match(r"`(.*?)`", row[1])
        options = eval(f"dict({given[1]})", {"torch": torch}) if given else {}
        for shape, cell in zip(shapes, row[2:], strict=True):
            size = state_bytes(shape, rule, **options)
            digits = 1 if unit == 2**20 else 2
            assert cell == f"{size / unit:.{digits}f} ({size / (4 * math.prod(shape)):.2f})", (row, shape)


def test_python_blocks_and_links() -> None:
    names: dict[str, Any] = {"torch": torch, "model": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))}
    for block in re.findall(r"```python\n(.*?)```", DOC, re.DOTALL):
        exec(compile(block, "optimizers.md", "exec"), names)
    assert isinstance(names["optimizer"], SOAP)
    for path in re.findall(r"\]\(([^)#:]+)\)", DOC):
        assert (ROOT / "docs" / path).exists(), path
    headings = {re.sub(r"\s+", "-", title.lower()) for title in re.findall(r"^## (.*)$", DOC, re.MULTILINE)}
    for anchor in re.findall(r"\]\(#([^)]+)\)", DOC):
        assert anchor in headings, anchor
    for command in re.findall(r"`python (\S+)`", DOC):
        assert (ROOT / command).exists(), command
