"""Every annotated call of Lather is checked for shapes and types in these tests; jaxtyping has to be there before Lather is."""

import os

os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL then rounds alike for every batch; it reads this at its first call

import jaxtyping
import pytest

jaxtyping.install_import_hook("lather", "typechecker.checked")

import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two workers share two cores."""
    torch.set_num_threads(1)
