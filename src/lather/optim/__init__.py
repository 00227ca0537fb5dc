"""The SOAP family as ordinary torch optimizers. Needs torch alone."""

from lather.optim import functional, schedules
from lather.optim.groups import parameter_groups
from lather.optim.kl_soap import KLSOAP, REKLS, StackedSOAP
from lather.optim.memory import state_bytes
from lather.optim.optimizer import MatrixOptimizer
from lather.optim.soap import SOAP

__all__ = [
    "KLSOAP",
    "REKLS",
    "SOAP",
    "MatrixOptimizer",
    "StackedSOAP",
    "functional",
    "parameter_groups",
    "schedules",
    "state_bytes",
]
