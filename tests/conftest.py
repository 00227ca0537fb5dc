"""Has the shapes in annotations of Lather checked, at the first calls of each function in every test and fixture (`typechecker`).

jaxtyping has to be imported before Lather is.
"""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO")  # lets MKL round alike for every batch; MKL reads this at its first call
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for processes that tests start: threads that wait for each other would take the cores

import jaxtyping
import pytest
from xdist.scheduler import LoadScopeScheduling

import forked
import typechecker

forked.server()  # first of all, because the first user decides what the server of processes imports
jaxtyping.jaxtyped = typechecker.jaxtyped_if_it_has_shapes
jaxtyping.install_import_hook("lather", "typechecker.checked")

import torch  # noqa: E402

forked.without_fsync()
forked.start_ranks_in(forked.server())

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # runs Triton's kernels on CPU tensors; Triton reads it when it is first imported


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one thread, because two workers share two cores."""
    torch.set_num_threads(1)


def pytest_fixture_setup() -> None:
    typechecker.forget_calls()


def pytest_runtest_call() -> None:
    typechecker.forget_calls()


FIRST = ("distributed", "train", "bench", "memory", "test_examples.py")
"""Folders and files whose tests take longest; they are started first, so that two workers end together."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import other people's trainers for tests that are not asked for."""
    return (collection_path.name == "integrations" and "not integrations" in config.option.markexpr) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(FIRST) if name in item.path.parts), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Give a worker whole files, so that fixtures of modules are made once, and one worker all the tests whose ranks need the cores for
    themselves."""
    config.option.loadscopereorder = False  # otherwise files with many tests would go first
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "distributed" if "/distributed/" in file else file
