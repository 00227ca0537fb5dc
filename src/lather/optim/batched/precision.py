"""The fp32 precision of matrix products inside a block of a step, and the caller's after it.

torch stores it twice for the process: as one word (`torch.set_float32_matmul_precision`), which
compiled code reads, and per backend (`fp32_precision`), which matrix products obey. The products of
a backend have a value of their own or inherit that of the backend, which has one or inherits that
of all backends (`torch.backends.fp32_precision`). Reading gives the value in force and does not say
whose it is, so a value that is written back would no longer follow the one that it came from.
Therefore products that inherited before must inherit afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lather.torch_private import get_fp32_precision, set_fp32_precision

BACKENDS = ("cuda", "mkldnn")
NONE = "none"
"""Value that a backend without its own has been given, and that is in force if nothing has one."""

TRUE_FP32 = (NONE, "ieee")
"""Values under which products are in true fp32."""

ALLOWED = {
    "highest": (TRUE_FP32, TRUE_FP32),
    "high": (("tf32",), ("tf32",)),
    "medium": (("tf32",), ("bf16",)),
}
"""For each word the values of `BACKENDS` under which products have this precision."""


@contextmanager
def changed_precision(precision: str, found: tuple[str, str]) -> Iterator[None]:
    """Set the fp32 matmul precision ("highest" | "high" | "medium", by torch's names) in the block,
    and restore the caller's after it. `found`: the values in force of the products of each backend.
    """
    before = [_own_value(backend, value) for backend, value in zip(BACKENDS, found, strict=True)]
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


def _own_value(backend: str, value: str) -> str:
    """Return the own value of a backend's products, for which `value` is in force; "none" if they
    inherit it.

    If the backend as a whole has the same value, only a change tells: of the value for all
    backends, or of the backend's own. Both are changed back at once.
    """
    if value == NONE or get_fp32_precision(backend, "all") != value:
        return value
    other, of_all = "ieee" if value != "ieee" else "tf32", get_fp32_precision("generic", "all")
    set_fp32_precision("generic", "all", other)
    products_follow = get_fp32_precision(backend, "matmul") == other
    backend_follows = get_fp32_precision(backend, "all") == other
    set_fp32_precision("generic", "all", of_all)
    if not backend_follows:  # it has a value of its own
        set_fp32_precision(backend, "all", other)
        products_follow = get_fp32_precision(backend, "matmul") == other
        set_fp32_precision(backend, "all", value)
    return NONE if products_follow else value
