"""The building blocks of the family, for use in one's own optimizer: pure, or in place where their documentation says so.

All take a leading batch dim and run on CPU and CUDA.
"""

from lather.optim.adam import adam_update
from lather.optim.eigenbasis import (
    get_eigenbasis_eigh,
    get_eigenbasis_qr,
    get_eigenbasis_svd,
    precondition,
    update_eigenbasis_and_momentum,
)
from lather.optim.kronecker import init_kronecker_factors, update_kronecker_factors, update_kronecker_factors_kl

__all__ = [
    "adam_update",
    "get_eigenbasis_eigh",
    "get_eigenbasis_qr",
    "get_eigenbasis_svd",
    "init_kronecker_factors",
    "precondition",
    "update_eigenbasis_and_momentum",
    "update_kronecker_factors",
    "update_kronecker_factors_kl",
]
