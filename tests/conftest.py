"""Every annotated call of Lather is checked for shapes and types in these tests; jaxtyping has to be there before Lather is."""

import os

os.environ.setdefault("MKL_CBWR", "AUTO")  # MKL then rounds alike for every batch; it reads this at its first call

import jaxtyping
import pytest

jaxtyping.install_import_hook("lather", "typechecker.checked")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on CPU tensors then; Triton reads it when it is imported, by whomever


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Two workers share two cores."""
    torch.set_num_threads(1)
