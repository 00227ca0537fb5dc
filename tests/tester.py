"""A process that runs tests: what is set and imported in it, in this order, and what every test
begins with.

Has the shapes in annotations of Lather checked, at the first calls of each function in every test
and fixture (`typechecker`); jaxtyping has to be imported before Lather is.
"""

import os

# lets MKL round alike for every batch; MKL reads this at its first call
os.environ.setdefault("MKL_CBWR", "AUTO")
# also for processes that tests start: threads that wait for each other would take the cores
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest

import forked
import typechecker

if "PYTEST_XDIST_WORKER" in os.environ and hasattr(os, "sched_setaffinity"):
    forked.stay_on_one_core(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
forked.collect_garbage_rarely()
forked.server()  # first of all, because the first user decides what the server of processes imports
jaxtyping.jaxtyped = typechecker.jaxtyped_if_it_has_shapes
jaxtyping.install_import_hook("lather", "typechecker.checked")

import torch  # noqa: E402

forked.without_fsync()
forked.start_ranks_in(forked.server())

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # runs Triton's kernels on CPU tensors; Triton reads it when it is first imported
    )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Use one thread, because two workers share two cores."""
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    forked.collect_garbage_rarely()  # now that all modules are imported


def pytest_fixture_setup() -> None:
    typechecker.forget_calls()


def pytest_runtest_call() -> None:
    typechecker.forget_calls()
