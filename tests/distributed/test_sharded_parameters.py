"""Sharded parameters are laid out as FSDP2 lays them out; gathered, they are the whole parameters,
and gradients are sums over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lather.boxes import local
from lather.kernels.stochastic_rounding import round_to_bf16
from lather.parallel import sharded_parameters, side_streams
from lather.parallel.fsdp_units import FsdpUnit
from lather.parallel.sharded_parameters import (
    Places,
    ShardedParameters,
    Storing,
)
from lather.parallel.side_streams import Streams
from lather.torch_private import TorchDispatchMode, start_fake_process_group

SHAPES = ((7, 3), (4, 2), (2, 5), (1, 4), (5,), (3, 2, 2))
"""Rows that three or four ranks share unevenly, and of which some get none."""
CPU = torch.device("cpu")


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for i, shape in enumerate(SHAPES):
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))
        self.tied = self.p0


def places_of(module: nn.Module) -> dict[nn.Parameter, Places]:
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        places.setdefault(p, []).append((module, name))
    return dict(places)


def mesh_of(world_size: int, replicas: int) -> DeviceMesh:
    ranks = torch.arange(world_size)
    if replicas == 1:
        return DeviceMesh("cpu", ranks)
    return DeviceMesh("cpu", ranks.view(replicas, -1), mesh_dim_names=("replicate", "shard"))


def sharded(
    module: nn.Module,
    mesh: DeviceMesh | None,
    storing: Storing = Storing(),  # noqa: B008
    rounded: Sequence[nn.Parameter] = (),
) -> ShardedParameters:
    return ShardedParameters(places_of(module), mesh, storing, set(rounded), Streams(CPU))


def bytes_of(p: Tensor) -> int:
    return p.untyped_storage().nbytes()


# --- layout ---------------------------------------------------------------------------------------


def layout_differences(rank: int, world_size: int, replicas: int) -> list[str]:
    """Name what differs from FSDP2, or from the whole parameters while they are gathered."""
    mesh, whole, theirs, ours = mesh_of(world_size, replicas), Weights(), Weights(), Weights()
    fully_shard(theirs, mesh=mesh)
    parameters = sharded(ours, mesh)
    wrong = ["tied weights differ"] * (ours.tied is not ours.p0)
    for name, p in ours.named_parameters():
        like = theirs.get_parameter(name)
        assert isinstance(p, DTensor)
        assert isinstance(like, DTensor)
        same = p.placements == like.placements and p.shape == like.shape
        if not (same and p.stride() == like.stride() and local(p).equal(local(like))):
            wrong.append(f"{name} is not FSDP2's")
    first: dict[str, nn.Parameter] = {}
    for _ in range(2):
        parameters.gather()
        parameters.wait()
        for name, p in ours.named_parameters():
            is_same = p is first.setdefault(name, p) and p._version == 0
            if not (is_same and p.equal(whole.get_parameter(name))):
                wrong.append(f"{name} is not gathered")
        parameters.free()
        wrong += ["not freed"] * any(map(bytes_of, parameters.gathered))
        with torch.no_grad():
            for p in (*map(local, ours.parameters()), *whole.parameters()):
                p.add_(1)
    return wrong


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 1), (3, 1), (4, 1), (4, 2), (2, 2)])
def test_parameters_are_laid_out_as_fsdp2_does(world_size: int, replicas: int) -> None:
    assert run_ranks(layout_differences, world_size, replicas) == [[]] * world_size


# --- gradients ------------------------------------------------------------------------------------


def gradient_of(name: str, rank: int, turn: int, shape: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(100 * turn + 10 * rank + int(name[1:]))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def summed_gradients(
    rank: int, world_size: int, replicas: int, storing: Storing, dtype: torch.dtype
) -> list[tuple[float, bool]]:
    """Reduce three times, with a gradient that one rank lacks; return for each parameter the error
    of this rank's rows, and whether their bits are the same a second time."""
    mesh, module = mesh_of(world_size, replicas), Weights(dtype)
    parameters, found = sharded(module, mesh, storing), []
    for _ in range(2):
        for turn in range(3):
            parameters.gather()
            parameters.wait()
            for name, p in module.named_parameters():
                if (rank, turn, name) != (1, 1, "p1"):
                    p.grad = gradient_of(name, rank, turn, p.shape).to(p.grad_dtype)
            wholes = list(module.parameters())
            parameters.free()
            parameters.reduce()
            assert all(p.grad is None for p in wholes)
        parameters.finish()
        found.append({name: local(p.grad).clone() for name, p in module.named_parameters()})
        for p in module.parameters():
            assert isinstance(p.grad, DTensor)
            assert p.grad.placements == p.placements
            assert p.grad.dtype == local(p.grad).dtype
            p.grad = None
    errors = []
    shards = world_size // replicas
    for name, p in module.named_parameters():
        total = sum(
            gradient_of(name, at, turn, p.shape)
            for at in range(world_size)
            for turn in range(3)
            if (at, turn, name) != (1, 1, "p1")
        )
        assert isinstance(total, Tensor)
        rows = total.chunk(shards)[rank % shards] if rank % shards < len(total.chunk(shards)) else 0
        error = (found[0][name] - rows).abs()
        errors.append(
            (float(error.max()) if error.numel() else 0.0, found[0][name].equal(found[1][name]))
        )
    return errors


