"""Trainings with experts in FP8 and scales other than those of blocks, as controls, and how far the
routing of experts in FP8 agrees with that of experts in bf16 that have the same weights.

    block     a scale for each block: `lather.kernels.block_scaled`
    tensor    one scale for all rows that are rounded at once, and one for the weight of each expert
    none      1 for all: what is above 448 becomes 448, and nearly all gradients, being small, 0

Everything but the scales stays as it is: which values are rounded, to what, and the products. This
holds for CPUs, whose experts run in the reference.

Letters: R rows, N columns, B their blocks, E experts, O output and I input size of a weight, P and
Q their blocks, T tokens, K experts per token, L layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lather.checkpoint.folder import Progress
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.kernels.block_scaled import reference
from lather.kernels.swiglu import reference as swiglu_reference
from lather.models.experts import Experts
from lather.models.routing import Router, Routing
from lather.train.validation import Validation

BLOCK_SCALES = "block"
AGREEMENT = "routing_agreement"
"""Name in metrics.jsonl of the share of a validation's choices of experts that bf16 makes, too, by
layer."""
BF16_LOSS = "bf16_validation_loss"
"""Name in metrics.jsonl of the validation loss of the same weights with experts in bf16."""


def tensor_scale(x: Tensor) -> Tensor:
    return (x.abs().amax() / reference.LARGEST).clamp(min=reference.SMALLEST_SCALE)


def no_scale(x: Tensor) -> Tensor:
    return x.new_ones(())


CONTROLS = {"tensor": tensor_scale, "none": no_scale}
"""Functions that return the scale of a tensor in fp32."""


@contextmanager
def expert_scales(name: str) -> Iterator[None]:
    """Inside this context, experts in FP8 have the scales of this name."""
    if name == BLOCK_SCALES:
        yield
        return
    scale_rows, scale_weights = with_scale(CONTROLS[name])
    with (
        patch.object(reference, "scale_rows", scale_rows),
        patch.object(reference, "scale_weights", scale_weights),
        patch.object(swiglu_reference, "scale_rows", scale_rows),
    ):
        yield


def with_scale(scale_of: Callable[[Tensor], Tensor]) -> tuple[Callable[..., None], ...]:
    """Return functions that take the place of the reference's `scale_rows` and
    `scale_weights`."""

    def write(x: Tensor, values: Tensor, scales: Tensor) -> None:
        scale = scale_of(x)
        scales.fill_(scale)
        values.copy_((x / scale).clamp(-reference.LARGEST, reference.LARGEST).to(reference.DTYPE))

    def scale_rows(x_RN: Tensor, values_RN: Tensor, scales_RB: Tensor) -> None:
        write(x_RN.float(), values_RN, scales_RB)

    def scale_weights(weight_EOI: Tensor, values_EOI: Tensor, scales_EPQ: Tensor) -> None:
        stacks = zip(weight_EOI, values_EOI, scales_EPQ, strict=True)
        for weight_OI, values_OI, scales_PQ in stacks:
            write(weight_OI.to(torch.bfloat16).float(), values_OI, scales_PQ)

    return scale_rows, scale_weights


@contextmanager
def logged_agreement() -> Iterator[None]:
    """Inside this context, every validation of a run with experts in FP8 is repeated with experts
    in bf16, and its row in metrics.jsonl says how far they agree (`AGREEMENT`, `BF16_LOSS`). With
    several held-out sets, or averaged weights, that is the first validation."""
    validation_loss, run = Engine.validation_loss, Validation.run
    fields: dict[str, Any] = {}

    def compared_loss(engine: Engine, batch: Batch) -> float | None:
        if fields:
            return validation_loss(engine, batch)
        loss, chosen = choices(lambda: validation_loss(engine, batch), engine)
        with experts_in_bf16(engine):
            fields[BF16_LOSS], of_bf16 = choices(lambda: validation_loss(engine, batch), engine)
        fields[AGREEMENT] = [agreement(*pair) for pair in zip(chosen, of_bf16, strict=True)]
        return loss

    def run_with_agreement(validation: Validation, progress: Progress) -> Any:
        fields.clear()
        row = run(validation, progress)
        return None if row is None else {**row, **fields}

    with (
        patch.object(Engine, "validation_loss", compared_loss),
        patch.object(Validation, "run", run_with_agreement),
    ):
        yield


def choices(
    compute: Callable[[], float | None], engine: Engine
) -> tuple[float | None, list[list[Tensor]]]:
    """Return the result of a function, and by layer the experts (T, K) to which the routers send
    the tokens of each micro-batch meanwhile."""
    routers = engine.part.routers()
    chosen_L: list[list[Tensor]] = [[] for _ in routers]

    def keep(chosen: list[Tensor], router: Router, inputs: Any, routing: Routing) -> None:
        chosen.append(routing.experts_TK)

    hooks = [
        router.register_forward_hook(partial(keep, chosen))
        for router, chosen in zip(routers, chosen_L, strict=True)
    ]
    try:
        return compute(), chosen_L
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def experts_in_bf16(engine: Engine) -> Iterator[None]:
    """Inside this context, the experts that compute in FP8 compute in bf16."""
    in_fp8 = [each for each in engine.part.modules() if isinstance(each, Experts) and each.in_fp8]
    for experts in in_fp8:
        experts.in_fp8 = False
    try:
        yield
    finally:
        for experts in in_fp8:
            experts.in_fp8 = True


def agreement(chosen: list[Tensor], others: list[Tensor]) -> float:
    """Return the share of the choices (T, K) of experts that are among those which `others` has for
    the same token. Padding, -1, is no choice."""
    chosen_TK, other_TK = torch.cat(chosen), torch.cat(others)
    is_shared_TK = (chosen_TK.unsqueeze(2) == other_TK.unsqueeze(1)).any(2)
    return float(is_shared_TK[chosen_TK >= 0].float().mean())
