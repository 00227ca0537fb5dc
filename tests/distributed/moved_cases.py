"""Does to the state and the weights of spread parameters what users do between steps: moves them,
takes state dicts as room for a checkpoint, and keeps graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import LAYOUTS, trained
from sharded_state_cases import KINDS, Run, differing
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon

FREQUENCY = 3
STEPS = 7
RULES: tuple[type[MatrixOptimizer], ...] = (AdamW, Muon, SOAP, KLSOAP, SOAPMuon)


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def entries(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for state in optimizer.state.values() for x in state.values()]


def moved_differences(rank: int, world_size: int) -> list[str]:
    """Name the layouts and rules for which moving all state and all weights changes a bit, or holds
    memory, or for which `state_dict` has other values than the state."""
    wrong = []
    gc.disable()
    for kind, dtype in KINDS[1::2]:
        expected = [p.detach() for p in trained(kind, dtype, STEPS, FREQUENCY)[0]]
        for name, layout in LAYOUTS[world_size].items():
            run = Run(kind, dtype, layout)
            for step in range(STEPS):
                run.steps(range(step, step + 1))
                optimizer = run.optimizer
                before = whole(optimizer.state_dict()) if step == FREQUENCY else {}
                memory = memory_of([*entries(optimizer), *map(local, run.model.parameters())])
                for x in entries(optimizer):
                    x.data = x.data.clone()
                for p in run.model.parameters():
                    torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
                if any(storage() is not None for storage in memory):
                    wrong.append(f"{name}, {kind}: memory is held after step {step}")
                after = whole(optimizer.state_dict()) if before else {}
                if not all(torch.equal(x, after[key]) for key, x in before.items()):
                    wrong.append(f"{name}, {kind}: state_dict after step {step}")
            wrong += [f"{name}, {kind}: parameter {i}" for i in differing(run, expected)]
    gc.enable()
    return wrong


def memory_of(tensors: Iterable[Tensor]) -> list[weakref.ref[Any]]:
    return [weakref.ref(x.untyped_storage()) for x in tensors if x.numel()]


def whole(saved: dict[str, Any]) -> dict[tuple[int, str], Tensor]:
    found = {}
    for number, state in saved["state"].items():
        for key, x in state.items():
            found[number, key] = (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
    return found


class Net(nn.Module):
    """Matrices of several shapes, experts and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.experts = nn.Parameter(torch.randn(4, 64, 32))


def sharded(cls: type[MatrixOptimizer], **options: Any) -> tuple[Net, MatrixOptimizer]:
    net = Net()
    fully_shard(net)
    groups = [
        {"params": [p for p in net.parameters() if p.dim() < 3]},
        {"params": [net.experts], "matrix_layout": "per_expert"},
    ]
    return net, cls(groups, lr=1e-2, **options)  # type: ignore[call-arg]


def steps(net: Net, optimizer: MatrixOptimizer, numbers: range) -> None:
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        for p in net.parameters():
            grad = torch.randn(p.shape, generator=generator)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()


