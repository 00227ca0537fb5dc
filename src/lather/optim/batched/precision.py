"""The fp32 precision of matrix products inside a block of a step, and the caller's after it.

torch stores it twice for the process: as a word (`torch.set_float32_matmul_precision`), which
compiled code reads, and per backend (`fp32_precision`), which matrix products obey. The value of a
backend's products is set or inherited from the backend, whose value is set or inherited from all
backends (`torch.backends.fp32_precision`). Reading returns the value in force, set or inherited; if
an inherited value were written back, it would no longer follow the value that it came from.
Therefore products that inherited before the block must inherit after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lather.torch_private import get_fp32_precision, set_fp32_precision

BACKENDS = ("cuda", "mkldnn")
NONE = "none"
"""Value that stands for an inherited value when it is set, and that is in force if nothing is
set."""

TRUE_FP32 = (NONE, "ieee")
"""Values under which products are in true fp32."""

ALLOWED = {
    "highest": (TRUE_FP32, TRUE_FP32),
    "high": (("tf32",), ("tf32",)),
    "medium": (("tf32",), ("bf16",)),
}
"""For each word the values of `BACKENDS` under which products have this precision."""


@contextmanager
def changed_precision(precision: str, in_force: tuple[str, str]) -> Iterator[None]:
    """Set the fp32 matmul precision ("highest" | "high" | "medium", by torch's names) in the block,
    and restore the caller's after it. `in_force`: the values of the products of each backend."""
    before = [_set_value(backend, x) for backend, x in zip(BACKENDS, in_force, strict=True)]
    try:
        # torch refuses to give a word that contradicts the backends; true fp32 contradicts none.
        _set_both("ieee", "ieee")
        word = torch.get_float32_matmul_precision()
        try:
            torch.set_float32_matmul_precision(precision)
            yield
        finally:
            torch.set_float32_matmul_precision(word)
    finally:
        _set_both(*before)


def _set_both(cuda: str, mkldnn: str) -> None:
    set_fp32_precision("cuda", "matmul", cuda)
    set_fp32_precision("mkldnn", "matmul", mkldnn)


def _set_value(backend: str, value: str) -> str:
    """Return `value`, which is in force for a backend's products, if it is set for them; "none" if
    they inherit it.

    If the backend as a whole has the same value, only a change shows which: of the value of all
    backends, or of this backend. Both are changed back at once.
    """
    if value == NONE or get_fp32_precision(backend, "all") != value:
        return value
    other, of_all = "ieee" if value != "ieee" else "tf32", get_fp32_precision("generic", "all")
    set_fp32_precision("generic", "all", other)
    products_follow = get_fp32_precision(backend, "matmul") == other
    backend_follows = get_fp32_precision(backend, "all") == other
    set_fp32_precision("generic", "all", of_all)
    if not backend_follows:  # its value is set
        set_fp32_precision(backend, "all", other)
        products_follow = get_fp32_precision(backend, "matmul") == other
        set_fp32_precision(backend, "all", value)
    return NONE if products_follow else value
