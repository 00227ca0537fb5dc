"""Compares optimizers with state in 8 bits on meshes with the same optimizers in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon
from lather.optim.functional import exact_weight

INT8 = torch.int8
SHAPES = ((64, 96), (3, 64, 64), (70, 256), (9,), (64, 96))
MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "fsdp": ((4,), [Shard(0)]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "fsdp x tp": ((2, 2), [Shard(0), Shard(1)]),
}
CODED: dict[str, Any] = {"moments": INT8, "bases": INT8, "factors": INT8}


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer_of(params: Sequence[Tensor], **options: Any) -> MatrixOptimizer:
    """Make SOAP with experts of their own, and AdamW on parameter 2."""
    groups: list[dict[str, Any]] = [
        {"params": [params[0], params[4]]},
        {"params": [params[1]], "matrix_layout": "per_expert"},
        {"params": [params[2], params[3]], "rule": "adamw"},
    ]
    return SOAP(groups, lr=1e-2, precondition_frequency=2, **options)


class Run:
    """The optimizer in one process, or on a mesh."""

    def __init__(self, name: str | None, **options: Any) -> None:
        shape, placements = MESHES[name] if name else ((), [])
        self.mesh = DeviceMesh("cpu", torch.arange(4).view(shape)) if name else None
        self.placements = [placements for _ in SHAPES]
        self.placements[3] = [Shard(0) if x.is_shard() else x for x in placements]
        self.options = options
        self.params = [nn.Parameter(self.spread(i, x)) for i, x in enumerate(values(0))]
        self.optimizer = optimizer_of(self.params, **options)

    def spread(self, i: int, x: Tensor) -> Tensor:
        if self.mesh is None:
            return x
        return distribute_tensor(x, self.mesh, self.placements[i], src_data_rank=None)

    def run(self, steps: range) -> None:
        for step in steps:
            grads = values(100 + step)
            grads[1][step % 3] = 0
            for i, p in enumerate(self.params):
                p.grad = self.spread(i, grads[i])
            self.optimizer.step()

    def reload(self, **options: Any) -> None:
        """Load the state into a new optimizer, with other options."""
        new = optimizer_of(self.params, **{**self.options, **options})
        new.load_state_dict(self.optimizer.state_dict())
        self.optimizer = new

    def stages(self) -> Iterator[str]:
        """Take steps, also after a load, a conversion to fp32, and back, and after changes in
        place; return a name after each stage."""
        for first, state_dtype in ((0, CODED), (3, torch.float32), (5, INT8)):
            if first:
                self.reload(state_dtype=state_dtype)
            self.run(range(first, first + 2))
            yield str(first)
        for group in self.optimizer.param_groups:
            group["state_dtype"] = CODED
        self.run(range(7, 9))
        yield "changed"

    def differing(self, params: list[Tensor], state: dict[int, Any]) -> list[str]:
        """Name the parameters and entries whose bits are not these."""
        wrong = [
            f"parameter {i}"
            for i, (p, q) in enumerate(zip(params, self.params, strict=True))
            if not torch.equal(p, _full(q))
        ]
        return wrong + _differing("state", {"state": state}, self.optimizer.state_dict())


def coded_differences(rank: int, world_size: int) -> list[str]:
    """Name what differs from one process, which is rank 0, after each stage."""
    told: list[Any] = [None]
    if rank == 0:
        alone = Run(None, state_dtype=CODED)
        told[0] = [
            copy.deepcopy((list(alone.params), alone.optimizer.state_dict()["state"]))
            for _ in alone.stages()
        ]
    dist.broadcast_object_list(told, 0)
    wrong = []
    for name in MESHES:
        for ownership in ("whole", "replicated"):
            run = Run(name, state_dtype=CODED, ownership=ownership)
            for stage, expected in zip(run.stages(), told[0], strict=True):
                wrong += [f"{name} {ownership} {stage}: {x}" for x in run.differing(*expected)]
    dist.barrier()
    return wrong


def bytes_of_owners(rank: int, world_size: int) -> tuple[int, int]:
    """Return the bytes of state on this rank, and what the optimizer says of them."""
    run = Run("fsdp", state_dtype=INT8)
    run.run(range(1))
    state = run.optimizer.state.values()
    held = sum(x.nbytes for entries in state for key, x in entries.items() if key != "step")
    told = run.optimizer.state_bytes_of_owners()
    return held, sum(of_owner.get(rank, 0) for of_owner in told.values())


def cut_blocks(rank: int, world_size: int) -> str:
    """Return the refusal of a parameter whose blocks are cut."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    p = nn.Parameter(distribute_tensor(torch.zeros(64, 192), mesh, [Shard(1)]))
    AdamW([p])
    with pytest.raises(ValueError, match="sharded along its last dim") as refusal:
        AdamW([("table", p)], state_dtype=INT8)
    return str(refusal.value)


def changed_differences(rank: int, world_size: int) -> list[str]:
    """Name what differs from one process after options of formats have changed, on two ranks."""
    mesh = DeviceMesh("cpu", torch.arange(2))
    wrong = [*_changed_before_a_step(mesh), *_changed_before_saving(mesh)]
    wrong += [*_changed_rounding(mesh), *_cut_later(mesh)]
    dist.barrier()
    return wrong


