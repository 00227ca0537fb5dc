"""How the process groups of GPUs are made, and the stream on which numbers of rows come to the
host, with stand-ins for the GPU."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from engines import Case, make_pair, mesh_of
from ranks import run_ranks

from lather.config.config import ParallelConfig
from lather.errors import ConfigError
from lather.models.routing import Routing
from lather.parallel import expert_exchange as expert
from lather.parallel import mesh
from lather.parallel.expert_exchange import ExpertExchange
from lather.parallel.launch import start as launch
from lather.parallel.launch.start import GroupOptions
from lather.parallel.launch.world import World
from lather.parallel.mesh import Mesh
from lather.torch_private import new_group_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Gpu:
    """Stands for `torch.cuda`: it counts streams, and everything is done at once."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.num_streams = 0

    def set_device(self, device: torch.device) -> None:
        self.devices.append(device)

    def init(self) -> None:
        assert self.devices, "the device is chosen first"

    def Stream(self, device: torch.device, priority: int) -> Any:  # noqa: N802
        self.num_streams += 1
        return SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))

    def stream(self, stream: object) -> nullcontext[None]:
        return nullcontext()


@pytest.mark.parametrize(
    ("device", "backends", "bound"),
    [(CPU, "gloo", None), (CUDA, "cpu:gloo,cuda:nccl", torch.device("cuda", 1))],
    ids=["cpu", "cuda"],
)
def test_the_group_is_bound_to_the_ranks_own_gpu(
    device: torch.device, backends: str, bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    gpu = Gpu()
    monkeypatch.setattr(launch, "gpu_module", lambda on: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: made.append((backend, options))
    )
    launch._enter_group(World(1, 2, 1, 2), GroupOptions(device, 7.0), "the store")
    ((backend, options),) = made
    assert backend == backends
    assert options == {
        "store": "the store",
        "rank": 1,
        "world_size": 2,
        "timeout": timedelta(seconds=7),
        "device_id": bound,
    }
    assert gpu.devices == ([] if bound is None else [bound])


def nothing(world: World) -> int:
    raise AssertionError("this is not to be started")


def test_one_connection_for_several_communicators_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ConfigError, match="unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8"):
        launch.launch(nothing, (), 2, GroupOptions(CUDA))
    with pytest.raises(ConfigError, match="unset CUDA_DEVICE_MAX_CONNECTIONS"):
        launch.join(nothing, (), World(0, 2, 0, 2, ("127.0.0.1", 1)), GroupOptions(CUDA))


def groups_that_met(rank: int, world_size: int) -> list[tuple[bool, int]]:
    """Build a mesh of pp = 2 and ep = 2; returns for each of its groups whether an all-reduce ran
    on it meanwhile, and how many did."""
    met: list[Any] = []
    original = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        met.append(options["group"])
        return original(tensor, *args, **options)

    mesh.dist.all_reduce = all_reduce  # type: ignore[assignment]
    try:
        built = Mesh.build(ParallelConfig(pp=2, ep=2), CPU)
    finally:
        mesh.dist.all_reduce = original
    used = [built.pp_group, built.ep_group, built.data_group]
    used += [
        group
        for axes in (built.dense_mesh, built.expert_mesh)
        if axes is not None
        for group in axes.get_all_groups()
    ]
    return [(group in met, met.count(group)) for group in used]


def test_the_ranks_of_every_group_meet_while_the_mesh_is_built() -> None:
    for results in run_ranks(groups_that_met, 4):
        assert results
        assert set(results) == {(True, 1)}


def transfers_among_neighbors(rank: int, world_size: int) -> tuple[list[int], bool, float, float]:
    """Run a step whose transfers go as on GPUs. Returns the neighbors that this rank has a group
    with, whether every transfer was in a group of two, and the errors of loss and gradients."""
    sizes: set[int] = set()
    original = dist.batch_isend_irecv

    def start(transfers: list[dist.P2POp]) -> list[dist.Work]:
        sizes.update(dist.get_world_size(one.group) for one in transfers)
        return original(transfers)

    gpu = SimpleNamespace(synchronize=lambda device: None)
    with (
        patch.object(mesh, "is_gpu", lambda on: True),
        patch.object(mesh, "gpu_module", lambda on: gpu),
    ):
        built = mesh_of(case := Case(pp=world_size, layers=9, poison=True))
    with patch.object(dist, "batch_isend_irecv", start):
        pair = make_pair(case, mesh=built)
        tokens = pair.tokens()
        expected = pair.plain_gradients(tokens)
        loss = pair.run(tokens).loss
        assert loss is not None
    return (
        [*built.neighbor_groups],
        sizes == {2},
        abs(loss - expected) / expected,
        pair.largest_error("grad"),
    )