@pytest.mark.parametrize(
    ("world_size", "replicas", "storing", "dtype", "tolerance"),
    [
        (3, 1, Storing(), torch.float64, 1e-14),
        (4, 2, Storing(), torch.float64, 1e-14),
        (2, 2, Storing(), torch.float64, 1e-14),
        (2, 1, Storing(), torch.float32, 1e-5),
        (3, 1, Storing(), torch.bfloat16, 1e-5),
        (3, 1, Storing(gradients=torch.bfloat16), torch.float32, 0.1),
        (2, 2, Storing(gradients=torch.bfloat16), torch.bfloat16, 0.1),
    ],
)
def test_gradients_are_sums_over_ranks_and_reductions(
    world_size: int, replicas: int, storing: Storing, dtype: torch.dtype, tolerance: float
) -> None:
    """Sums are about 5. In bf16 each of three roundings is wrong by up to 2^-7 of them; a sum
    without the missing gradient's turn would differ by about 1."""
    results = run_ranks(summed_gradients, world_size, replicas, storing, dtype)
    for errors in results:
        assert max(error for error, _ in errors) < tolerance
        assert all(same for _, same in errors)
    if storing.gradients is not None:
        assert max(error for errors in results for error, _ in errors) > 1e-4


def test_gradients_of_a_single_rank_are_kept_in_bf16() -> None:
    """The kept sums are those of the rounding of each sum, to the bit, and fp32 gradients exist
    only until they are reduced."""
    module = Weights()
    originals = list(module.parameters())
    parameters, expected = sharded(module, None, Storing(gradients=torch.bfloat16)), {}
    for turn in range(3):
        parameters.gather()
        parameters.wait()
        for name, p in module.named_parameters():
            p.grad = gradient_of(name, 0, turn, p.shape).float()
            total = p.grad.clone() if turn == 0 else p.grad + expected[name]
            expected[name] = round_to_bf16(total, turn)
        wholes = list(module.parameters())
        parameters.free()
        parameters.reduce()
        assert all(p.grad is None for p in wholes)
    parameters.finish()
    assert list(module.parameters()) == originals
    for name, p in module.named_parameters():
        assert p.grad.dtype == torch.bfloat16
        assert p.grad.equal(expected[name]), name


# --- dtypes ---------------------------------------------------------------------------------------


def rounding_differences(rank: int, world_size: int) -> list[str]:
    """Gather some of the parameters in bf16: name those that are not the whole ones, rounded."""
    module, whole = Weights(), Weights()
    rounded = [module.p1, module.p3, module.p4]
    parameters, wrong = (
        sharded(module, mesh_of(world_size, 1), Storing(gathered=torch.bfloat16), rounded),
        [],
    )
    parameters.gather()
    parameters.wait()
    for name, p in module.named_parameters():
        expected = whole.get_parameter(name)
        dtype = torch.bfloat16 if name in ("p1", "p3", "p4") else torch.float32
        if not (p.dtype == dtype and p.equal(expected.to(dtype)) and p.grad_dtype == torch.float32):
            wrong.append(name)
    parameters.free()
    return wrong + [name for name, p in module.named_parameters() if p.dtype != torch.float32]


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_gathered_in_bf16_beside_others_in_fp32(world_size: int) -> None:
    assert run_ranks(rounding_differences, world_size) == [[]] * world_size


# --- host memory ----------------------------------------------------------------------------------


