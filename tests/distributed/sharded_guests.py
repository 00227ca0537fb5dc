"""Sharded optimizers in other programs: under another default device, and with the state of
torch's Muon."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_cases import values
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lather.optim import KLSOAP, SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon

SHAPES: list[tuple[int, ...]] = [(8, 6), (6, 8), (4, 6, 6), (7,)]

CASES: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "soap": (SOAP, {"precondition_frequency": 2}),
    "soap_per_expert": (SOAP, {"precondition_frequency": 2, "nonfinite": "skip"}),
    "soap_replicated": (SOAP, {"precondition_frequency": 2, "ownership": "replicated"}),
    "klsoap": (KLSOAP, {"lr": 1e-2}),
    "muon": (Muon, {"normalize": "row"}),
    "soap_muon": (SOAPMuon, {}),
    "adamw": (AdamW, {}),
}


def _take(optimizer: MatrixOptimizer, params: list[Any], steps: range, device: str | None) -> None:
    """Take steps with `device` as torch's default device."""
    for step in steps:
        for p, g in zip(params, values(step + 1, torch.float32, SHAPES), strict=True):
            p.grad = (
                distribute_tensor(g, p.device_mesh, p.placements)
                if isinstance(
                    p,
                    DTensor,
                )
                else g
            )
        torch.set_default_device(device)
        optimizer.step()
        torch.set_default_device(None)


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x.detach().clone()


def on_default_devices(rank: int, world_size: int) -> dict[str, bool]:
    """Return for each case whether a run with "meta" as default device, in which the state is
    saved and loaded, is the same."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for name, (cls, options) in CASES.items():
        ends = []
        for device in (None, "meta"):
            params = [
                nn.Parameter(distribute_tensor(x, mesh, [Shard(0)]))
                for x in values(
                    0,
                    torch.float32,
                    SHAPES,
                )
            ]
            layout = "per_expert" if name.endswith("per_expert") else "tensor"
            groups = [{"params": params[:3], "matrix_layout": layout}, {"params": params[3:]}]
            torch.set_default_device(device)
            optimizer = cls([dict(group) for group in groups], **options)
            torch.set_default_device(None)
            _take(optimizer, params, range(3), device)
            torch.set_default_device(device)
            saved = optimizer.state_dict()
            optimizer = cls([dict(group) for group in groups], **options)
            optimizer.load_state_dict(saved)
            torch.set_default_device(None)
            _take(optimizer, params, range(3, 5), device)
            assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
            ends.append([_whole(p) for p in params])
        found[name] = all(map(torch.equal, *ends))
    return found


def partitioned_on_meta(rank: int, world_size: int) -> list[bool]:
    """Return whether plain shards take the same steps with "meta" as default device."""
    ends = []
    for device in (None, "meta"):
        params = [nn.Parameter(x) for x in values(rank, torch.float32, SHAPES[:2])]
        torch.set_default_device(device)
        optimizer = SOAP([{"params": params, "partition_dim": 0}], tp_group=dist.group.WORLD)
        torch.set_default_device(None)
        for step in range(3):
            for p, g in zip(
                params,
                values(step + 1 + rank, torch.float32, SHAPES[:2]),
                strict=True,
            ):
                p.grad = g
            torch.set_default_device(device)
            optimizer.step()
            torch.set_default_device(None)
        ends.append([p.detach().clone() for p in params])
    return list(map(torch.equal, *ends))


def from_torchs_muon(rank: int, world_size: int) -> dict[str, list[float]]:
    """Continue a run of torch.optim.Muon on one process on a mesh, and on one process. Return for
    each rule the largest difference of the weights, and of the momenta that were loaded."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    theirs_params = [nn.Parameter(x) for x in values(0, torch.float32, SHAPES[:2])]
    theirs = torch.optim.Muon(theirs_params)
    for step in range(2):
        for p, g in zip(theirs_params, values(step + 1, torch.float32, SHAPES[:2]), strict=True):
            p.grad = g
        theirs.step()
    for name, cls in (("muon", Muon), ("soap_muon", SOAPMuon), ("replicated", Muon)):
        options: dict[str, Any] = {"ownership": "replicated"} if name == "replicated" else {}
        whole = [nn.Parameter(p.detach().clone()) for p in theirs_params]
        parts = [
            nn.Parameter(
                distribute_tensor(p.detach(), mesh, [Shard(0)]),
            )
            for p in theirs_params
        ]
        one, many = cls(whole), cls(parts, **options)
        one.load_state_dict(theirs.state_dict())
        many.load_state_dict(theirs.state_dict())
        buffers = [
            _whole(
                state["momentum_buffer"],
            )
            for state in many.state_dict()["state"].values()
        ]
        momenta = [theirs.state[p]["momentum_buffer"] for p in theirs_params]
        for step in range(2, 6):
            for p, q, g in zip(
                whole,
                parts,
                values(step + 1, torch.float32, SHAPES[:2]),
                strict=True,
            ):
                p.grad, q.grad = g, distribute_tensor(g, mesh, [Shard(0)])
            one.step()
            many.step()
        pairs = [*zip(whole, map(_whole, parts), strict=True)]
        found[name] = [
            max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs),
            max(float((b - m).abs().max()) for b, m in zip(buffers, momenta, strict=True)),
        ]
    return found
