"""Building blocks of the optimizers, for use in your own: pure functions, except where their docstrings say "in place".

All take tensors with a leading batch dim and run on CPU and CUDA.
"""

from lather.kernels.adam_in_basis import adam_in_basis as adam_update
from lather.optim.linalg.eigenbasis import get_eigenbasis_eigh as get_eigenbasis_eigh
from lather.optim.linalg.eigenbasis import get_eigenbasis_qr as get_eigenbasis_qr
from lather.optim.linalg.eigenbasis import get_eigenbasis_svd as get_eigenbasis_svd
from lather.optim.linalg.eigenbasis import update_eigenbasis_and_momentum as update_eigenbasis_and_momentum
from lather.optim.linalg.kronecker import init_kronecker_factors as init_kronecker_factors
from lather.optim.linalg.kronecker import precondition as precondition
from lather.optim.linalg.kronecker import update_kronecker_factors as update_kronecker_factors
from lather.optim.linalg.kronecker import update_kronecker_factors_kl as update_kronecker_factors_kl
from lather.optim.linalg.newton_schulz import orthogonalize as orthogonalize
