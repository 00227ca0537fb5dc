"""All names of torch that Lather uses and that are not public API; torch has no public name for any
of them.

`TorchDispatchMode` intercepts every operation, including those of the backward pass and on the meta
device. Torch documents how to subclass it, but its module has an underscore. The alternative is
each device's allocator; meta has none.

`base_of` returns the tensor of which another is a view. `cross_entropy_` marks it as overwritten
too; otherwise autograd could read the base as if it still held logits.

`disable_dynamo` excludes a function from `torch.compile`; the public `torch.compiler.disable`
imports the compiler at once. Without it, compiling an optimizer's step would trace every branch of
its engine.

`foreach_*` apply one operation to a list of tensors in few CUDA kernels, as torch's own optimizers
do. The alternative is a loop with the same results and one kernel launch per tensor.

`fused_adamw_` is the kernel of `torch.optim.AdamW(fused=True)`. The public function would work too,
but it increments a step count for each tensor, which takes as long as the kernel for a hundred
small tensors.

`fused_sdp_choice` returns the kernel that `F.scaled_dot_product_attention` would call, because that
function's form of queries, keys and values depends on it. The public `can_use_*` functions of
`torch.backends.cuda` tell which kernels could be called, but not which of them torch prefers on
this GPU, with this cuDNN, and with the user's switches.

`fused_sgd_` is the kernel of `torch.optim.SGD(fused=True)`, which scales and adds in one pass. The
alternative is a product and a sum, which read and write the weights twice.

`get_fp32_precision` and `set_fp32_precision` read and set the fp32 precision of one operation of a
backend ("matmul"), or of all of them ("all"; "generic" stands for all backends). The public
attribute of oneDNN's operations as a whole, `torch.backends.mkldnn.fp32_precision`, reads that
value but sets the one for all backends.

`all_gather_single` and `reduce_scatter_single` are public, but under other names before torch 2.13,
which warns of the older ones.

`chunk_cat` cuts tensors into chunks along a dim, pads these, and copies them side by side into an
array, as a reduce-scatter needs them, with one kernel on a GPU. The alternative is a copy for each
chunk.

`dualpipev_actions` returns the DualPipeV table of `torch.distributed.pipelining`. torch creates it
in the constructor of a schedule, which requires real stages and process groups; the functions that
do the work need only two numbers. The alternative is a copy of the table.

`cpu_attention` and `cpu_attention_backward` are the kernels that `F.scaled_dot_product_attention`
calls on a CPU. The public function does not return the log-sum-exp, by which attention to different
keys is merged.

`cudnn_attention` and `cudnn_attention_backward` are cuDNN's kernels, which that function calls on
NVIDIA's GPUs from compute capability 9.0. Context ranks need their log-sum-exps for the same
reason. The public `torch.nn.attention.flex_attention` returns these, too, at about 60 % of the
rate.

`saved_tensors_hooks_in_force` returns the hooks that receive the tensors that autograd saves.
Nested hooks hide the outer ones. Code that recomputes some tensors in backward must pass the others
on to them; otherwise `lather profile` and torch's checkpointing would miss attention.

`new_group_of` creates a process group that only its own ranks know of. If the default group is
bound to a device, torch would instead split that group's communicator, which waits for ranks that
do not call; the binding has no public name.

`set_timeout` limits how long the ranks of a group wait: a DeviceMesh creates groups with torch's
default, whatever the user asked for.

`linalg_eigh` is the operation behind `torch.linalg.eigh`, as an operation counter sees it. The
counter has no formula for it and would leave its flops out.

`record_memory_history` and `dump_memory_snapshot` record a GPU's allocations and write them to a
file, in the form that https://docs.pytorch.org/memory_viz reads. torch's documentation of memory
describes both by these names; the public statistics have sums only.

`profiler_is_on` tells whether a profiler records, so that ranges cost next to nothing without one.
The public `record_function` takes its time in either case.

`recompile_limit` sets how many variants of a function `torch.compile` makes before it gives up:
torch 2.13 has a public argument for that, torch 2.11 has none. `recompile_limit_hit` is the error
that it then raises.

`register_python_device` adds a device to torch whose operations are implemented in Python; `lather
bench launches` runs the branches for GPUs on it. The public way to add a device requires a C++
library. `fake_tensors` are tensors without storage on any device: without them shapes could only be
run on the meta device, for which no branch for GPUs is taken. `fake_tensors_behave` corrects two
things while they are in use: their `tolist()` reads element by element, and `torch.tensor` would
need memory on the device.

`dtensor_over` makes a DTensor over a view. `DTensor.from_local` would give the DTensor itself the
view's offset in its storage, and `torch.distributed.checkpoint.async_save` then looks for a storage
that a DTensor does not have. `dtensor_like` does not check its arguments and is 15 times as fast,
for gradients, which are made anew at every step, and for parts that are not on the mesh's device.

`is_flattened` reads the mark that FSDP1 sets on flat parameters, and on those of which it has made
flat pieces. Shapes alone do not tell a piece of a matrix from a vector.

`memory_tracker` is torch's own count of the bytes of tensors (`MemTracker`); tests compare Lather's
count with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

from lather.errors import UserError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

VERSIONS = "torch >= 2.11 and < 2.14"
"""Versions of torch whose private names have been checked and tested."""

STAGES_OF_A_RANK = 2
"""Number of stages for which torch looks ahead for parameters to gather: all that a rank of
DualPipeV has. torch's default, 3, gives the same table, but searches the rest of the table for a
third stage at every action: 10 s instead of 0.3 s for 64 ranks and 512 micro-batches."""

TorchDispatchMode = _python_dispatch.TorchDispatchMode
all_gather_single: Any = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)
chunk_cat = torch._chunk_cat
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
disable_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adamw_ = torch._fused_adamw_
fused_sdp_choice = torch._fused_sdp_choice
fused_sgd_ = torch._fused_sgd_
get_fp32_precision = torch._C._get_fp32_precision_getter
linalg_eigh = torch.ops.aten._linalg_eigh
profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled
reduce_scatter_single: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)
set_fp32_precision = torch._C._set_fp32_precision_setter


def record_memory_history(*, enabled: bool) -> None:
    """Begin to record the allocations on GPUs, with the lines of Python that made them, or end."""
    torch.cuda.memory._record_memory_history("all" if enabled else None, stacks="python")


def dump_memory_snapshot(path: Path) -> None:
    """Write what was recorded of the allocations so far."""
    torch.cuda.memory._dump_snapshot(str(path))


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor of which `view` is a view, as autograd records it; None if it is not a
    view."""
    return view._base


