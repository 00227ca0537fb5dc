"""Every call of Lather that is annotated with shapes is checked in these tests; jaxtyping has to be there before Lather is."""

import os
from typing import Any

os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL then rounds alike for every batch; it reads this at its first call
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also in processes that tests start: threads that wait for each other take the cores

import jaxtyping
import pytest
from xdist.scheduler import LoadScopeScheduling

import forked
import typechecker

forked.server()  # before anybody says what else the server of processes shall import
jaxtyping.jaxtyped = typechecker.jaxtyped_if_it_has_shapes
jaxtyping.install_import_hook("lather", "typechecker.checked")

import torch  # noqa: E402

os.fsync = lambda file: None if os.fstat(file) else None  # it takes a tenth of the time of runs; no test cuts the power

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on CPU tensors then; Triton reads it when it is imported, by whomever


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two workers share two cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _shapes_are_checked() -> None:
    typechecker.forget_calls()


FIRST = ("distributed", "train")
"""Folders whose tests take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, name in enumerate(FIRST) if name in item.path.parts), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """A worker has whole files, so that fixtures of modules are made once, and one has all the tests whose ranks want the cores for
    themselves."""
    config.option.loadscopereorder = False  # else files with many tests go first
    return _ByFile(config, log)


class _ByFile(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "distributed" if "/distributed/" in file else file