def _both(
    mesh: DeviceMesh, cls: Any, shapes: Sequence[tuple[int, ...]], placement: Any, **options: Any
) -> list[tuple[list[nn.Parameter], MatrixOptimizer]]:
    """Make the same optimizer, with a group for each parameter, in one process and on the mesh."""
    dtype = options.pop("dtype", torch.float32)
    made = []
    for is_spread in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        if is_spread:
            params = [distribute_tensor(x, mesh, [placement], src_data_rank=None) for x in params]
        params = [nn.Parameter(x) for x in params]
        made.append((params, cls([{"params": [p]} for p in params], lr=1e-2, **options)))
    return made


def _step(both: list[tuple[list[nn.Parameter], MatrixOptimizer]], step: int) -> None:
    for params, optimizer in both:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if isinstance(p, DTensor):
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        optimizer.step()


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _differing(what: str, one: Any, many: Any) -> list[str]:
    """Name the entries of the states of two state dicts that differ, in keys, dtypes or bits."""
    wrong = []
    for i, entries in one["state"].items():
        theirs = {key: _full(x) for key, x in many["state"][i].items()}
        if entries.keys() != theirs.keys():
            wrong.append(f"{what}, {i}: {sorted(entries)}, {sorted(theirs)}")
            continue
        wrong += [
            f"{what}, {i}/{key}: {x.dtype}, {theirs[key].dtype}"
            for key, x in entries.items()
            if x.dtype != theirs[key].dtype or not torch.equal(x, theirs[key])
        ]
    return wrong


def _changed_before_a_step(mesh: DeviceMesh) -> list[str]:
    """From fp32 to bf16, where ranks own nothing of some parameters."""
    both = _both(mesh, Muon, [(64, 96), (96, 64), (64, 64)], Shard(0))
    _step(both, 0)
    for _, optimizer in both:
        for group in optimizer.param_groups:
            group["state_dtype"] = torch.bfloat16
    _step(both, 1)
    return _differing("before a step", both[0][1].state_dict(), both[1][1].state_dict())


def _changed_before_saving(mesh: DeviceMesh) -> list[str]:
    """To int8, after which the state is saved before the next step."""
    wrong = []
    for cls, ownership in (
        (Muon, "whole"),
        (Muon, "replicated"),
        (AdamW, "whole"),
        (SOAP, "whole"),
        (SOAP, "replicated"),
    ):
        shapes = [(64, 96), (64, 128), (64, 96)]
        both = _both(mesh, cls, shapes, Shard(0), ownership=ownership)
        one, many = both[0][1], both[1][1]
        _step(both, 0)
        (_, coded), _ = _both(mesh, cls, shapes, Shard(0), state_dtype=INT8)
        coded.load_state_dict(one.state_dict())
        for optimizer in (one, many):
            for group in optimizer.param_groups:
                group["state_dtype"] = "int8"
        of_piece = {piece.name for _, piece in many.state_pieces()} - {"step"}
        if any(not key.endswith(("_codes", "_scale", "_diagonal")) for key in of_piece):
            wrong.append(f"{cls.__name__}: pieces {sorted(of_piece)}")
        what = f"before saving, {cls.__name__}, {ownership}"
        wrong += _differing(what, coded.state_dict(), many.state_dict())
        _step(both, 1)
        wrong += _differing(f"after {what}", one.state_dict(), many.state_dict())
    return wrong


def _changed_rounding(mesh: DeviceMesh) -> list[str]:
    """One of two groups of copies gets a remainder after a step."""
    both = _both(mesh, AdamW, [(64, 96), (64, 96)], Replicate(), dtype=torch.bfloat16)
    _step(both, 0)
    for _, optimizer in both:
        optimizer.param_groups[1]["weight_rounding"] = "remainder"
    for step in (1, 2):
        _step(both, step)
    one, many = (
        [exact_weight(p, optimizer.state[p]) for p in params] for params, optimizer in both
    )
    return [
        f"rounding: parameter {i}"
        for i, (x, y) in enumerate(zip(one, many, strict=True))
        if x.dtype != y.dtype or not torch.equal(x, y)
    ]


def _cut_later(mesh: DeviceMesh) -> list[str]:
    """Shards that cut blocks are refused, before anything changes, when a state in int8 is loaded
    and when a group is changed."""
    coded, _ = _both(mesh, AdamW, [(64, 300)], Shard(0), state_dtype=INT8)
    both = _both(mesh, AdamW, [(64, 300)], Shard(1))
    _step([coded], 0)
    _step(both, 0)
    one, many = both[0][1], both[1][1]
    with pytest.raises(ValueError, match=r"parameter 0 with shape .* sharded along its last dim"):
        many.load_state_dict(coded[1].state_dict())
    many.param_groups[0]["state_dtype"] = INT8
    with pytest.raises(ValueError, match="sharded along its last dim"):
        many.step()
    many.param_groups[0]["state_dtype"] = None
    _step(both, 1)
    return _differing("cut later", one.state_dict(), many.state_dict())
