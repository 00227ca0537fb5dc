"""Launches and bytes on a GPU, counted on a stand-in: counts do not grow, and the host waits for
nothing inside a block or the loss.

How often it waits in a step is tested in test_rehearsal.py."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The rows by case, from a process of its own: a process cannot undo that torch knows the
    stand-in."""
    out = tmp_path_factory.mktemp("launches")
    arguments = ["--parts", "loss", "block", "--models", "DeepSeek-V2-Lite", "--out", str(out)]
    # kernels are counted, not interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lather", "bench", "launches", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "launches" in done.stdout
    return {
        row["case"]: row["total"]
        for row in map(json.loads, (out / "launches.jsonl").read_text().splitlines())
    }


@pytest.mark.parametrize(
    ("case", "at_most", "gigabytes"),
    [
        ("the loss: forward and backward", 433, 36.8),
        ("an MoE block of DeepSeek-V2-Lite: forward and backward", 139, 23.3),
    ],
)
def test_launches_and_bytes_do_not_grow_and_nobody_waits(
    rows: dict[str, Any], case: str, at_most: int, gigabytes: float
) -> None:
    assert 100 < rows[case]["launches"] <= at_most
    assert 5 < (rows[case]["bytes_read"] + rows[case]["bytes_written"]) / 1e9 <= gigabytes
    assert rows[case]["host_waits"] == 0
    assert rows[case]["triton"] > 0


def test_context_ranks_launch_their_exchanges_and_wait_for_nothing(rows: dict[str, Any]) -> None:
    """An exchange is packed, sent and unpacked. Gathering, gathering again and the sum of the
    gradients take 14 launches, flex attention in place of a kernel for causal attention of equally
    many queries and keys 3 more."""
    alone = rows["an MoE block of DeepSeek-V2-Lite: forward and backward"]
    case = "an MoE block of DeepSeek-V2-Lite, a context rank of 8: forward and backward"
    assert rows[case]["host_waits"] == 0
    assert 14 <= rows[case]["launches"] - alone["launches"] <= 17
