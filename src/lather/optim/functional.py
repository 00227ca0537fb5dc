"""Building blocks of the optimizers, for use in other optimizers: pure functions, except where
their docstrings say "in place".

All take tensors with a leading batch dim and run on CPU and CUDA.
"""

from lather.kernels.adam_in_basis import adam_in_basis as adam_update
from lather.kernels.triangle import pack_triangle, unpack_triangle
from lather.optim.batched.remainders import exact_weight
from lather.optim.linalg.eigenbasis import (
    get_eigenbasis_eigh,
    get_eigenbasis_qr,
    get_eigenbasis_svd,
    update_eigenbasis_and_momentum,
)
from lather.optim.linalg.kronecker import (
    init_kronecker_factors,
    precondition,
    update_kronecker_factors,
    update_kronecker_factors_kl,
)
from lather.optim.linalg.newton_schulz import orthogonalize

__all__ = [
    "adam_update",
    "exact_weight",
    "get_eigenbasis_eigh",
    "get_eigenbasis_qr",
    "get_eigenbasis_svd",
    "init_kronecker_factors",
    "orthogonalize",
    "pack_triangle",
    "precondition",
    "unpack_triangle",
    "update_eigenbasis_and_momentum",
    "update_kronecker_factors",
    "update_kronecker_factors_kl",
]
