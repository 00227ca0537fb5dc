"""An error on one rank reaches every rank, whatever its class."""

from __future__ import annotations

import errno
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lather.config.config import ParallelConfig
from lather.errors import CheckpointError
from lather.parallel.agreement import errors_on_all_ranks
from lather.parallel.mesh import Mesh


class LocalError(Exception):
    """An error that `pickle` cannot make again from what it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


ERRORS: dict[str, dict[int, Exception]] = {
    "none": {},
    "slow": {},
    "first": {0: CheckpointError("a file is damaged")},
    "last": {2: OSError(errno.ENOSPC, "No space left on device", "/somewhere")},
    "two": {1: ValueError("one"), 2: KeyError("two")},
    "strange": {1: LocalError("a", "b")},
}


def outcomes(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    found = {}
    group = control_group(rank, world_size, folder, seconds=2)
    for name, errors in ERRORS.items():
        found[name] = "nothing"
        try:
            with errors_on_all_ranks(group):
                time.sleep(0.2 * (rank == 1))
                # longer than ranks wait for each other elsewhere
                time.sleep(4 * (name == "slow" and rank == 0))
                (folder / f"{name}{rank}").touch()
                if rank in errors:
                    raise errors[rank]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        # no rank leaves before all have come
        assert len(list(folder.glob(f"{name}?"))) == world_size
        dist.barrier()
    return found


def control_group(
    rank: int, world_size: int, folder: Path, seconds: float
) -> dist.ProcessGroup | None:
    """The control group of a mesh in whose steps ranks wait for each other for so long."""
    dist.destroy_process_group()
    timeout = timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return Mesh.build(ParallelConfig(ep=world_size), torch.device("cpu")).control_group


def test_what_one_rank_raises_all_raise(tmp_path: Path) -> None:
    found = run_ranks(outcomes, 3, tmp_path)
    for each in found:
        assert each["none"] == each["slow"] == "nothing"
        assert each["first"] == "CheckpointError: a file is damaged"
        assert each["last"] == "OSError: [Errno 28] No space left on device: '/somewhere'"
    assert [each["two"] for each in found] == [
        "ValueError: one",
        "ValueError: one",
        "KeyError: 'two'",
    ]
    assert found[1]["strange"] == "LocalError: ab"
    assert "LocalError: ab" in found[0]["strange"]
    assert found[0]["strange"] == found[2]["strange"]


def test_one_rank_is_by_itself() -> None:
    with pytest.raises(LocalError), errors_on_all_ranks(None):
        raise LocalError("a", "b")
    with errors_on_all_ranks(None):
        pass
