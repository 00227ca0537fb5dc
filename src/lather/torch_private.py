"""The names of torch that Lather uses and that are not public API, all in this file; there is no public name for any of them.

`TorchDispatchMode` sees every operation, those of backward and on the meta device, too: `PeakBytes` counts bytes with it. Torch documents
how to extend it, but in a module with an underscore. Without it that count would be left to each device's allocator; meta has none.

`base_of` is the tensor that a view was made of: `cross_entropy_` marks it, too, as overwritten. Without it a base could go on to be read
as if it still held logits.

`disable_dynamo` marks what `torch.compile` is to run as it is; the public `torch.compiler.disable` imports the compiler at once. Without it
compiling an optimizer's step would trace every branch of its engine.

`foreach_*` do one operation on a list of tensors, in few kernels on CUDA; torch's own optimizers are built on them. Without them they
become loops of the operation of that name: the same numbers, a kernel launch for each tensor.

`fused_adamw_` is the kernel of `torch.optim.AdamW(fused=True)`; the public function wants a step count for every tensor and adds one to
each, which for a hundred small tensors takes as long as the kernel. Without it that function would do.

`prepare_sharding`, `start_gradient_reduction` and `finish_gradient_reduction` are FSDP2 outside its hooks: a pipeline calls parts of a
module, micro-batch by micro-batch, so that no hook is at the right place, and gradients cannot be reduced by public names but in a backward
pass through a sharded module. They are known for the torch versions that `check_torch_version` lets pass, and for no others.

`dualpipev_actions` is the DualPipeV table of `torch.distributed.pipelining`. torch makes it while it constructs a schedule, which wants
live stages and process groups; the functions that do the work need two numbers of these. Without them Lather would carry a copy of the
table.

`saved_tensors_hooks_in_force` are the hooks that see what autograd keeps. Hooks inside others hide these, and what makes some tensors again
in backward must not hide the rest from a profile; without the name `lather profile` and torch's checkpointing would miss attention.

`new_group_of` makes a group that only its own ranks know of. Where the default group is bound to a device torch would split that group's
communicator instead, for which it waits for ranks that do not call; the binding has no public name.

`set_timeout` bounds how long the ranks of a group wait: a DeviceMesh makes groups with torch's defaults, whatever the user asked for.

`linalg_eigh` is what `torch.linalg.eigh` is to a counter of operations, which has no formula for it; its flops would be left out.

`register_python_device` gives torch a device whose operations are Python's: `lather bench launches` runs the branches for GPUs on it. The
public way to add a device wants a library in C++. `fake_tensors` are tensors of any device without storage: without them shapes could be
run on the meta device alone, for which nothing branches as for a GPU. While they are in use `fake_tensors_behave` mends two things: their
`tolist()` reads element by element, and `torch.tensor` would want memory on the device.

`memory_tracker` is torch's own count of the bytes of tensors (`MemTracker`), a second opinion in benchmarks; else ours would be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "Hooks",
    "TorchDispatchMode",
    "base_of",
    "check_torch_version",
    "disable_dynamo",
    "dualpipev_actions",
    "fake_tensors",
    "fake_tensors_behave",
    "finish_gradient_reduction",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "fused_adamw_",
    "linalg_eigh",
    "memory_tracker",
    "new_group_of",
    "prepare_sharding",
    "register_python_device",
    "saved_tensors_hooks_in_force",
    "set_timeout",
    "start_gradient_reduction",
]

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

VERSIONS = "torch >= 2.11 and < 2.14"
"""The releases whose private names were read and tested."""

STAGES_OF_A_RANK = 2
"""How many stages torch looks ahead for parameters to gather: all that a rank of DualPipeV has. Its default, 3, gives the same table, but
looks for a third stage through the rest of the table at every action: 10 s instead of 0.3 s for 64 ranks and 512 micro-batches."""

disable_dynamo = torch._disable_dynamo  # type: ignore[attr-defined]
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adamw_ = torch._fused_adamw_
linalg_eigh = torch.ops.aten._linalg_eigh


def base_of(view: Tensor) -> Tensor | None:
    """The tensor that `view` is a view of, as autograd keeps it; None for a tensor that is none."""
    return view._base


def saved_tensors_hooks_in_force() -> Hooks | None:
    """The hooks of the innermost `torch.autograd.graph.saved_tensors_hooks` around this call; None if there are none."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def memory_tracker() -> Any:
    """torch's `MemTracker`, that counts tensors and not by modules: its hooks allow each module one call, and micro-batches are many."""
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker._mod_tracker = _NoModules()  # type: ignore[assignment]
    return tracker


