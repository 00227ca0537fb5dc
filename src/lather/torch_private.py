"""The names of torch that Lather uses and that are not public API, all in this file; there is no public name for any of them.

`TorchDispatchMode` sees every operation, those of backward and on the meta device, too: `PeakBytes` counts bytes with it. Torch documents
how to extend it, but in a module with an underscore. Without it that count would be left to each device's allocator; meta has none.

`base_of` is the tensor that a view was made of: `cross_entropy_` marks it, too, as overwritten. Without it a base could go on to be read
as if it still held logits.

`foreach_*` do one operation on a list of tensors, in few kernels on CUDA; torch's own optimizers are built on them. Without them they
become loops of the operation of that name: the same numbers, a kernel launch for each tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "base_of", "foreach_add_", "foreach_copy_", "foreach_mul_", "foreach_norm"]

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that `view` is a view of, as autograd keeps it; None for a tensor that is none."""
    return view._base
