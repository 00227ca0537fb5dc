"""The way from `.grad` to the changed weight is short. It is counted in a process of its own, in
which no annotation is checked."""

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

import lather
from benchmarks.calls import CASES, count, counted
from forked import ForkedPython
from lather.optim import SOAP


def test_counts_keep_to_their_bounds(tmp_path: Path) -> None:
    process = ForkedPython(
        ["-m", "lather", "bench", "calls", "--out", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    rows = {
        row["config"]["name"]: row
        for row in map(json.loads, (tmp_path / "calls.jsonl").read_text().splitlines())
    }
    assert rows["SOAP, a matrix"]["calls"] <= 160
    assert rows["SOAP, a matrix"]["files"] <= 13  # `lather.device` and packed triangles among them
    assert rows["SOAP, 100 matrices"]["calls"] <= 400
    assert rows["AdamW, 100 vectors"]["calls"] <= 100
    assert "SOAP, 100 matrices" in out


def test_a_step_with_a_refresh_calls_more() -> None:
    plain, refreshing = count(CASES[0]), count(CASES[1])
    assert plain["functions"] < refreshing["functions"]
    assert plain["calls"] >= plain["functions"] >= plain["files"] >= 5


def test_a_checkout_that_is_called_lather_does_not_make_its_environment_part_of_the_package() -> (
    None
):
    file = "/home/somebody/lather/.venv/lib/python3.12/site-packages/torch/nn/functional.py"
    names: dict[str, Any] = {}
    exec(compile("def linear():\n    pass", file, "exec"), names)
    assert not counted(names["linear"])
    found = counted(lambda: SOAP([torch.nn.Parameter(torch.ones(2, 2))], lr=1e-2))
    package = Path(lather.__file__).parent
    assert all((package / name).is_file() for name, _ in found)
    assert "optim/rules/soap.py" in {name for name, _ in found}