class _NoModules(nullcontext[None]):
    """The part of a tracker of modules that `MemTracker` asks for."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *hooks: object) -> None: ...

    def clear_user_hooks(self) -> None: ...


def register_python_device(name: str, module: object) -> None:
    """torch knows a device `name` afterwards, driven by `module` as CUDA is by `torch.cuda`; there can be one in a process. Autocast leaves
    its operations as they are."""
    import_module("torch.utils.backend_registration")._setup_privateuseone_for_python_backend(name, module)
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    library.fallback(torch.library.fallthrough_kernel)
    _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
"""Libraries; what they register is gone when they are."""


def fake_tensors() -> tuple[type[Tensor], type[TorchDispatchMode]]:
    """The class of fake tensors, and the mode in which operations on them run. Imported only here: it takes a while."""
    module = import_module("torch._subclasses.fake_tensor")
    return module.FakeTensor, module.FakeTensorMode


@contextmanager
def fake_tensors_behave() -> Iterator[None]:
    """Inside, `tolist()` of fake tensors copies to the CPU and reads that, and `torch.tensor` makes its elements there, on any device."""
    fake: Any = fake_tensors()[0]
    own, lifts = fake.tolist, torch._C._only_lift_cpu_tensors()
    fake.tolist = lambda x: x.cpu().tolist()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        fake.tolist = own
        torch._C._set_only_lift_cpu_tensors(lifts)


FAKE = "fake_on_"
"""How the names of such backends begin."""


def host_backend() -> str:
    """The backend of groups that work on the CPU: gloo, or that of a default group whose other ranks do not exist."""
    own = dist.get_backend()
    return str(own) if own.startswith(FAKE) else "gloo"


def start_fake_process_group(rank: int, world_size: int, device: torch.device) -> None:
    """Make the default process group one whose other ranks do not exist: every operation is over at once, and moves nothing."""
    module = import_module("torch.testing._internal.distributed.fake_pg")
    name = FAKE + device.type
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, module._create_fake_pg, extended_api=True, devices=[device.type, "cpu"])
    dist.init_process_group(name, rank=rank, world_size=world_size, store=module.FakeStore())


def check_torch_version() -> None:
    """Raises UserError unless this torch is one whose names of the pipeline and of FSDP2 are known."""
    from lather.errors import UserError

    major, minor = torch.__version__.split(".")[:2]
    if not (2, 11) <= (int(major), int(minor)) < (2, 14):
        raise UserError(f"torch {torch.__version__} is not supported for training on several ranks: install {VERSIONS}")


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the time limit of every later operation of the group."""
    import_module("torch.distributed.distributed_c10d")._set_pg_timeout(timeout, group)


def new_group_of(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A new group; its ranks alone call, all of them. Its communicator is made by its first operation, which they all take part in."""
    default: Any = dist.group.WORLD
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
        return group
    finally:
        default.bound_device_id = bound


def dualpipev_actions(num_ranks: int, num_micro_batches: int) -> list[list[Any]]:
    """torch's actions by rank, each with `stage_index`, `computation_type.value`, `microbatch_index` and `sub_actions`.

    `num_micro_batches` must be at least 2 * num_ranks. Raises UserError if this torch has no such table.
    """
    from lather.errors import UserError

    try:
        return _dualpipev_actions(import_module("torch.distributed.pipelining.schedules"), num_ranks, num_micro_batches)
    except (ImportError, AttributeError, TypeError) as error:
        raise UserError(
            f"torch {torch.__version__} does not make DualPipeV's table as torch 2.11 to 2.13 do ({error!r}): install one of these"
        ) from error


def _dualpipev_actions(schedules: Any, num_ranks: int, num_micro_batches: int) -> list[list[Any]]:
    """The chunks of each rank in order, then FSDP's actions, then the transfers."""
    num_stages = STAGES_OF_A_RANK * num_ranks
    sizes = SimpleNamespace(pp_group_size=num_ranks, _n_microbatches=num_micro_batches)
    chunks = {rank: schedules.ScheduleDualPipeV._calculate_single_rank_operations(sizes, rank) for rank in range(num_ranks)}
    gathered = {rank: schedules._add_unshard_reshard(actions, STAGES_OF_A_RANK) for rank, actions in chunks.items()}
    reduced = {rank: schedules._add_reduce_grad(actions, num_micro_batches) for rank, actions in gathered.items()}
    table = schedules._add_send_recv(reduced, lambda stage: min(stage, num_stages - 1 - stage), num_stages)
    return [table[rank] for rank in range(num_ranks)]


def prepare_sharding(root: nn.Module) -> None:
    """Do what FSDP2 does before the first forward pass through `root`: its sharded modules get common streams and one buffer to reduce
    from.

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
    """FSDP2's record of a module that was given to `fully_shard`."""
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
