"""The optimizers of the package: for each registered rule a `MatrixOptimizer` whose default rule it
is, with the rule's options as arguments (`constructor`); and the size of their state."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.optim.optimizer import ParamsT

from lather.optim.batched.arguments import Published, describe_unknown, translated
from lather.optim.batched.layouts import layout_of, rule_for_dtype
from lather.optim.batched.optimizer import MatrixOptimizer
from lather.optim.options import options_of
from lather.optim.rule import Rule
from lather.optim.rules.adamuon import AdaMuonRule
from lather.optim.rules.adamw import AdamWRule
from lather.optim.rules.kl_soap import KLSOAPRule, REKLSRule, StackedSOAPRule
from lather.optim.rules.muon import MuonRule
from lather.optim.rules.psgd_kron import PSGDKronRule
from lather.optim.rules.scion import ScionRule
from lather.optim.rules.shampoo import ShampooRule
from lather.optim.rules.soap import EmbeddingSOAPRule, SOAPRule
from lather.optim.rules.soap_muon import SOAPMuonRule

P = ParamSpec("P")
S = TypeVar("S", bound=MatrixOptimizer)

PUBLISHED: Published = {
    "use_eigh": (True, "refresh_method", "auto", "eigh"),
    "use_decoupled_weight_decay": (False, "weight_decay_method", "decoupled", "l2"),
}
"""Arguments of the SOAP of Emerging-Optimizers."""


def constructor(
    rule: Callable[P, Rule],
) -> Callable[[Callable[[S, ParamsT, Rule], None]], Callable[Concatenate[S, ParamsT, P], None]]:
    """Decorate the `__init__` of an optimizer: callers pass the options of its rule instead of the
    rule, and editors and mypy know the names and types of these options."""
    options = inspect.signature(rule)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("self", "params")
    ]
    signature = options.replace(parameters=[*parameters, *options.parameters.values()])

    def decorate(
        init: Callable[[S, ParamsT, Rule], None],
    ) -> Callable[Concatenate[S, ParamsT, P], None]:
        def construct(self: S, *args: Any, **keywords: Any) -> None:
            keywords = translated(keywords, self.published, {})
            if unknown := [name for name in keywords if name not in signature.parameters]:
                known = [name for name in ["params", *options.parameters] if name != "tp_group"]
                raise TypeError(describe_unknown(type(self).__name__, unknown, known))
            try:
                bound = signature.bind(self, *args, **keywords)
            except TypeError as error:  # `params` is missing, or an argument is given twice
                raise TypeError(f"{type(self).__name__}: {error}") from None
            init(self, bound.arguments["params"], rule(*bound.args[2:], **bound.kwargs))

        construct.__qualname__ = construct.__name__ = init.__qualname__  # in messages of Python
        construct.__signature__ = signature  # type: ignore[attr-defined]
        return construct  # type: ignore[return-value]  # its parameters are those of `signature`

    return decorate


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


class Shampoo(MatrixOptimizer):
    """Momentum times inverse roots of Kronecker factors, with the size of Adam's update
    (arXiv:1802.09568)."""

    rule = ShampooRule

    @constructor(ShampooRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class PSGDKron(MatrixOptimizer):
    """Momentum, whitened by Kronecker factors that are fitted to it at every step
    (arXiv:2211.04422)."""

    rule = PSGDKronRule

    @constructor(PSGDKronRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class AdaMuon(MatrixOptimizer):
    """Muon on the signs of the momentum, divided by the root of the second moment of the
    orthogonalized update (arXiv:2507.11005)."""

    rule = AdaMuonRule

    @constructor(AdaMuonRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


class Scion(MatrixOptimizer):
    """Momentum in steps of a given norm: orthogonalized for hidden matrices, signs for embeddings
    and heads (arXiv:2502.07529)."""

    rule = ScionRule

    @constructor(ScionRule)
    def __init__(self, params: ParamsT, rule: Rule) -> None:
        super().__init__(params, rule)


OPTIMIZER_OF: dict[type[Rule], type[MatrixOptimizer]] = {
    optimizer.rule: optimizer
    for optimizer in (
        *(AdamW, KLSOAP, REKLS, StackedSOAP, Muon, SOAP, EmbeddingSOAP, SOAPMuon),
        *(Shampoo, PSGDKron, AdaMuon, Scion),
    )
}
"""The registered rules, each with the optimizer whose default rule it is."""


def state_bytes(
    shape: tuple[int, ...],
    optimizer: type[MatrixOptimizer] | type[Rule] = SOAP,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> int:
    """Return the exact bytes of optimizer state of a parameter of `shape`, including the step
    counter.

    `optimizer` is an optimizer (SOAP, Muon, ...) or the class of a rule; `options` are those of its
    options that differ from the defaults, of which layout, sides and dtypes matter. `dtype` is that
    of the parameter, on which the state depends if `state_dtype` is None.

    Raises:
        ValueError: for an option that the optimizer does not have, or that is out of range.
    """
    rule = optimizer if issubclass(optimizer, Rule) else optimizer.rule
    known = options_of(rule)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            f"unknown option {unknown[0]!r} of {optimizer.__name__}; known options: "
            f"{', '.join(sorted(known))}"
        )
    rule_of_dtype = rule_for_dtype(rule(**{"lr": 1e-3, **options}), dtype)
    return layout_of(tuple(map(operator.index, shape)), rule_of_dtype).state_bytes()