def alive_bytes(*tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of the storages of all these tensors, each once."""
    found = {x.untyped_storage() for some in tensors for x in some}
    return sum(storage.nbytes() for storage in found)


def room_differences(rank: int, world_size: int) -> list[str]:
    """Name the rules for which loading takes too much memory, or whose state dict, taken as room
    for a checkpoint before the first step, is not what it should be after a load or after steps."""
    wrong = []
    for cls in RULES:
        for options in ({}, {"ownership": "replicated"}) if cls is SOAP else ({},):
            net, optimizer = sharded(cls, **options)
            steps(net, optimizer, range(4))
            saved = get_optimizer_state_dict(net, optimizer)
            size = alive_bytes(entries(optimizer))
            kept = whole({"state": saved["state"]})
            name = f"{cls.__name__} {options}"

            fresh, resumed = sharded(cls, **options)
            room = get_optimizer_state_dict(fresh, resumed)
            parts = [local(x) for state in room["state"].values() for x in state.values()]
            if alive_bytes(entries(resumed), parts) > 1.55 * size:
                wrong.append(
                    f"{name}: room takes {alive_bytes(entries(resumed), parts) / size:.2f}"
                )
            for key, state in saved["state"].items():  # as torch.distributed.checkpoint loads
                for entry, x in state.items():
                    local(room["state"][key][entry]).copy_(local(x))
            set_optimizer_state_dict(fresh, resumed, room)
            if alive_bytes(entries(resumed), parts) > 1.55 * size:
                wrong.append(
                    f"{name}: a load takes {alive_bytes(entries(resumed), parts) / size:.2f}"
                )
            found = whole({"state": get_optimizer_state_dict(fresh, resumed)["state"]})
            wrong += [f"{name}: {key}" for key, x in kept.items() if not torch.equal(x, found[key])]

            untouched, first = sharded(cls, **options)
            room = get_optimizer_state_dict(untouched, first)
            before = whole({"state": room["state"]})
            steps(untouched, first, range(2))
            after = whole({"state": room["state"]})
            wrong += [
                f"{name}: a step changed {key} of what was taken before"
                for key, x in before.items()
                if not torch.equal(x, after[key])
            ]
            other, plain = sharded(cls, **options)
            steps(other, plain, range(2))
            for p, q in zip(untouched.parameters(), other.parameters(), strict=True):
                if not torch.equal(local(p), local(q)):
                    wrong.append(f"{name}: parameters after a state dict before the first step")
            set_optimizer_state_dict(untouched, first, saved)  # state that was lent long ago
            found = whole({"state": get_optimizer_state_dict(untouched, first)["state"]})
            wrong += [
                f"{name}: {key}, loaded later"
                for key, x in kept.items()
                if not torch.equal(x, found[key])
            ]
    return wrong


def exchanged_differences(rank: int, world_size: int, folder: str) -> list[str]:
    """Name the rules for which room for a checkpoint goes wrong if it is loaded where it was not
    lent, or saved asynchronously."""
    wrong = []
    for cls, options in (*((cls, {}) for cls in RULES), (SOAP, {"ownership": "replicated"})):
        name = f"{cls.__name__} {options}"
        trained, optimizer = sharded(cls, **options)
        steps(trained, optimizer, range(3))
        saved = get_optimizer_state_dict(trained, optimizer)
        expected = whole({"state": saved["state"]})

        def filled(
            net: Net, optimizer: MatrixOptimizer, saved: dict[str, Any], factor: float
        ) -> dict[str, Any]:
            room = get_optimizer_state_dict(net, optimizer)
            for key, state in saved["state"].items():
                for entry, x in state.items():
                    local(room["state"][key][entry]).copy_(local(x) * factor)
            return room

        (one, first), (two, second) = sharded(cls, **options), sharded(cls, **options)
        rooms = filled(one, first, saved, 1.0), filled(two, second, saved, 2.0)
        set_optimizer_state_dict(one, first, rooms[1])
        set_optimizer_state_dict(two, second, rooms[0])
        for net, loaded, factor in ((one, first, 2.0), (two, second, 1.0)):
            found = whole({"state": get_optimizer_state_dict(net, loaded)["state"]})
            wrong += [
                f"{name}: {key} of crossed rooms"
                for key, x in expected.items()
                if not torch.equal(x * factor, found[key])
            ]

        net, early = sharded(cls, **options)
        room = {"optimizer": get_optimizer_state_dict(net, early)}
        before = whole({"state": room["optimizer"]["state"]})
        dcp.async_save(room, checkpoint_id=f"{folder}/{name}").result()  # type: ignore[union-attr]
        steps(net, early, range(2))
        target = {"optimizer": get_optimizer_state_dict(net, early)}
        dcp.load(target, checkpoint_id=f"{folder}/{name}")
        found = whole({"state": target["optimizer"]["state"]})
        wrong += [
            f"{name}: {key} saved before the first step"
            for key, x in before.items()
            if not torch.equal(x, found[key])
        ]
    return wrong


def reset_differences(rank: int, world_size: int) -> list[str]:
    """Name the rules for which a parameter whose state is removed in mid-run does not begin again,
    or for which state of a wrong shape is not refused."""
    wrong = []
    for cls, options in (*((cls, {}) for cls in RULES), (SOAP, {"ownership": "replicated"})):
        name = f"{cls.__name__} {options}"
        (one, first), (two, second) = sharded(cls, **options), sharded(cls, **options)
        for net, optimizer in ((one, first), (two, second)):
            steps(net, optimizer, range(2))
            del optimizer.state[net.layers[1].weight]
            if optimizer is first:
                optimizer.init_state()
            steps(net, optimizer, range(2, 4))
        for (key, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
            if not torch.equal(local(p), local(q)):
                wrong.append(f"{name}: {key} after its state was removed")
        if options:
            state = first.state[one.up.weight]
            state["exp_avg"] = state["exp_avg"][:1, :1]
            try:
                steps(one, first, range(4, 5))
                wrong.append(f"{name}: rows of a wrong shape are accepted")
            except ValueError as error:
                if "exp_avg" not in str(error):
                    wrong.append(f"{name}: {error}")
    return wrong
