"""The names of torch that Lather uses and that are not public API, all in this file; there is no public name for any of them.

`TorchDispatchMode` sees every operation, those of backward and on the meta device, too: `PeakBytes` counts bytes with it. Torch documents
how to extend it, but in a module with an underscore. Without it that count would be left to each device's allocator; meta has none.

`base_of` is the tensor that a view was made of: `cross_entropy_` marks it, too, as overwritten. Without it a base could go on to be read
as if it still held logits.

`foreach_*` do one operation on a list of tensors, in few kernels on CUDA; torch's own optimizers are built on them. Without them they
become loops of the operation of that name: the same numbers, a kernel launch for each tensor.

`prepare_sharding`, `start_gradient_reduction` and `finish_gradient_reduction` are FSDP2 outside its hooks: a pipeline calls parts of a
module, micro-batch by micro-batch, so that no hook is at the right place, and gradients cannot be reduced by public names but in a backward
pass through a sharded module. They are known for the torch versions that `check_torch_version` lets pass, and for no others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "TorchDispatchMode",
    "base_of",
    "check_torch_version",
    "finish_gradient_reduction",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "prepare_sharding",
    "start_gradient_reduction",
]

VERSIONS = "torch >= 2.11 and < 2.14"
"""Those whose private names were read and tested."""

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that `view` is a view of, as autograd keeps it; None for a tensor that is none."""
    return view._base


def check_torch_version() -> None:
    """Raises UserError unless this torch is one whose names of the pipeline and of FSDP2 are known."""
    from lather.errors import UserError

    major, minor = torch.__version__.split(".")[:2]
    if not (2, 11) <= (int(major), int(minor)) < (2, 14):
        raise UserError(f"torch {torch.__version__} is not supported for training on several ranks: install {VERSIONS}")


def prepare_sharding(root: nn.Module) -> None:
    """What FSDP2 does before the first forward pass through `root`: its sharded modules get common streams and one buffer to reduce from.

    `root` and modules in it have been given to `fully_shard`, each at most once. Raises UserError if this torch is not supported.
    """
    state = _state(root)
    _name(state, "_root_post_backward_final_callback")
    _name(state, "_lazy_init")()
    for group in _groups(state):
        _name(group, "post_backward")


def start_gradient_reduction(root: nn.Module) -> None:
    """Launches the reduction of all gradients of the unsharded parameters in `root`, which are gone after that.

    A group of parameters none of which has a gradient takes no part, nor does a parameter without one: see that all have one.
    """
    for group in _groups(_state(root)):
        group.post_backward()


def finish_gradient_reduction(root: nn.Module) -> None:
    """The current stream waits for what `start_gradient_reduction` launched; then sharded parameters may be read for their gradients."""
    _state(root)._root_post_backward_final_callback()


def _state(module: nn.Module) -> Any:
    """What FSDP2 knows of a module that was given to `fully_shard`."""
    from torch.distributed.fsdp import fully_shard

    check_torch_version()
    state = _name(fully_shard, "state")(module)
    assert state is not None
    return state


def _groups(root_state: Any) -> list[Any]:
    """The parameter groups in a root; a sharded module has one, or none if all of its parameters are in modules sharded on their own."""
    groups = [_name(state, "_fsdp_param_group") for state in _name(_name(root_state, "_state_ctx"), "all_states")]
    return [group for group in groups if group is not None]


def _name(owner: Any, name: str) -> Any:
    from lather.errors import UserError

    if not hasattr(owner, name):
        what = getattr(owner, "__name__", type(owner).__name__)
        raise UserError(f"torch {torch.__version__} has no {what}.{name}, which sharded gradients are reduced with: install {VERSIONS}")
    return getattr(owner, name)
