"""Launches and bytes on a GPU, counted on a stand-in, and the times that are predicted from them:
they do not grow, and the host waits for nothing inside a block or the loss.

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
    arguments = ["--parts", "loss", "block", "--out", str(out)]
    # kernels are counted, not interpreted
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "lather", "bench", "launches", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "launches" in done.stdout
    assert "predicted" in done.stdout
    return {
        row["case"]: row
        for row in map(json.loads, (out / "launches.jsonl").read_text().splitlines())
    }


@pytest.mark.parametrize(
    ("case", "at_most", "gigabytes", "ms"),
    [
        ("the loss: forward and backward", 433, 36.8, 29.3),
        ("an MoE block of DeepSeek-V2-Lite: forward and backward", 100, 18.8, 13.2),
        ("an MoE block of DeepSeek-V2-Lite: the same of a later micro-batch", 94, 17.7, 11.8),
        ("an MoE block of DeepSeek-V2-Lite, weights in bf16: forward and backward", 91, 15.3, 11.8),
        ("an MoE block of DeepSeek-V2-Lite, experts in FP8: forward and backward", 101, 16.3, 12.5),
        (
            "an MoE block of DeepSeek-V2-Lite, experts in FP8: the same of a later micro-batch",
            95,
            15.7,
            11.3,
        ),
        ("an MoE block of Qwen3-30B-A3B: forward and backward", 102, 19.9, 12.4),
        ("an MoE block of Qwen3-30B-A3B: the same of a later micro-batch", 100, 18.6, 11.4),
        ("an MoE block of Qwen3-30B-A3B, weights in bf16: forward and backward", 96, 16.1, 10.9),
    ],
)
def test_counts_and_predicted_times_do_not_grow_and_nobody_waits(
    rows: dict[str, Any], case: str, at_most: int, gigabytes: float, ms: float
) -> None:
    row, total = rows[case], rows[case]["total"]
    assert 90 < total["launches"] <= at_most
    assert 5 < (total["bytes_read"] + total["bytes_written"]) / 1e9 <= gigabytes
    assert total["host_waits"] == 0
    assert total["triton"] > 0
    assert total["unknown"] == {}
    assert 5 < row["predicted_ms"] <= ms
    assert row["predicted_ms"] == max(row["device_ms"], row["host_ms"])
    assert row["device_ms"] == pytest.approx(sum(total["predicted_ms"].values()), rel=1e-3)
    assert row["mfu"] == pytest.approx(row["model_flops"] / row["predicted_ms"] / 989e9)


@pytest.mark.parametrize(
    ("model", "weights"),
    [("DeepSeek-V2-Lite", 64 * 3 * 2048 * 1408), ("Qwen3-30B-A3B", 128 * 3 * 2048 * 768)],
)
def test_a_later_micro_batch_reads_the_sums_of_gradients_and_writes_no_more(
    rows: dict[str, Any], model: str, weights: int
) -> None:
    """4 bytes per weight are written, and in a later micro-batch 4 are read. `weights` are those of
    experts, the others of a block have fewer. The products are the same in both. Weights in fp32
    have been rounded by the micro-batch before."""
    first, later = (
        rows[f"an MoE block of {model}, weights in bf16: {name}"]["total"]
        for name in ("forward and backward", "the same of a later micro-batch")
    )
    rounded = rows[f"an MoE block of {model}: the same of a later micro-batch"]["total"]
    assert rounded["kernels"] == later["kernels"]
    assert rounded["bytes_read"] == later["bytes_read"]
    assert first["flops"] == later["flops"] > 4e12
    assert 0 <= later["bytes_read"] - first["bytes_read"] - 4 * weights < 4 * 0.1 * weights
    assert 0 <= later["bytes_written"] - first["bytes_written"] < 1e7


@pytest.mark.parametrize(("model", "most"), [("DeepSeek-V2-Lite", 21), ("Qwen3-30B-A3B", 15)])
def test_context_ranks_launch_their_exchanges_and_wait_for_nothing(
    rows: dict[str, Any], model: str, most: int
) -> None:
    """An exchange is packed, sent and unpacked: gathering, gathering again and the sum of the
    gradients take 9 launches. Attention takes 5 more than one kernel for causal attention of
    equally many queries and keys: a rectangle and what merges it forward, and in backward a
    rectangle and what adds up the gradients of queries and of keys; where gradients of keys are so
    large that they are made in three ranges, 6 more. The kernel of the first norm does not add the
    gradient of the residual stream, since that is the other part's."""
    alone = rows[f"an MoE block of {model}: forward and backward"]["total"]
    shared = rows[f"an MoE block of {model}, a context rank of 8: forward and backward"]["total"]
    assert shared["host_waits"] == 0
    assert shared["launches"] - alone["launches"] == most
    assert shared["unknown"] == {}
    assert shared["predicted_ms"]["attention backward, no mask"] > 10
    assert "flex attention" not in shared["predicted_ms"]


@pytest.mark.parametrize("model", ["DeepSeek-V2-Lite", "Qwen3-30B-A3B"])
def test_expert_ranks_launch_seventeen_kernels_and_the_host_waits_for_sizes_alone(
    rows: dict[str, Any], model: str
) -> None:
    """Seven all-to-alls: of sizes, of the routing there and its gradients back, of rows twice there
    and twice back. A copy of the sizes to the host. Two kernels for the plan, one each to pack and
    unpack the routing and to give its gradients back to slots; two that gather rows and two that
    add them up."""
    for name in ("forward and backward", "the same of a later micro-batch"):
        alone = rows[f"an MoE block of {model}: {name}"]["total"]
        shared = rows[f"an MoE block of {model}, an expert rank of 8: {name}"]
        total = shared["total"]
        assert total["launches"] - alone["launches"] == 7 + 1 + 5 + 4
        assert total["unknown"] == {}
        assert [wait["what"] for wait in shared["waits"]] == ["event.synchronize()"]
        assert total["host_waits"] == 1
        assert 3 < total["predicted_ms"]["exchanges"] < 6
        assert total["predicted_ms"]["experts' weight gradients"] == pytest.approx(
            alone["predicted_ms"]["experts' weight gradients"], rel=0.6
        )
