"""`lather bench pipeline` on two ranks and small sizes: its whole path, the counts that any machine
must show, and that it can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from benchmarks import pipeline
from benchmarks.check import CheckError
from benchmarks.pipeline import PipelineJobs, bytes_rows, time_rows
from benchmarks.pipeline_bubble import inner_durations
from benchmarks.pipeline_measure import BytesJob, TimeJob
from benchmarks.pipeline_ranks import PipelineCase
from benchmarks.pipeline_report import summary
from lather.config.config import ParallelConfig
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.parallel.mesh import Mesh
from lather.pipeline.replay import Durations, replay
from lather.pipeline.schedule import Kind, dualpipev

MODEL = DeepseekV2Config(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=60,
    moe_intermediate_size=24,
    num_hidden_layers=4,
    num_attention_heads=2,
    kv_lora_rank=12,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=3,
)
CASE = PipelineCase(MODEL, batch=1, length=17, num_micro_batches=4)
JOBS = PipelineJobs(
    bytes=(
        BytesJob(2, 1, CASE, ("torch", "held", "attention", "ours")),
        BytesJob(2, 1, replace(CASE, num_micro_batches=9), ("torch", "ours")),
    ),
    time=TimeJob(2, 1, CASE, ("torch", "ours")),
    bubble_ranks=(2, 4),
)

WITH_TORCHS_RUNTIME = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="the stages of torch 2.11 send to their own rank at first, which gloo cannot",
)


@WITH_TORCHS_RUNTIME
def test_two_ranks_go_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pipeline.run(pipeline.PipelineBenchmark(rounds=5, out=tmp_path), JOBS) == 0
    rows = [json.loads(line) for line in (tmp_path / "pipeline-cpu.jsonl").read_text().splitlines()]
    assert [row["benchmark"] for row in rows] == ["bytes"] * 6 + ["time"] * 2 + ["bubble"] * 2
    assert all("commit" in row and "hardware" in row for row in rows)
    peak = {
        (row["config"]["contestant"], row["config"]["micro_batches"]): row
        for row in rows
        if row["benchmark"] == "bytes"
    }
    size = {key: row["peak_bytes"] for key, row in peak.items()}
    assert size["ours", 4] < 0.7 * size["held", 4]
    assert size["ours", 4] < 0.7 * size["torch", 4]
    assert size["attention", 4] < size["ours", 4]
    assert size["ours", 9] < 1.02 * size["ours", 4]
    assert size["torch", 9] > 1.02 * size["torch", 4]
    for row in peak.values():
        assert max(row["check"].values()) < 1e-4
        for rank in row["by_rank"]:
            assert rank["with_temporaries"] >= rank["saved"]
            assert rank["after"] < 0.05 * rank["saved"] or row["config"]["contestant"] == "torch"
    assert all(len(row["round_ms"]) == 5 for row in rows if row["benchmark"] == "time")
    out = " ".join(capsys.readouterr().out.split())
    for line in summary(rows):
        assert " ".join(line.split()) in out
    assert [path.name for path in tmp_path.iterdir()] == ["pipeline-cpu.jsonl"]


def differences_from_torch(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    mesh = Mesh.build(ParallelConfig(pp=2, ep=world_size // 2), torch.device("cpu"))
    case = replace(CASE, dtype=torch.float64)
    measured = BytesJob(2, mesh.ep, case, ("torch", "held", "attention", "ours")).run(mesh)
    return {name: results["check"] for name, results in measured.items()}


@WITH_TORCHS_RUNTIME
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.grid), 4])
def test_torchs_runtime_has_the_same_loss_and_gradients_from_the_same_table(
    world_size: int,
) -> None:
    for checks in run_ranks(differences_from_torch, world_size):
        for name, check in checks.items():
            assert check["error_of_loss"] < 1e-12, name
            assert check["error_of_gradients"] < 1e-12, name


def ranks(**changes: Any) -> list[dict[str, Any]]:
    """Make the results that a single rank could have."""
    counts = {"saved": 100, "with_temporaries": 120, "after": 0}
    check = {"error_of_loss": 0.0, "error_of_gradients": 0.0, **changes}
    return [{"ours": {"counts": counts, "ms": [1.0], "check": check}}]


@pytest.mark.parametrize("key", ["error_of_loss", "error_of_gradients"])
def test_wrong_results_are_not_reported(key: str) -> None:
    bytes_job, time_job = BytesJob(2, 1, CASE, ("ours",)), TimeJob(2, 1, CASE, ("ours",))
    assert len(list(bytes_rows(bytes_job, ranks()))) == 1
    for wrong in (2e-4, float("nan")):
        with pytest.raises(CheckError, match="ours: differs from torch's runtime"):
            list(bytes_rows(bytes_job, ranks(**{key: wrong})))
        with pytest.raises(CheckError, match="ours: differs from torch's runtime"):
            list(time_rows(replace(time_job, contestants=("ours",)), ranks(**{key: wrong})))


def test_durations_are_the_inner_stages_in_milliseconds() -> None:
    given = Durations(
        {Kind.FORWARD: 0.001, Kind.BACKWARD_INPUT: 0.001, Kind.BACKWARD_WEIGHT: 0.001},
        {(Kind.FORWARD, 0): 0.005, (Kind.FORWARD, 2): 0.003},
    )
    steps = [replay(dualpipev(2, 4), given).events] * 2
    # half of the sum of 1 and 3
    assert inner_durations(steps).kinds[Kind.FORWARD] == pytest.approx(2.0)
    assert inner_durations(steps).kinds[Kind.BACKWARD_WEIGHT] == pytest.approx(1.0)
