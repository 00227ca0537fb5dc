"""A plan says of the other value of `parallel.gather` what a plan with that value has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planned_configs import SIZES, config_of, dry_run_of_units

from lather.config.config import Config
from lather.memory import plan_report
from lather.memory.plan import plan
from lather.memory.workers import Assumed, worker_processes
from lather.models.families import FAMILIES


def with_layers(config: Config) -> Config:
    model = FAMILIES["qwen3_moe"].config(**{**SIZES, "num_hidden_layers": 8})
    return replace(config, model=model)


def with_latents(config: Config, **more: Any) -> Config:
    """Return the configuration with another family."""
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name not in ("head_dim", "num_experts", "num_key_value_heads")
    }
    model = FAMILIES["deepseek_v3"].config(**{**sizes, "n_routed_experts": 4, **more})
    return replace(config, model=model)


CASES: dict[str, Config] = {
    "dp": config_of("adamw", parallel={"pp": 2}, batch_size=24),
    "ep": config_of("adamw", parallel={"pp": 2, "ep": 2}, batch_size=24),
    "early": config_of("muon", parallel={"pp": 2, "schedule_memory": "least"}, batch_size=12),
    "mtp": with_latents(
        config_of("adamw", parallel={"pp": 2}, batch_size=24),
        num_hidden_layers=8,
        num_nextn_predict_layers=1,
        tie_word_embeddings=True,
    ),
    "bf16": config_of("adamw", parallel={"pp": 2}, precision="bf16", gradient_dtype="bfloat16"),
    "dense first block, blocks together": with_latents(
        config_of("adamw", parallel={"pp": 2}, batch_size=24),
        num_hidden_layers=12,
        first_k_dense_replace=1,
    ),
    "bf16 weights and gradients, blocks together": with_layers(
        config_of(
            "adamw",
            parallel={"pp": 2, "ep": 2},
            batch_size=12,
            precision="bf16",
            weight_dtype="bfloat16",
            gradient_dtype="bfloat16",
        )
    ),
}
TOGETHER = 200_000
"""Bytes that several blocks have, and one has not."""

ALWAYS = "early"
"""The case that is shortest; `make test-all` has the others."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name != ALWAYS)) for name in CASES]
)
def test_costs_are_those_of_a_plan_with_the_other_value(name: str) -> None:
    """At most 1300 of the bytes sent are those of losses, loads and the gradient norm; 1 % of them
    all is more than twice as much. Bytes kept are equal, but for the gradients of multi-token
    prediction, which come at other times: 2 %."""
    small = TOGETHER if "together" in name else 0
    runs: dict[tuple[str, int], Any] = {}
    with worker_processes() as workers:
        for gather in ("stage", "block"):
            parallel = replace(CASES[name].parallel, gather=gather)  # type: ignore[arg-type]
            config = replace(CASES[name], parallel=parallel)
            for rank in (0, 2):
                runs[gather, rank] = workers.submit(
                    dry_run_of_units, config, 4, Assumed(), rank, small
                )
        costs = {key: run.result(timeout=120).gathering for key, run in runs.items()}
    for rank in (0, 2):
        for gather, other in (("stage", "block"), ("block", "stage")):
            walked, real = costs[gather, rank][other], costs[other, rank][other]
            assert walked.sent == pytest.approx(real.sent, abs=1300)
            assert walked.kept == pytest.approx(real.kept, rel=0.02 if name == "mtp" else 0)
        assert costs["stage", rank]["block"].sent > 3 * costs["stage", rank]["stage"].sent


def test_a_plan_shows_both_values_in_a_line() -> None:
    planned = plan(config_of("adamw", parallel={"pp": 2}), 4, Assumed())
    (line,) = (line for line in plan_report.remarks(planned, None) if "parallel.gather" in line)
    rank, costs = planned.largest.rank, planned.largest.gathering
    kept, sent = (f"{x / 2**20:.2f} MiB" for x in (costs["block"].kept, costs["block"].sent))
    assert line.startswith(f"gathered parameters, and gradients, of rank {rank}: parallel.gather")
    assert line.endswith(f"; 'block' keeps at most {kept} and sends {sent} in a step")
    stored = plan_report.to_json(planned)["ranks"][0]["gathering"]
    assert stored.keys() == {"stage", "block"}
    assert stored["block"].keys() == {"kept", "sent"}
    alone = plan(config_of("adamw", parallel={"pp": 2}), 2, Assumed())
    assert not [line for line in plan_report.remarks(alone, None) if "parallel.gather" in line]
