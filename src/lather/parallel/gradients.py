"""One gradient norm and one clip for all ranks: the same numbers as one process would have.

    squared_norm  this rank's share of the sum of squares: every row of every parameter once, over pipeline stages, shards and experts on
                  different ranks, copies left out
    grad_norm     2-norm, by an all-reduce of one number
    clip_         by the factor of `torch.nn.utils.clip_grads_with_norm_`; where the norm is small enough no gradient is touched

Norms do not wait for the device. `clip_` is for a norm that is on the host, since a step that is not finite is left out there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from lather.parallel.local_parameters import LocalParameters
from lather.parallel.mesh import Mesh
from lather.shapes import Float
from lather.torch_private import foreach_mul_, foreach_norm


@torch.no_grad()
def squared_norm(
    parameters: LocalParameters, mesh: Mesh, known: Callable[[Tensor], Tensor | None] = lambda source: None
) -> Float[Tensor, ""]:
    """This rank's summand of the squared norm of the gradients of the whole model, in fp64, on `mesh.device`.

    After `collect_gradients`. `known`: the 2-norms of parts (1-D) of the gradient here of a `LocalParameter.source`, if somebody has
    measured them since.
    """
    norms, unmeasured = [], []
    for entry in parameters.unique():
        measured = known(entry.source)
        if measured is None:
            unmeasured.append(cast(Tensor, entry.parameter.grad))
        else:
            norms.append(measured)
    if unmeasured:
        norms.append(torch.stack(foreach_norm(unmeasured, 2, dtype=norm_dtype(parameters))))
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=mesh.device)


def norm_dtype(parameters: LocalParameters) -> torch.dtype:
    """The dtype of norms: the gradients', fp32 at least."""
    dtype = torch.float32
    for entry in parameters:
        dtype = torch.promote_types(dtype, entry.parameter.dtype)
    return dtype


@torch.no_grad()
def grad_norm(parameters: LocalParameters, mesh: Mesh) -> Float[Tensor, ""]:
    """2-norm of the gradients of the whole model, the same on all ranks, on `mesh.device`; in `norm_dtype`.

    To be called by all ranks after `collect_gradients`. Squares are added in fp64.
    """
    square = squared_norm(parameters, mesh)
    if mesh.size > 1:
        dist.all_reduce(square)
    return square.sqrt().to(norm_dtype(parameters))


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Multiplies by max_norm / (norm + 1e-6) in place, if that is less than 1. With a norm that is not finite nothing is left of them."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} is not valid: give a number > 0")
    factor = (max_norm / (norm.cpu() + 1e-6)).clamp(max=1)
    if factor == 1:
        return
    for dtype in {grad.dtype for grad in gradients}:
        foreach_mul_([grad for grad in gradients if grad.dtype == dtype], float(factor.to(dtype)))