def dtensor_over(part: Tensor, mesh: Any, placements: Sequence[Any], like: Tensor) -> Tensor:
    """Return a DTensor with the shape and strides of `like` whose part on this rank is `part`,
    which may be a view."""
    from torch.distributed.tensor import DTensor

    empty = part.new_empty(()).expand(part.shape)
    x = DTensor.from_local(
        empty, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    x._local_tensor = part
    return x


def dtensor_like(part: Tensor, like: Any) -> Tensor:
    """Return a DTensor whose part on this rank is `part`, which may be a view, and which has the
    shape, dtype and placements of `like`."""
    made: Tensor = type(like)(part, like._spec, requires_grad=False)
    return made


def is_flattened(p: Tensor) -> bool:
    """Whether FSDP1 (`FullyShardedDataParallel`) manages the parameter as a part of a flat one."""
    return bool(getattr(p, "_fsdp_flattened", False))


def saved_tensors_hooks_in_force() -> Hooks | None:
    """Return the hooks of the innermost `torch.autograd.graph.saved_tensors_hooks` block around
    this call; None outside of any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def memory_tracker() -> Any:
    """Return torch's `MemTracker` without its module hooks, which allow one call per module, while
    each micro-batch calls every module."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModules()  # type: ignore[assignment]
    return tracker


class _NoModules(nullcontext[None]):
    """The part of a module tracker that `MemTracker` uses."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *hooks: object) -> None: ...

    def clear_user_hooks(self) -> None: ...


@contextmanager
def recompile_limit(limit: int) -> Iterator[None]:
    """Inside the block a function is compiled for up to `limit` kinds of arguments, or for more if
    the caller has set more."""
    config: Any = import_module("torch._dynamo.config")
    before = config.recompile_limit
    config.recompile_limit = max(before, limit)
    try:
        yield
    finally:
        config.recompile_limit = before


def recompile_limit_hit() -> type[Exception]:
    """Return the class of the error for a function that is compiled as one graph and has reached
    the limit. Imported here because the import is slow."""
    error: type[Exception] = import_module("torch._dynamo.exc").FailOnRecompileLimitHit
    return error


def register_python_device(name: str, module: object) -> None:
    """Register a device `name` with torch that `module` drives, as `torch.cuda` drives CUDA
    devices. A process can have only one. Autocast does not change its operations."""
    import_module("torch.utils.backend_registration")._setup_privateuseone_for_python_backend(
        name, module
    )
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    library.fallback(torch.library.fallthrough_kernel)
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""Registered libraries; torch removes what they registered when they are deleted."""


def fake_tensors() -> tuple[type[Tensor], type[TorchDispatchMode]]:
    """Return the class of fake tensors, and the mode in which operations on them run. Imported here
    because the import is slow."""
    module = import_module("torch._subclasses.fake_tensor")
    return module.FakeTensor, module.FakeTensorMode


@contextmanager
def fake_tensors_behave() -> Iterator[None]:
    """Inside the block, `tolist()` of a fake tensor copies it to the CPU first, and `torch.tensor`
    creates its elements on the CPU, for any device."""
    fake: Any = fake_tensors()[0]
    own, lifts = fake.tolist, torch._C._only_lift_cpu_tensors()
    fake.tolist = lambda x: x.cpu().tolist()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        fake.tolist = own
        torch._C._set_only_lift_cpu_tensors(lifts)


IMPORTED_LATE = "torch._dynamo"
"""Module that torch imports at a first optimizer step, which takes half a second."""

FAKE = "fake_on_"
"""Prefix of the names of backends whose other ranks do not exist."""


def host_backend() -> str:
    """Return the backend for groups on the CPU: gloo, or the default group's if its other ranks do
    not exist."""
    own = dist.get_backend()
    return str(own) if own.startswith(FAKE) else "gloo"


def start_fake_process_group(rank: int, world_size: int, device: torch.device) -> None:
    """Create a default process group whose other ranks do not exist: every operation returns at
    once and transfers nothing."""
    module = import_module("torch.testing._internal.distributed.fake_pg")
    name = FAKE + device.type
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name, module._create_fake_pg, extended_api=True, devices=[device.type, "cpu"]
        )
    dist.init_process_group(name, rank=rank, world_size=world_size, store=module.FakeStore())


