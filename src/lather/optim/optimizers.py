"""The optimizers of the package: for each registered rule a `MatrixOptimizer` whose default rule it
is, with the rule's options as arguments."""

from __future__ import annotations

from torch.optim.optimizer import ParamsT

from lather.optim.batched.arguments import Published
from lather.optim.batched.optimizer import MatrixOptimizer, constructor
from lather.optim.rule import Rule
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.kl_soap import KLSOAPRule, REKLSRule, StackedSOAPRule
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.soap import EmbeddingSOAPRule, SOAPRule
from lather.optim.rules.soap_muon import SOAPMuonRule

PUBLISHED: Published = {
    "use_eigh": (True, "refresh_method", "auto", "eigh"),
    "use_decoupled_weight_decay": (False, "weight_decay_method", "decoupled", "l2"),
}
"""Arguments of the SOAP of Emerging-Optimizers."""


class AdamW(MatrixOptimizer):
    """Adam with decoupled weight decay, with the engine's sharding, state dtypes and
    checkpoints."""

    rule = AdamWRule

    @constructor(AdamWRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class KLSOAP(MatrixOptimizer):
    """SOAP with KL-corrected statistics that include the step's own gradient (arXiv:2509.03378)."""

    rule = KLSOAPRule

    @constructor(KLSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class REKLS(KLSOAP):
    """KLSOAP with a full eigendecomposition of every factor at every step: the exact rule that
    KLSOAP approximates."""

    rule = REKLSRule

    @constructor(REKLSRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        MatrixOptimizer.__init__(self, params, rule)


class StackedSOAP(KLSOAP):
    """KLSOAP that treats a stack of experts (b, m, n) as one matrix with shared factors."""

    rule = StackedSOAPRule

    @constructor(StackedSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        MatrixOptimizer.__init__(self, params, rule)


class Muon(MatrixOptimizer):
    """Momentum of each matrix and each expert, orthogonalized by Newton-Schulz; vectors take
    AdamW's step at the same learning rate."""

    rule = MuonRule

    @constructor(MuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class SOAP(MatrixOptimizer):
    """Adam in the slowly turning eigenbasis of Shampoo's preconditioner (arXiv:2409.11321)."""

    rule = SOAPRule
    published = PUBLISHED

    @constructor(SOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class EmbeddingSOAP(MatrixOptimizer):
    """SOAP with defaults for embeddings and heads: one basis, on the smaller (hidden) side,
    refreshed at every step."""

    rule = EmbeddingSOAPRule
    published = PUBLISHED

    @constructor(EmbeddingSOAPRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class SOAPMuon(MatrixOptimizer):
    """Muon whose momentum is first preconditioned in eigenbases; vectors take AdamW's step at the
    same learning rate."""

    rule = SOAPMuonRule

    @constructor(SOAPMuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


OPTIMIZER_OF: dict[type[Rule], type[MatrixOptimizer]] = {
    optimizer.rule: optimizer
    for optimizer in (AdamW, KLSOAP, REKLS, StackedSOAP, Muon, SOAP, EmbeddingSOAP, SOAPMuon)
}
"""The registered rules, each with the optimizer whose default rule it is."""
