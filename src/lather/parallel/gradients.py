"""One gradient norm and one clip for all ranks: the same numbers as one process would have.

    grad_norm     2-norm over every row of every parameter once: pipeline stages, shards and experts on different ranks, copies left out
    clip_         by the factor of `torch.nn.utils.clip_grads_with_norm_`

Nothing here waits for the device; the norm is one all-reduce of one number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lather.parallel.local import LocalParameters
from lather.parallel.mesh import Mesh
from lather.shapes import Float
from lather.torch_private import foreach_mul_, foreach_norm


@torch.no_grad()
def grad_norm(parameters: LocalParameters, mesh: Mesh) -> Float[Tensor, ""]:
    """2-norm of the gradients of the whole model, the same on all ranks, on `mesh.device`; in the gradients' dtype, fp32 at least.

    To be called by all ranks after `collect_gradients`. Squares are added in fp64.
    """
    square = torch.zeros((), dtype=torch.float64, device=mesh.device)
    gradients = parameters.unique_gradients()
    dtype = torch.float32
    for entry in parameters:
        dtype = torch.promote_types(dtype, entry.parameter.dtype)
    if gradients:
        square += torch.stack(foreach_norm(gradients, 2, dtype=dtype)).double().square().sum()
    if mesh.size > 1:
        dist.all_reduce(square)
    return square.sqrt().to(dtype)


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Multiplies by max_norm / (norm + 1e-6) in place, if that is less than 1. With a norm that is not finite nothing is left of them."""
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} is not valid: give a number > 0")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for dtype in {grad.dtype for grad in gradients}:
        foreach_mul_([grad for grad in gradients if grad.dtype == dtype], factor.to(dtype))
