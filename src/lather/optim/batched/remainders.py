"""Remainders: the bits that rounding drops from the weights of a bf16 parameter, as an entry of the
parameter's state (`weight_rounding="remainder"`).

A remainder belongs to the part of the parameter on this rank, whoever owns its matrices: where a
weight is changed, its remainder changes with it. The entry consists of bytes, (*shape, 2), because
collectives have no int16; as a DTensor it has the placements of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lather.boxes import local
from lather.kernels.remainder import join, split
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.torch_private import foreach_copy_

REMAINDER = "remainder"
"""Name of the entry."""


def remainder_of(state: Mapping[str, Tensor]) -> Tensor:
    """Return the remainder in the state of a parameter: a view as int16, of the parameter's shape
    on this rank."""
    return state[REMAINDER].view(torch.int16).squeeze(-1)


def exact_weight(p: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the part on this rank of a parameter with this state: in fp32 if it has a remainder,
    otherwise as it is."""
    w = local(p)
    return join(w, remainder_of(state)) if REMAINDER in state else w


def set_weight(w: Tensor, x: Tensor, state: Mapping[str, Tensor]) -> None:
    """Set the weight w of a parameter with this state, or its part on this rank, to x in fp32; what
    rounding drops becomes the remainder if the state has one."""
    if REMAINDER in state:
        split(x, w, remainder_of(state))
    else:
        w.copy_(x)


def check_remainder(state: Mapping[str, Any], shape: tuple[int, ...], what: str) -> None:
    """Raise ValueError if the state of a parameter of this shape has a remainder that does not
    fit."""
    r = state.get(REMAINDER)
    if r is not None and (r.dtype, tuple(r.shape)) != (torch.uint8, (*shape, 2)):
        raise ValueError(
            f"{what} has {REMAINDER} {tuple(r.shape)} of {r.dtype}, expected {(*shape, 2)} of "
            "torch.uint8: delete it; the weights are then what they are in bf16"
        )


def fit_remainder(state: dict[str, Tensor], weight: Tensor, *, keeps: bool) -> None:
    """Give the state of a parameter, of which `weight` is on this rank, a remainder of zeros if it
    lacks one and its rule `keeps` it; remove one that the rule does not keep."""
    if not keeps:
        state.pop(REMAINDER, None)
    elif REMAINDER not in state:
        shape = (*weight.shape, 2)
        state[REMAINDER] = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
    elif state[REMAINDER].device != weight.device:
        state[REMAINDER] = state[REMAINDER].to(weight.device)


def wide_weights(
    weights: list[Tensor], dtype: torch.dtype, remainders: Sequence[Any]
) -> list[Tensor]:
    """Return copies of weights in a wider dtype; of bf16 weights with their remainders, if they
    have any."""
    if remainders:
        return [join(w, r).to(dtype) for w, r in zip(weights, remainders, strict=True)]
    wide = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    foreach_copy_(wide, weights)
    return wide


def round_weights(
    wide: list[Tensor], weights: list[Tensor], rounding: str, step: int, remainders: Sequence[Any]
) -> None:
    """Round wide weights into weights of another dtype by a `weight_rounding`, and what is dropped
    into their remainders, if they have any."""
    if rounding == "stochastic":
        for x, w in zip(wide, weights, strict=True):
            round_to_bf16(x.float(), step, out=w)
    elif rounding == "remainder":
        for x, w, r in zip(wide, weights, remainders, strict=True):
            split(x.float(), w, r)
    else:
        foreach_copy_(weights, wide)
