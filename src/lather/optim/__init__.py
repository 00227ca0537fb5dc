"""Matrix optimizers as ordinary torch optimizers: SOAP and its family, Muon, SOAP-Muon, AdamW, and rules of your own. Needs torch alone."""

from lather.optim import functional, schedules
from lather.optim.engine.optimizer import MatrixOptimizer, constructor
from lather.optim.groups import parameter_groups
from lather.optim.memory import state_bytes
from lather.optim.rule import Due, Entry, Matrix, RefreshingRule, Rule, State
from lather.optim.rules import *  # noqa: F403 - the optimizers: one line each, there
