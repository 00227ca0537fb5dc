"""Says what torch's operations cost on a GPU: traffic, flops, launches and host waits."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from lather.standin.operations import nbytes
from lather.storages import tensors_in

WITHOUT_KERNEL = frozenset(
    [
        "device",
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "resize_",
        "set_",
        "record_stream",
        "is_pinned",
        "sym_size",
        "is_same_size",
        "resize_as_",
        "_record_function_enter_new",
        "_record_function_exit",
    ]
)
"""Operations that only allocate or query."""
OVERWRITE = frozenset(
    [
        "copy_",
        "zero_",
        "fill_",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_full",
        "new_ones",
        "normal_",
        "uniform_",
        "_foreach_copy_",
        "_foreach_zero_",
        "rand_like",
    ]
)
"""Operations that do not read their first operand."""
UNCHANGED = "grads"
"""Argument of the fused optimizers, which their schemas call written, but which they write only if
a scaler of gradients is given."""
GATHERS = frozenset(["index_select", "gather", "index", "embedding", "take"])
SCATTERS = frozenset(
    [
        "index_put_",
        "index_copy_",
        "index_add_",
        "scatter_add_",
        "scatter_",
        "_index_put_impl_",
        "index_put",
        "index_copy",
        "scatter",
    ]
)
WAIT_INSIDE = {
    "_linalg_eigh": "eigh looks at its errors",
    "_linalg_svd": "svd looks at its errors",
    "nonzero": "nonzero: the size of the result",
    "_unique2": "unique: the size of the result",
    "equal": "equal: the answer",
}
"""Operations that make the host wait, whoever calls them, and the reason."""
ONE_BY_ONE = frozenset(
    ("_linalg_eigh", "_linalg_svd", "geqrf", "linalg_householder_product", "linalg_qr")
)
"""Factorizations that CUDA's libraries do matrix by matrix."""
source_of = cache(inspect.getsource)


def traffic(
    func: Any,
    name: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
    made: list[Tensor],
) -> tuple[int, int]:
    """The bytes that the operation reads, and those that it writes."""

    def size(tensors: Iterable[Tensor]) -> int:
        return sum(map(nbytes, tensors))

    if name in GATHERS:
        return size(made) + size(inputs[1:]), size(made)
    if name in SCATTERS:
        return size(inputs[1:]), nbytes(inputs[-1])
    operands = tensors_in([args, {key: value for key, value in kwargs.items() if key != "out"}])
    read = size(x for number, x in enumerate(operands) if not (number == 0 and name in OVERWRITE))
    if name.startswith("_foreach") and name in OVERWRITE:
        read = size(tensors_in(args[1:]))
    if made:
        return read, size(made)
    written = [
        x
        for argument, x in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info and argument.alias_info.is_write and argument.name != UNCHANGED
    ]
    return read, size(tensors_in(written))


def launches(name: str, args: Sequence[Any]) -> int:
    """The least number of kernels that the operation launches."""
    return int(math.prod(args[0].shape[:-2])) if name in ONE_BY_ONE else 1
