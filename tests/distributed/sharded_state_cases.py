"""Saves and loads optimizers of spread parameters with torch's tools for distributed checkpoints,
on one layout and on another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sharded_cases import (
    LAYOUTS,
    SHAPES,
    Layout,
    factor_of,
    gradients,
    make,
    make_spread,
    trained,
    values,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lather.optim import MatrixOptimizer, Muon

Kinds = Sequence[tuple[str, torch.dtype]]
KINDS: Kinds = (
    ("soap", torch.float32),
    ("kl_soap", torch.bfloat16),
    ("stacked_soap", torch.float32),
    ("soap_muon", torch.bfloat16),
    ("mixed", torch.float32),
    ("heads", torch.float32),
    ("shampoo", torch.float32),
    ("psgd_kron", torch.float32),
)
FREQUENCY = 3
SAVED_AFTER = 4
"""Steps before the save, which end in the middle of an interval."""


class Model(nn.Module):
    """A module of the parameters, with names."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__()
        for i, p in enumerate(params):
            self.register_parameter(f"p{i}", p)


class Run:
    """A model, its optimizer and how gradients are given to it."""

    def __init__(self, kind: str, dtype: torch.dtype, layout: Layout | None) -> None:
        """Make the run; without a `layout` its parameters are plain ones of one process."""
        self.spread = (
            None
            if layout is None
            else make_spread(kind, layout, dtype, precondition_frequency=FREQUENCY)
        )
        self.dtype = dtype
        if self.spread is None:
            params = [nn.Parameter(x) for x in values(0, dtype)]
            optimizer = make(kind, params, precondition_frequency=FREQUENCY)
        else:
            params, optimizer = self.spread.params, self.spread.optimizer
        self.model = Model(params)
        self.optimizer: MatrixOptimizer = optimizer

    def steps(self, steps: range, without: Sequence[int] = ()) -> None:
        """Take steps; parameters with a number in `without` get no gradient."""
        for step in steps:
            grads = [
                None if i in without else grad for i, grad in enumerate(gradients(step, self.dtype))
            ]
            if self.spread is not None:
                self.spread.give(grads)
            else:
                for p, grad in zip(self.model.parameters(), grads, strict=True):
                    p.grad = grad
            self.optimizer.step(gradient_factor=factor_of(step))
        self.optimizer.zero_grad()

    def whole(self) -> list[Tensor]:
        if self.spread is not None:
            return self.spread.whole()
        return [p.detach() for p in self.model.parameters()]

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load(self, folder: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def layouts(world_size: int, names: Sequence[str]) -> dict[str, Layout | None]:
    """The layouts with names such as "2 fsdp", and None as "1 plain"."""
    known: dict[str, Layout | None] = {
        f"{world_size} {name}": layout for name, layout in LAYOUTS[world_size].items()
    } | {"1 plain": None}
    return {name: known[name] for name in names if name.startswith(f"{world_size} ")}


def save_all(rank: int, world_size: int, folder: Path, names: Sequence[str], kinds: Kinds) -> None:
    for name, layout in layouts(world_size, names).items():
        for kind, dtype in kinds:
            run = Run(kind, dtype, layout)
            run.steps(range(SAVED_AFTER))
            dcp.save(run.state(), checkpoint_id=folder / f"{name} {kind}")


def load_all(
    rank: int, world_size: int, folder: Path, names: Sequence[str], kinds: Kinds
) -> list[str]:
    """Name the runs that do not go on after loading as if nothing had happened."""
    wrong = []
    for kind, dtype in kinds:
        expected = [p.detach() for p in trained(kind, dtype, SAVED_AFTER + 3, FREQUENCY)[0]]
        for name, layout in layouts(world_size, names).items():
            for saved in sorted(folder.glob(f"* {kind}")):
                run = Run(kind, dtype, layout)
                run.load(saved)
                run.steps(range(SAVED_AFTER, SAVED_AFTER + 3))
                wrong += [
                    f"{saved.name} -> {name}: parameter {i} {SHAPES[i]}"
                    for i in differing(run, expected)
                ]
    return wrong


def differing(run: Run, expected: list[Tensor]) -> list[int]:
    """The numbers of the parameters that differ from the expected ones by a bit."""
    return [
        i
        for i, (p, q) in enumerate(zip(run.whole(), expected, strict=True))
        if not torch.equal(p, q)
    ]


def frozen_differences(rank: int, world_size: int) -> list[str]:
    """Name what goes wrong with parameters that are frozen when a checkpoint with their state is
    loaded, and thawed later."""
    wrong = []
    for kind in ("soap", "muon", "mixed", "shampoo"):
        for name, frozen in (("fsdp", (0, 3, 6)), ("tp", (2, 5)), ("copies", (1,))):
            alone, before, after = (
                Run(kind, torch.float32, layout)
                for layout in (None, *[LAYOUTS[world_size][name]] * 2)
            )
            for run in (alone, before):
                run.steps(range(3))
            with torch.no_grad():
                for p, q in zip(after.model.parameters(), before.model.parameters(), strict=True):
                    p.copy_(q)
            freeze(after.model, frozen, is_frozen=True)
            after.optimizer.load_state_dict(before.optimizer.state_dict())
            again = after.optimizer.state_dict()["state"]
            saved = before.optimizer.state_dict()["state"]
            if {i: state.keys() for i, state in again.items()} != {
                i: state.keys() for i, state in saved.items()
            }:
                wrong.append(f"{name}, {kind}: state of frozen parameters is lost")
            for run in (alone, after):
                run.steps(range(3, 5), without=frozen)
            freeze(after.model, frozen, is_frozen=False)
            for run in (alone, after):
                run.steps(range(5, 8))
            wrong += [
                f"{name}, {kind}: parameter {i} {SHAPES[i]}"
                for i in differing(after, alone.whole())
            ]
    return wrong


def freeze(model: Model, numbers: Sequence[int], *, is_frozen: bool) -> None:
    for i, p in enumerate(model.parameters()):
        if i in numbers:
            p.requires_grad_(not is_frozen)


def full_states(rank: int, world_size: int) -> list[str]:
    """Gather whole state dicts on rank 0 and spread them again; and plain state dicts, before the
    first step and after some."""
    wrong = []
    layout = LAYOUTS[world_size]["fsdp"]
    for kind, dtype in KINDS:
        _, alone = trained(kind, dtype, SAVED_AFTER, FREQUENCY)
        expected = [p.detach() for p in trained(kind, dtype, SAVED_AFTER + 3, FREQUENCY)[0]]
        run = Run(kind, dtype, layout)
        run.steps(range(SAVED_AFTER))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, whole = (
            get_model_state_dict(run.model, options=options),
            get_optimizer_state_dict(run.model, run.optimizer, options=options),
        )
        if rank == 0:
            order = [p for group in alone.param_groups for p in group["params"]]
            names = [name for group in whole["param_groups"] for name in group["params"]]
            for p, name in zip(order, names, strict=True):
                for key, value in alone.state[p].items():
                    found = whole["state"][name][key]
                    if found.dtype != value.dtype or not torch.equal(found, value):
                        wrong.append(f"{kind} {name}/{key} is not that of one process")
        other = Run(kind, dtype, layout)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other.model, model if rank == 0 else {}, options=options)
        set_optimizer_state_dict(
            other.model, other.optimizer, whole if rank == 0 else {}, options=options
        )
        other.steps(range(SAVED_AFTER, SAVED_AFTER + 3))
        wrong += [
            f"{kind} full: parameter {i}"
            for i, (p, q) in enumerate(zip(other.whole(), expected, strict=True))
            if not torch.equal(p, q)
        ]
        third = Run(kind, dtype, layout)
        # this must not count as the first step
        get_optimizer_state_dict(third.model, third.optimizer)
        third.optimizer.load_state_dict(third.optimizer.state_dict())
        third.steps(range(SAVED_AFTER + 3))
        wrong += [
            f"{kind} early: parameter {i}"
            for i, (p, q) in enumerate(zip(third.whole(), expected, strict=True))
            if not torch.equal(p, q)
        ]
    return wrong


