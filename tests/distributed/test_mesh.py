"""The mesh's ranks and groups on every rank, against lists written out by loops."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lather.config.config import ParallelConfig
from lather.errors import ConfigError
from lather.parallel.mesh import CONTROL_TIMEOUT, Mesh

CPU = torch.device("cpu")
SHAPES = [
    *((2, 1, 2, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 2, 2), (4, 1, 1, 1), (1, 1, 4, 1)),
    *((2, 1, 1, 2), (1, 2, 2, 1), (2, 2, 1, 1), (1, 4, 1, 1), (1, 2, 1, 1), (1, 2, 1, 2)),
]
"""pp, cp, ep and replicas of the meshes of four ranks."""

Groups = dict[str, list[int] | list[list[int]]]


def layout(pp: int, dp: int, cp: int, ep: int) -> list[tuple[int, int, int, int]]:
    """List the coordinates of each rank, in order."""
    return list(itertools.product(range(pp), range(dp), range(cp), range(ep)))


def gathered(group: dist.ProcessGroup | None, rank: int) -> list[int]:
    """The ranks that a collective over the group reaches."""
    assert group is not None
    ranks = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ranks, torch.tensor(rank), group=group)
    return [int(one) for one in ranks]


def patience(group: dist.ProcessGroup | None) -> float:
    """The seconds for which a rank of the group waits."""
    assert group is not None
    timeout: timedelta = group._get_backend(CPU).options._timeout
    return timeout.total_seconds()


def groups_of_every_shape(rank: int, world_size: int) -> list[Groups]:
    results = []
    for pp, cp, ep, replicas in SHAPES:
        config = ParallelConfig(pp=pp, cp=cp, ep=ep, replicas=replicas, timeout=77.0)
        mesh = Mesh.build(config, CPU)
        in_a_step = [mesh.pp_group, mesh.ep_group, mesh.data_group]
        in_a_step += [mesh.cp_group] if cp > 1 else []
        in_a_step += [
            group
            for axes in (mesh.dense_mesh, mesh.expert_mesh)
            if axes is not None
            for group in axes.get_all_groups()
        ]
        assert {patience(group) for group in in_a_step} == {77.0}
        assert patience(mesh.control_group) == CONTROL_TIMEOUT.total_seconds()
        assert mesh.rank == rank
        assert mesh.size == world_size
        groups: Groups = {
            name: gathered(getattr(mesh, f"{name}_group"), rank)
            for name in ("pp", "ep", "data", "control")
        }
        groups["cp"] = gathered(mesh.cp_group, rank) if cp > 1 else [rank]
        if mesh.context is not None:
            assert groups["cp"][mesh.context.rank] == rank
            assert len(groups["cp"]) == mesh.context.size
        for name in ("dense", "expert"):
            device_mesh = getattr(mesh, f"{name}_mesh")
            if device_mesh is None:
                groups[name], groups[f"{name}_ranks"] = [], []
                continue
            groups[name] = [
                gathered(device_mesh.get_group(dim), rank) for dim in range(device_mesh.ndim)
            ]
            groups[f"{name}_ranks"] = device_mesh.mesh.flatten().tolist()
        results.append(groups)
    return results


def expected_groups(rank: int, pp: int, cp: int, ep: int, replicas: int) -> Groups:
    """The expected groups by definition: a group has the ranks that share the coordinates over
    which it does not run."""
    dp = 4 // (pp * cp * ep)
    shards = dp // replicas
    ranks = layout(pp, dp, cp, ep)
    mine = ranks[rank]

    def where(*same: Any) -> list[int]:
        """The ranks whose keys equal this rank's."""
        return [
            other for other, at in enumerate(ranks) if all(key(at) == key(mine) for key in same)
        ]

    Place = tuple[int, int, int, int]

    def pp_(at: Place) -> int:
        return at[0]

    def dp_(at: Place) -> int:
        return at[1]

    def cp_(at: Place) -> int:
        return at[2]

    def ep_(at: Place) -> int:
        return at[3]

    def replica(at: Place) -> int:
        return at[1] // shards

    def shard(at: Place) -> tuple[int, int]:
        return at[1] % shards, at[2]

    data, along_dp = where(pp_), where(pp_, ep_)
    dense: list[list[int]] = [data]
    expert: list[list[int]] = [along_dp]
    if replicas > 1:
        dense = [where(pp_, shard, ep_), where(pp_, replica)]
        expert = [where(pp_, shard, ep_), where(pp_, ep_, replica)]
    return {
        "pp": where(dp_, cp_, ep_),
        "ep": where(pp_, dp_, cp_),
        "cp": where(pp_, dp_, ep_),
        "control": [0, 1, 2, 3],
        "data": data,
        "dense": dense,
        "dense_ranks": data,
        "expert": expert,
        "expert_ranks": along_dp,
    }


def test_groups_reach_the_ranks_that_the_layout_says() -> None:
    for rank, results in enumerate(run_ranks(groups_of_every_shape, 4)):
        for shape, groups in zip(SHAPES, results, strict=True):
            assert groups == expected_groups(rank, *shape), (rank, shape)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2, 5])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_coordinates_enumerate_the_layout(pp: int, dp: int, cp: int, ep: int) -> None:
    for rank, (pp_rank, dp_rank, cp_rank, ep_rank) in enumerate(layout(pp, dp, cp, ep)):
        mesh = Mesh(pp=pp, dp=dp, cp=cp, ep=ep, replicas=1, rank=rank, device=CPU)
        assert (mesh.pp_rank, mesh.cp_rank, mesh.ep_rank) == (pp_rank, cp_rank, ep_rank)
        assert mesh.data_rank == layout(1, dp, 1, ep).index((0, dp_rank, 0, ep_rank))
        assert (mesh.size, mesh.data_size) == (pp * dp * cp * ep, dp * ep)
        assert mesh.shard_size == dp * cp * ep


def test_one_process_needs_no_group() -> None:
    mesh = Mesh.build(ParallelConfig(), CPU)
    assert not dist.is_initialized()
    assert (mesh.size, mesh.pp_rank, mesh.ep_rank, mesh.data_rank) == (1, 0, 0, 0)
    assert {
        mesh.pp_group,
        mesh.ep_group,
        mesh.data_group,
        mesh.control_group,
        mesh.dense_mesh,
        mesh.expert_mesh,
    } == {None}
    with pytest.raises(AttributeError):
        mesh.rank = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"parallel\.pp"):
        Mesh.build(ParallelConfig(pp=2), CPU)


def test_the_device_of_one_process_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.set_device`, which the thread of an asynchronous save calls, refuses a device
    without one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert Mesh.single(torch.device("cuda")).device == torch.device("cuda", 3)
    assert Mesh.single(torch.device("cuda", 1)).device == torch.device("cuda", 1)
    assert Mesh.single(CPU).device == CPU


def test_description() -> None:
    assert (
        Mesh(pp=2, dp=2, ep=2, replicas=1, rank=0, device=CPU).describe()
        == "8 ranks: 2 pipeline x 2 data x 2 expert"
    )
    assert (
        Mesh(pp=1, dp=4, ep=1, replicas=2, rank=0, device=CPU).describe()
        == "4 ranks: 1 pipeline x 4 data x 1 expert, 2 replicas"
    )
    assert Mesh.single(CPU).describe() == "1 rank: 1 pipeline x 1 data x 1 expert"
