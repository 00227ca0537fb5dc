"""Context parallelism: slices of the sequences on several ranks compute what one process computes
on whole sequences."""

from __future__ import annotations

from engines import Case
from test_engine import ALL, check_gradients

SINKS = {"family": "gpt_oss", "changes": {"sliding_window": 5}}


def test_two_context_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    check_gradients(
        2,
        [
            Case(cp=2, length=8, poison=True),
            Case(cp=2, length=12, family="qwen3_moe", schedule="sequential", poison=True),
            Case(cp=2, length=12, family="llama", gather="block"),
            Case(cp=2, length=12, **SINKS),
            Case(cp=2, length=16, family="qwen3_next"),
            Case(cp=2, length=8, memory="reference"),
            Case(cp=2, length=8, recompute=ALL, memory="recompute", z_loss=0.1),
            Case(cp=2, length=8, balance_level="global_batch", lopsided=True),
            Case(cp=2, length=8, balance_level="micro_batch", defer=False),
            Case(cp=2, length=8, family="deepseek_v3", changes={"num_nextn_predict_layers": 2}),
        ],
    )


def test_four_context_ranks_have_the_loss_and_gradients_of_one_process() -> None:
    two = {"num_nextn_predict_layers": 2}
    check_gradients(
        4,
        [
            Case(cp=4, length=16, poison=True),
            Case(cp=4, length=16, **SINKS),
            Case(cp=4, length=24, family="qwen3_moe", balance_level="micro_batch"),
            Case(cp=2, ep=2, length=8, poison=True, lopsided=True),
            Case(cp=2, ep=2, length=12, family="qwen3_moe", balance_level="global_batch"),
            Case(cp=2, pp=2, length=8, poison=True, z_loss=0.1),
            Case(cp=2, pp=2, length=12, **SINKS, recompute=ALL),
            Case(cp=2, pp=2, length=8, family="deepseek_v3", changes=two, gather="block"),
            Case(cp=2, length=8, memory="recompute"),
            Case(cp=2, replicas=2, length=8, family="qwen3_moe"),
            Case(cp=2, ep=2, length=16, family="qwen3_next", recompute=ALL),
        ],
    )