def test_transfers_of_neighbors_have_a_group_of_their_own_on_gpus() -> None:
    """A queue for each pair of neighbors, in place of one for all, and the same numbers."""
    results = run_ranks(transfers_among_neighbors, 4)
    assert [neighbors for neighbors, *_ in results] == [[1], [0, 2], [1, 3], [2]]
    assert all(is_pair and loss < 1e-12 and grad < 1e-12 for _, is_pair, loss, grad in results)


def neighbors_beside_other_axes(rank: int, world_size: int) -> dict[int, list[int]]:
    """Return the ranks in each of this rank's groups with a neighbor, by the neighbor's place in
    the pipeline."""
    gpu = SimpleNamespace(synchronize=lambda device: None)
    with (
        patch.object(mesh, "is_gpu", lambda on: True),
        patch.object(mesh, "gpu_module", lambda on: gpu),
    ):
        built = Mesh.build(ParallelConfig(pp=3, ep=2), CPU)
    return {
        peer: dist.get_process_group_ranks(group) for peer, group in built.neighbor_groups.items()
    }


def test_neighbors_are_of_one_pipeline() -> None:
    assert run_ranks(neighbors_beside_other_axes, 6) == [
        {1: [0, 2]},
        {1: [1, 3]},
        {0: [0, 2], 2: [2, 4]},
        {0: [1, 3], 2: [3, 5]},
        {1: [2, 4]},
        {1: [3, 5]},
    ]


def groups_beside_a_bound_one(rank: int, world_size: int) -> list[Any]:
    """Return what `new_group_of` makes of ranks 0 and 2 and of rank 1 alone, where the default
    group is bound to a device."""
    default: Any = dist.group.WORLD
    default.bound_device_id = bound = torch.device("cuda", 0)
    control = dist.new_group(backend="gloo")
    ranks = (0, 2) if rank != 1 else (1,)
    group: Any = new_group_of(ranks)
    found = [
        dist.get_process_group_ranks(group) == list(ranks),
        group.bound_device_id is None,
        default.bound_device_id == bound,
    ]
    default.bound_device_id = (
        None  # otherwise the barrier at the end of a test would want a tensor there
    )
    total = torch.tensor(rank)
    dist.all_reduce(total, group=group)
    world = torch.tensor(rank)
    dist.all_reduce(world, group=control)
    return [*found, int(total) == sum(ranks), int(world) == 3]


def test_a_group_that_only_its_ranks_make_is_not_split_from_a_bound_one() -> None:
    assert run_ranks(groups_beside_a_bound_one, 3) == [[True] * 5] * 3


def plans_on_one_stream(rank: int, world_size: int) -> tuple[int, list[Any], list[Any]]:
    """Return the streams that two plans under way take, and their results with the stand-in and
    without."""
    group = dist.group.WORLD
    assert group is not None
    gpu = Gpu()
    plain, exchange = ExpertExchange(group, 4), ExpertExchange(group, 4)
    routings = [
        Routing(torch.tensor(experts), torch.ones(2, 2), torch.zeros(4), torch.zeros(()), None)
        for experts in ([[0, 3], [1, 2]], [[0, 1], [0, 1]])
    ]
    expected = [plain.start_plan(routing).wait() for routing in routings]
    expert.gpu_module = lambda on: gpu
    expert.is_gpu = lambda on: True
    expert.record_use = lambda *tensors: None
    pending = [exchange.start_plan(routing) for routing in routings]
    found = [one.wait() for one in pending]
    return (
        gpu.num_streams,
        [vars(handle) for handle in expected],
        [vars(handle) for handle in found],
    )


def test_an_exchange_has_one_stream_for_all_of_its_plans() -> None:
    for num_streams, expected, found in run_ranks(plans_on_one_stream, 2):
        assert num_streams == 1
        assert str(found) == str(expected)
