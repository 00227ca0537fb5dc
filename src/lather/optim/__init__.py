"""Matrix optimizers as ordinary torch optimizers: the SOAP family, Muon and its relatives,
Shampoo, PSGD-Kron, AdamW, and rules of your own. Requires torch only."""

from lather.optim import functional as functional
from lather.optim import schedules as schedules
from lather.optim.batched.optimizer import MatrixOptimizer as MatrixOptimizer
from lather.optim.batched.pending import PendingRefreshes as PendingRefreshes
from lather.optim.description import Decisions as Decisions
from lather.optim.groups import describe_parameters as describe_parameters
from lather.optim.groups import parameter_groups as parameter_groups
from lather.optim.groups import parameters_by_kind as parameters_by_kind
from lather.optim.heads import per_head as per_head
from lather.optim.kinds import Decision as Decision
from lather.optim.optimizers import KLSOAP as KLSOAP
from lather.optim.optimizers import REKLS as REKLS
from lather.optim.optimizers import SOAP as SOAP
from lather.optim.optimizers import AdaMuon as AdaMuon
from lather.optim.optimizers import AdamW as AdamW
from lather.optim.optimizers import EmbeddingSOAP as EmbeddingSOAP
from lather.optim.optimizers import Muon as Muon
from lather.optim.optimizers import PSGDKron as PSGDKron
from lather.optim.optimizers import Scion as Scion
from lather.optim.optimizers import Shampoo as Shampoo
from lather.optim.optimizers import SOAPMuon as SOAPMuon
from lather.optim.optimizers import StackedSOAP as StackedSOAP
from lather.optim.optimizers import constructor as constructor
from lather.optim.optimizers import state_bytes as state_bytes
from lather.optim.rule import Due as Due
from lather.optim.rule import Entry as Entry
from lather.optim.rule import Matrix as Matrix
from lather.optim.rule import RefreshingRule as RefreshingRule
from lather.optim.rule import Rule as Rule
from lather.optim.rule import State as State
