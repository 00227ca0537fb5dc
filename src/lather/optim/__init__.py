"""The SOAP family as ordinary torch optimizers. Needs torch alone."""

from lather.optim import functional
from lather.optim.groups import parameter_groups
from lather.optim.optimizer import MatrixOptimizer
from lather.optim.soap import SOAP, state_bytes

__all__ = [
    "SOAP",
    "MatrixOptimizer",
    "functional",
    "parameter_groups",
    "state_bytes",
]
