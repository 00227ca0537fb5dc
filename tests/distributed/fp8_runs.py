"""Gradients with `train.fp8` on meshes. Ranks import it without pytest."""

from __future__ import annotations

from engines import Case, Pair, make_pair
from torch import nn

from lather.engine.settings import compute_in_fp8
from lather.models.experts import Experts

ALL = ("attention", "experts", "shared_experts")
WIDE = {"hidden_size": 160}
"""Two blocks of scales."""
CASES = {
    2: [
        Case(ep=2, layers=2, changes=WIDE, schedule="sequential", poison=True),
        Case(
            ep=2,
            layers=2,
            changes=WIDE,
            schedule="sequential",
            recompute=ALL,
            rounded_weights="product",
            poison=True,
        ),
        Case(ep=2, layers=1, family="gpt_oss", schedule="sequential", frees=False),
        Case(pp=2, changes=WIDE, poison=True),
        Case(cp=2, changes=WIDE, length=8),
        Case(changes=WIDE, schedule="sequential", gather="block", rounded_weights="block"),
    ],
    4: [
        Case(pp=2, ep=2, changes=WIDE, lopsided=True, poison=True),
        Case(
            ep=2,
            replicas=2,
            layers=1,
            family="gpt_oss",
            schedule="sequential",
            memory="recompute",
        ),
        Case(pp=2, ep=2, family="deepseek_v3", changes={"num_nextn_predict_layers": 1}),
    ],
}


def use_fp8(model: nn.Module, in_fp8: bool) -> None:
    for module in model.modules():
        if isinstance(module, Experts):
            module.in_fp8, module.memory = in_fp8, "saved"


def gradient_errors(rank: int, world_size: int, cases: list[Case]) -> list[tuple[float, float]]:
    """Return the error of the gradients of this rank's experts for each case, relative to one
    process with experts in FP8, and to one without. All else is in fp64, but partial sums of expert
    ranks are rounded to bf16, which later layers see."""
    return [_errors(make_pair(case)) for case in cases]


def _errors(pair: Pair) -> tuple[float, float]:
    tokens, errors = pair.tokens(), list[float]()
    compute_in_fp8(pair.engine.part, pair.mesh.device)
    pair.run(tokens)
    for in_fp8 in (True, False):
        use_fp8(pair.plain, in_fp8)
        pair.plain.zero_grad()
        pair.plain_gradients(tokens)
        errors.append(_error_of_experts(pair))
    return errors[0], errors[1]


def _error_of_experts(pair: Pair) -> float:
    plain = dict(pair.plain.named_parameters())
    wrong = total = 0.0
    for entry in pair.engine.parameters:
        if "experts." not in entry.info.name or entry.info.is_empty:
            continue
        actual, expected = entry.parameter.grad, plain[entry.info.name].grad
        assert actual is not None
        assert expected is not None
        rows = expected[entry.info.offset : entry.info.offset + entry.info.length]
        wrong += float((actual - rows).square().sum())
        total += float(rows.square().sum())
    return (wrong / total) ** 0.5 if total else 0.0