def from_torchs_muon(rank: int, world_size: int) -> tuple[float, float]:
    """Continue a run of torch.optim.Muon on a mesh, and on one process. Return the largest
    difference of the weights, and of the momenta that were loaded."""
    mesh, shapes = init_device_mesh("cpu", (world_size,)), [(8, 6), (6, 8)]

    def steps(numbers: range, *runs: tuple[torch.optim.Optimizer, list[nn.Parameter]]) -> None:
        for step in numbers:
            for optimizer, params in runs:
                for p, grad in zip(params, values(step + 1, torch.float32, shapes), strict=True):
                    is_spread = isinstance(p, DTensor)
                    p.grad = distribute_tensor(grad, mesh, [Shard(0)]) if is_spread else grad
                optimizer.step()

    started = [nn.Parameter(x) for x in values(0, torch.float32, shapes)]
    theirs = torch.optim.Muon(started)
    steps(range(2), (theirs, started))
    whole = [nn.Parameter(p.detach().clone()) for p in started]
    parts = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in started]
    one, many = Muon(whole), Muon(parts)
    one.load_state_dict(theirs.state_dict())
    many.load_state_dict(theirs.state_dict())
    loaded = [state["momentum_buffer"] for state in many.state_dict()["state"].values()]
    momenta = [theirs.state[p]["momentum_buffer"] for p in started]
    steps(range(2, 6), (one, whole), (many, parts))
    return (
        max(
            float((p - q.full_tensor()).detach().abs().max())
            for p, q in zip(whole, parts, strict=True)
        ),
        max(float((x.full_tensor() - m).abs().max()) for x, m in zip(loaded, momenta, strict=True)),
    )
