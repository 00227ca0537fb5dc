"""The gradient norm, and clipping by it, with the same numbers on any mesh as in one process.

    squared_norm  this rank's part of the sum of squares: every row of every parameter counts once over all pipeline stages, shards and
                  experts, without replicas
    grad_norm     2-norm, by an all-reduce of one number
    clip_         by the factor of `torch.nn.utils.clip_grads_with_norm_`; gradients are not touched if the norm is small enough

Norms do not wait for the device. `clip_` takes a norm that is on the host, where steps that are not finite are skipped.
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
    """Return this rank's part of the squared norm of the gradients of the whole model, in fp64, on `mesh.device`.

    Call it after `collect_gradients`. `known` returns the 2-norms (1-D) of the parts of this rank's gradient of a `LocalParameter.source`
    if they have been measured already, else None.
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
    """Return the dtype of norms: that of the gradients, at least fp32."""
    dtype = torch.float32
    for entry in parameters:
        dtype = torch.promote_types(dtype, entry.parameter.dtype)
    return dtype


@torch.no_grad()
def grad_norm(parameters: LocalParameters, mesh: Mesh) -> Float[Tensor, ""]:
    """Return the 2-norm of the gradients of the whole model, the same on all ranks, on `mesh.device`, in `norm_dtype`.

    All ranks call this after `collect_gradients`. Squares are summed in fp64.
    """
    square = squared_norm(parameters, mesh)
    if mesh.size > 1:
        dist.all_reduce(square)
    return square.sqrt().to(norm_dtype(parameters))


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Multiply the gradients in place by max_norm / (norm + 1e-6) if that is less than 1. A norm that is not finite destroys them."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} is not valid: give a number > 0")
    factor = (max_norm / (norm.cpu() + 1e-6)).clamp(max=1)
    if factor == 1:
        return
    for dtype in {grad.dtype for grad in gradients}:
        foreach_mul_([grad for grad in gradients if grad.dtype == dtype], float(factor.to(dtype)))
