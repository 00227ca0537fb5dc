"""Whole training steps as a GPU would take them, rehearsed on tensors without values: see
`rehearsed_steps.py`."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.rehearsed_steps import NARROW, Rehearsal, more_rehearsals, rehearsals

pytestmark = pytest.mark.timeout(900)
"""The first test rehearses all cases, which takes half a minute on a quiet core."""

CASES, MORE_CASES = rehearsals(), more_rehearsals()
REPOSITORY = Path(__file__).parents[2]
ONCE = ["engine/step.py", "engine/step_reading.py"]
"""Where the host waits in a step: for loss, norm and counts, and for the optimizer's end. If a
refresh was under way beside the last step, the step also looks how that went."""

OUTSIDE = ("engine/step.py", "optim/")
"""Places that are not the model's."""


@functools.cache
def found(*which: str) -> dict[str, Any]:
    """The results by case, from a process of its own: a process cannot undo that torch knows the
    stand-in."""
    # kernels are counted, not interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), str(REPOSITORY / "tests"), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, str(Path(__file__).with_name("rehearsed_steps.py")), *which]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=850, env=environment
    )
    assert done.returncode == 0, done.stderr
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.grid) for case in MORE_CASES)],
    ids=lambda case: case.name,
)
def test_a_gpu_would_take_the_step(case: Rehearsal) -> None:
    """No device, dtype or shape is wrong; no product is in fp64, no attention has S x S elements.
    In bf16 the host hardly ever waits; the model makes it wait once, for the losses, when forward
    and backward are done."""
    result = (found() if case in CASES else found("more"))[case.name]
    assert "error" not in result, result["error"]
    for step in result["steps"]:
        assert step["notes"] == {}
        assert 300 < step["launches"] < 5000
        if case.precision == "bf16" and case.sizes != NARROW:
            of_model = [
                (wait, times)
                for wait, times in step["waits"].items()
                if not wait.split(", ")[1].startswith(OUTSIDE)
            ]
            assert [(wait.split(", ")[0], times) for wait, times in of_model] == [
                ("reads STEP", 1)
            ], of_model
    if case.precision == "bf16" and case.sizes != NARROW and case.rule != "klsoap":
        waits = result["steps"][1]["waits"]
        late = ["optim/batched/gradients.py"] if "async_refresh" in case.optim else []
        assert sorted(where.split(", ")[1].split(":")[0] for where in waits) == sorted(
            [*ONCE, *late]
        ), waits
