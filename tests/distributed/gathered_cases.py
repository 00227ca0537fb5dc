"""Cases of `ownership="replicated"`: the state of a parameter lies in rows on all ranks, and goes
from there to owners and back."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sharded_cases import LAYOUTS, SHAPES, Spread, expected_of, make_spread, spread, values
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.calls import counted
from lather.optim import SOAP, AdamW, Muon
from lather.optim.batched import optimizer, plan

CASES = (
    ("fsdp", "soap", torch.float32),
    ("hsdp", "soap_rotate", torch.float32),
    ("fsdp x tp", "stacked_soap", torch.float32),
    ("in another order", "kl_soap", torch.bfloat16),
    ("tp", "mixed", torch.float32),
    ("both on 0", "soap_muon", torch.bfloat16),
    ("fsdp", "shampoo", torch.float32),
    ("fsdp", "soap", torch.float64),
    ("tp", "soap_muon", torch.float64),
)
FREQUENCY = 2


def gathered_differences(rank: int, world_size: int) -> list[str]:
    """Name the parameters that differ from one process's, after five steps, in which state goes
    from rows to owners and back."""
    wrong = []
    for name, kind, dtype in CASES:
        layout = LAYOUTS[world_size][name]
        mesh = layout.mesh()
        expected = expected_of(kind, dtype, 5, FREQUENCY)
        case = f"{name}, {kind}"
        before: Spread | None = None
        for ownership, steps in (
            ("replicated", range(2)),
            ("whole", range(2, 3)),
            ("replicated", range(3, 5)),
        ):
            run = make_spread(
                kind, layout, dtype, mesh, precondition_frequency=FREQUENCY, ownership=ownership
            )
            if before is not None:
                with torch.no_grad():
                    for p, q in zip(run.params, before.params, strict=True):
                        p.copy_(q)
                run.optimizer.load_state_dict(before.optimizer.state_dict())
                assert run.optimizer.param_groups[0]["ownership"] == ownership
            run.run(steps)
            before = run
        assert before is not None
        wrong += [
            f"{case}: parameter {i} {SHAPES[i]}"
            for i, (p, q) in enumerate(zip(before.whole(), expected, strict=True))
            if not torch.equal(p, q)
        ]
        wrong += [f"{case}: {what}" for what in rows_that_are_wrong(before)]
    dist.barrier()
    return wrong


def files_of_a_step(rank: int, world_size: int) -> list[str]:
    """Name the files of the package through which the gradients of sharded matrices pass in a step
    without refresh."""
    mesh = init_device_mesh("cpu", (world_size,))
    params = [nn.Parameter(distribute_tensor(x, mesh, [Shard(0)])) for x in torch.ones(4, 6, 8)]
    soap = SOAP(params, lr=1e-2)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        calls = counted(soap.step)
    return sorted({file for file, _ in calls})


def weights_that_left_by_another_door(rank: int, world_size: int) -> list[str]:
    """Name the cases in which a weight changes although `change_weights` and kernels of rules do
    nothing."""
    wrong = []
    layout = LAYOUTS[world_size]["tp"]
    mesh = layout.mesh()
    with (
        patch.object(optimizer, "change_weights", lambda *leaving: None),
        patch.object(plan, "change_weights", lambda *leaving: None),
        patch.object(AdamW.rule, "step_whole", lambda *all: False),
    ):
        for kind in ("soap", "mixed", "muon", "adamw"):
            for ownership in ("whole", "replicated"):
                run = make_spread(kind, layout, torch.bfloat16, mesh, ownership=ownership)
                before = [p.detach().clone() for p in run.whole()]
                run.run(range(2))
                if not all(map(torch.equal, run.whole(), before)):
                    wrong.append(f"{kind}, {ownership}")
    dist.barrier()
    return wrong


def rows_that_are_wrong(run: Spread) -> list[str]:
    """Name the entries whose rows on all ranks are not the whole entry once."""
    pieces = [
        (param, piece)
        for param, piece in run.optimizer.state_pieces()
        if piece.name != "step" and len(piece.shape) == 2
    ]
    own = torch.tensor([piece.value.numel() for _, piece in pieces])
    total = own.clone()
    dist.all_reduce(total)
    wrong = []
    for (param, piece), here, everywhere in zip(pieces, own.tolist(), total.tolist(), strict=True):
        whole = math.prod(piece.shape)
        if everywhere != whole or (piece.shape[0] >= run.mesh.size() and here == whole):
            wrong.append(
                f"{piece.name} of {tuple(param.shape)}: {here} of {whole} here, {everywhere} on "
                "all ranks"
            )
    return wrong


def turned_on_and_off(mesh: DeviceMesh, ownership: str) -> list[str]:
    """Name what differs from one process if an option, with its entry of the state, is turned on
    and off between steps."""
    whole = [nn.Parameter(x) for x in values(0, torch.float32, ((6, 4), (5,)))]
    parts = [nn.Parameter(spread(p.detach(), mesh, [Shard(0)])) for p in whole]
    one, many = Muon(whole), Muon(parts, ownership=ownership)
    wrong = []
    for step, start in enumerate((0, 0, 1, 1, 4, 0, 0, 2)):
        grads = values(10 + step, torch.float32, ((6, 4), (5,)))
        for p, q, grad in zip(whole, parts, grads, strict=True):
            p.grad, q.grad = grad, spread(grad, mesh, [Shard(0)])
        for each in (one, many):
            each.param_groups[0]["slow_momentum_start"] = start
            each.step()
        if not all(
            torch.equal(q.full_tensor(), p)  # type: ignore[attr-defined]
            for p, q in zip(whole, parts, strict=True)
        ):
            wrong.append(f"{ownership}: two momenta, step {step}")
    return wrong


def changes(rank: int, world_size: int) -> list[str]:
    """Name what goes wrong with options that change between steps or between saving and loading,
    with scalars, and with an empty parameter."""
    mesh = init_device_mesh("cpu", (world_size,))
    wrong = []
    for ownership in ("whole", "replicated"):
        shapes = ((6, 4), (0, 3), ())
        whole = [nn.Parameter(x) for x in values(0, torch.float32, shapes)]

        def spread_ones(tensors: list[Tensor]) -> list[Tensor]:
            return [spread(x, mesh, [Shard(0) if x.dim() else Replicate()]) for x in tensors]

        def run(
            optimizer: SOAP,
            params: list[nn.Parameter],
            steps: range,
            spread_out: bool,
            shapes: Any = shapes,
        ) -> None:
            for step in steps:
                grads = values(10 + step, torch.float32, shapes)
                for p, grad in zip(
                    params, spread_ones(grads) if spread_out else grads, strict=True
                ):
                    p.grad = grad
                optimizer.step()

        options = {"precondition_frequency": 2, "max_update_rms": 0.5, "max_precond_dim": 5}
        one = SOAP(whole, **options)
        parts = [nn.Parameter(x) for x in spread_ones([p.detach() for p in whole])]
        many = SOAP(parts, **options, ownership=ownership)
        run(one, whole, range(3), False)
        run(many, parts, range(3), True)
        before = [p.detach().full_tensor() for p in parts]
        for name, value in (
            ("max_precond_dim", 8),
            ("ownership", {"whole": "replicated", "replicated": "whole"}[ownership]),
        ):
            kept, many.param_groups[0][name] = many.param_groups[0][name], value
            with pytest.raises(ValueError, match="was changed after its state was made"):
                many.step()
            many.param_groups[0][name] = kept
        wrong += [
            f"{ownership}: {i} changed"
            for i, p in enumerate(parts)
            if not torch.equal(p.detach().full_tensor(), before[i])
        ]
        fresh = [nn.Parameter(p.detach().clone()) for p in parts]
        other = SOAP(fresh, precondition_frequency=2, max_precond_dim=8, ownership=ownership)
        other.init_state()
        # it loads the options, too, and with them other factors
        other.load_state_dict(many.state_dict())
        run(one, whole, range(3, 6), False)
        run(other, fresh, range(3, 6), True)
        wrong += [
            f"{ownership}: {i}"
            for i, (p, q) in enumerate(zip(fresh, whole, strict=True))
            if not torch.equal(p.full_tensor(), q)
        ]
        wrong += turned_on_and_off(mesh, ownership)
        other.param_groups[0]["state_dtype"] = torch.float64
        run(other, fresh, range(6, 7), True)
        kept_now = other.state[fresh[0]]["exp_avg"]
        if kept_now.numel() and kept_now.dtype != torch.float64:
            wrong.append(f"{ownership}: state_dtype")
    return wrong