def check_torch_version() -> None:
    """Raise UserError unless the private names of this torch version are known."""
    major, minor = torch.__version__.split(".")[:2]
    if not (2, 11) <= (int(major), int(minor)) < (2, 14):
        raise UserError(
            f"torch {torch.__version__} is not supported for training on several ranks: install "
            f"{VERSIONS}"
        )


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of all later operations of the group."""
    import_module("torch.distributed.distributed_c10d")._set_pg_timeout(timeout, group)


def new_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create a process group; all of its ranks call this, and no others. Its communicator is
    created by the first operation of all its ranks."""
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True)
    finally:
        default.bound_device_id = bound


def dualpipev_actions(num_ranks: int, num_micro_batches: int) -> list[list[Any]]:
    """Return torch's actions by rank, each with `stage_index`, `computation_type.value`,
    `microbatch_index` and `sub_actions`.

    `num_micro_batches` must be at least 2 * num_ranks. Raises UserError if this torch has no such
    table.
    """
    num_stages = STAGES_OF_A_RANK * num_ranks
    sizes = SimpleNamespace(pp_group_size=num_ranks, _n_microbatches=num_micro_batches)
    try:
        schedules = import_module("torch.distributed.pipelining.schedules")
        chunks = {
            rank: schedules.ScheduleDualPipeV._calculate_single_rank_operations(sizes, rank)
            for rank in range(num_ranks)
        }
        gathered = {
            rank: schedules._add_unshard_reshard(actions, STAGES_OF_A_RANK)
            for rank, actions in chunks.items()
        }
        reduced = {
            rank: schedules._add_reduce_grad(actions, num_micro_batches)
            for rank, actions in gathered.items()
        }
        table = schedules._add_send_recv(
            reduced, lambda stage: min(stage, num_stages - 1 - stage), num_stages
        )
        return [table[rank] for rank in range(num_ranks)]
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"torch {torch.__version__} does not make DualPipeV's table as torch 2.11 to 2.13 do "
            f"({error!r}): install one of these"
        ) from error