def host_differences(rank: int, world_size: int, replicas: int) -> list[str]:
    """Name what differs between frozen parameters that come from the host and the whole ones."""
    module, whole = Weights().requires_grad_(requires_grad=False), Weights()
    mesh = mesh_of(world_size, replicas) if world_size > 1 else None
    parameters = ShardedParameters(
        places_of(module), mesh, Storing(torch.bfloat16), {module.p0}, Streams(CPU), on_host=True
    )
    wrong = [name for name, p in module.named_parameters() if p.requires_grad]
    for _ in range(2):
        parameters.gather()
        parameters.wait()
        for name, p in module.named_parameters():
            expected = whole.get_parameter(name)
            if not p.equal(expected.to(torch.bfloat16 if name == "p0" else torch.float32)):
                wrong.append(name)
        parameters.reduce()
        parameters.free()
        wrong += ["not freed"] * any(map(bytes_of, parameters.gathered))
    return wrong


@pytest.mark.parametrize(("world_size", "replicas"), [(1, 1), (3, 1), (2, 2)])
def test_frozen_parameters_come_from_the_host(world_size: int, replicas: int) -> None:
    assert run_ranks(host_differences, world_size, replicas) == [[]] * world_size


class Conversions(TorchDispatchMode):
    """Collects the sources of copies to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype != args[1].dtype:
            self.sources.append(args[1])
        return func(*args, **kwargs or {})


def test_rows_of_the_host_are_converted_on_the_device_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the memory of host and device there are only copies without conversion."""
    monkeypatch.setattr(sharded_parameters, "STAGED", 20)
    module, whole = Weights().requires_grad_(requires_grad=False), Weights()
    parameters = ShardedParameters(
        places_of(module), None, Storing(torch.bfloat16), {module.p0}, Streams(CPU), on_host=True
    )
    on_host = {p.untyped_storage().data_ptr() for p in module.parameters()}
    with Conversions() as found:
        parameters.gather()
    assert [len(x) for x in found.sources] == [5, 5, 5, 5, 1]
    assert not on_host & {x.untyped_storage().data_ptr() for x in found.sources}
    parameters.wait()
    assert module.p0.equal(whole.p0.to(torch.bfloat16))


# --- streams --------------------------------------------------------------------------------------


class Gpu:
    """The part of `torch.cuda` that concerns streams; writes down what is asked for."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = ["compute"]
        self._names = ["sums", "gathers"]

    def Stream(self, device: torch.device) -> Any:  # noqa: N802
        return _Stream(self, self._names.pop())

    def current_stream(self) -> Any:
        return _Stream(self, self.streams[-1])

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()


class _Stream:
    def __init__(self, gpu: Gpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def wait_stream(self, other: Any) -> None:
        self.gpu.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.gpu.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        event = f"event {len(self.gpu.log)} of {self.name}"
        self.gpu.log.append(event)
        return event


def test_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The computation waits for a gather only where it uses it, also if the next one has started;
    and for a reduction only before the next, whose buffer takes the place of its own."""
    gpu = Gpu()

    def logged(what: str) -> Any:
        return lambda *args, **options: gpu.log.append(f"{what} on {gpu.streams[-1]}")

    monkeypatch.setattr(side_streams, "gpu_module", lambda on: gpu)
    for module in (side_streams, sharded_parameters):
        monkeypatch.setattr(module, "is_gpu", lambda on: True)
    monkeypatch.setattr(sharded_parameters, "all_gather_single", logged("gather"))
    monkeypatch.setattr(sharded_parameters, "reduce_scatter_single", logged("reduce"))
    monkeypatch.setattr(torch, "split_with_sizes_copy", logged("copy"))
    start_fake_process_group(0, 2, CPU)
    try:
        mesh, streams = DeviceMesh("cpu", [0, 1]), Streams(CPU)
        first, second = (
            ShardedParameters(places_of(Weights()), mesh, Storing(), set(), streams)
            for _ in range(2)
        )
        first.gather()
        first.wait()
        second.gather()
        first.wait()
        second.wait()
        for parameters in (first, second):
            FsdpUnit(nn.ModuleList(), (parameters,), (), streams.reductions).reduce_gradients()
        streams.reductions.finish()
    finally:
        dist.destroy_process_group()
    assert gpu.log == [
        "gathers waits for compute",
        "gather on gathers",
        "event 2 of gathers",
        "compute waits for event 2 of gathers",
        "copy on compute",
        "gathers waits for compute",
        "gather on gathers",
        "event 7 of gathers",
        "compute waits for event 7 of gathers",
        "copy on compute",
        "sums waits for compute",
        "reduce on sums",
        "event 12 of sums",
        "compute waits for event 12 of sums",
        "sums waits for compute",
        "reduce on sums",
        "event 16 of sums",
        "compute waits for event 16 of sums",
    ]
