"""Optimizers, parameters, gradients and comparisons that the tests of the family share."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import pytest
import torch
from strangers import Lion, Shampoo
from torch import Tensor

from lather.kernels.triangle import unpack_triangle
from lather.optim import (
    KLSOAP,
    REKLS,
    SOAP,
    AdaMuon,
    AdamW,
    MatrixOptimizer,
    Muon,
    PSGDKron,
    Rule,
    Scion,
    SOAPMuon,
    StackedSOAP,
)
from lather.optim import Shampoo as GraftedShampoo

PER_EXPERT = {"matrix_layout": "per_expert"}
EVERY_SECOND = {"precondition_frequency": 2}

SOAP_KINDS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "soap": (SOAP, EVERY_SECOND),
    "soap_per_expert": (SOAP, {**EVERY_SECOND, **PER_EXPERT, "second_moment": "rotate"}),
    "soap_stacked": (SOAP, {"precondition_frequency": 3, "matrix_layout": "stacked"}),
    "soap_orthogonalized": (
        SOAP,
        {**EVERY_SECOND, "orthogonalize": True, "statistics_of": "momentum"},
    ),
    "soap_own_momentum_per_expert": (
        SOAP,
        {"precondition_frequency": 1, "momentum_in": "parameter", **PER_EXPERT},
    ),
    "soap_one_sided": (SOAP, {**EVERY_SECOND, "sides": "smaller", **PER_EXPERT}),
    "kl_soap": (KLSOAP, {"precondition_frequency": 3}),
    "kl_soap_per_expert": (KLSOAP, {**PER_EXPERT, "second_moment": "permute"}),
    "kl_soap_floor": (KLSOAP, {**EVERY_SECOND, "eigenvalue_floor": 1e-2, "sides": "auto"}),
    "rekls": (REKLS, {}),
    "stacked_soap": (StackedSOAP, {}),
    "soap_per_head": (SOAP, {**EVERY_SECOND, "matrix_layout": "per_head", "head_rows": 2}),
}
"""Kinds of the SOAP family: Adam in bases, on both sides or one, with a warm-up of plain Adam or
without."""

KINDS: dict[str, tuple[type[MatrixOptimizer] | type[Rule], dict[str, Any]]] = {
    **SOAP_KINDS,
    "muon": (Muon, {}),
    "muon_per_expert": (Muon, {**PER_EXPERT, "normalize": "row", "slow_momentum_start": 2}),
    "muon_stacked": (
        Muon,
        {"matrix_layout": "stacked", "keep_norm": True, "slow_momentum_start": 2},
    ),
    "muon_per_head": (
        Muon,
        {"matrix_layout": "per_head", "head_columns": 2, "normalize": "row", "keep_norm": True},
    ),
    "soap_muon": (SOAPMuon, EVERY_SECOND),
    "soap_muon_per_expert": (SOAPMuon, {**EVERY_SECOND, **PER_EXPERT, "sides": "both"}),
    "adamw": (AdamW, {}),
    "grafted_shampoo": (GraftedShampoo, {**EVERY_SECOND, "damping": 1e-2}),
    "grafted_shampoo_per_expert": (
        GraftedShampoo,
        {**EVERY_SECOND, **PER_EXPERT, "sides": "smaller", "grafting": "momentum"},
    ),
    "psgd_kron": (PSGDKron, {}),
    "psgd_kron_per_expert": (PSGDKron, {**PER_EXPERT, "sides": "smaller"}),
    "adamuon": (AdaMuon, {"signs": False}),
    "scion": (Scion, {}),
    "shampoo": (Shampoo, {**EVERY_SECOND, "lr": 1e-2}),
    "shampoo_per_expert": (Shampoo, {**PER_EXPERT, "lr": 1e-2}),
    "shampoo_stacked": (Shampoo, {"matrix_layout": "stacked", "lr": 1e-2}),
    "lion": (Lion, {"lr": 1e-2}),
    "lion_per_expert": (Lion, {**PER_EXPERT, "lr": 1e-2}),
}
"""Every optimizer and layout, and the rules of `strangers`, by name: an optimizer's class or a
rule's, and options."""

CODED_KINDS = {
    f"{kind}_int8": (KINDS[kind][0], {**KINDS[kind][1], "state_dtype": torch.int8})
    for kind in (
        *("soap_per_expert", "kl_soap", "stacked_soap", "muon_stacked", "soap_muon", "adamw"),
        "psgd_kron",
    )
}
"""Kinds with state in 8 bits, which small matrices have if `formats.MIN_CODED` is lowered."""

FEW_SOAP_KINDS = ("soap", "kl_soap_per_expert", "stacked_soap")
FEW_KINDS = (
    *(*FEW_SOAP_KINDS, "muon_per_expert", "soap_muon", "shampoo_per_expert", "lion"),
    *("grafted_shampoo", "psgd_kron_per_expert", "adamuon"),
)
"""Kinds in which each layout and rule occurs once."""

WITH_EXPERTS = (
    "soap_per_expert",
    "soap_own_momentum_per_expert",
    "kl_soap_per_expert",
    "soap_one_sided",
    "soap_muon_per_expert",
    "shampoo_per_expert",
    "grafted_shampoo_per_expert",
    "psgd_kron_per_expert",
)
"""Kinds that know which experts got no token."""

CLASSES: dict[str, type[MatrixOptimizer]] = {
    cls.__name__: cls for cls in (SOAP, KLSOAP, REKLS, StackedSOAP, Muon, SOAPMuon, AdamW)
}

MATRICES = ((6, 4), (3, 4, 5), (6, 4))
SHAPES = (*MATRICES, (5,), (), (0, 3))

FULL_RANK = {"adam_warmup_steps": 3, "state_dtype": torch.float64}
"""Options for comparisons to rounding: the eigenvectors of a null space are arbitrary, so the first
bases come when factors have full rank."""

COUPLED = {"weight_decay_method": "l2"}
"""The option under which weight decay is added to the gradient."""

OF_BASES = ("adam_warmup_steps", "precondition_frequency")
"""Options that tests give to every kind, but that only kinds with bases take."""


every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW_KINDS)


def make(kind: str, params: Iterable[Any], **options: Any) -> MatrixOptimizer:
    """Make the optimizer `kind`; parameters that have no matrix in its layout are in a group with
    layout "tensor".

    `adam_warmup_steps` is the warm-up of every rule that has one, and left out of the others, as
    `precondition_frequency` is."""
    cls, preset = {**KINDS, **CODED_KINDS}[kind]
    params = list(params)
    fitting = [p.dim() >= 2 for p in params]
    if "per_head" in preset.values():
        dim, size = (0, preset["head_rows"]) if "head_rows" in preset else (1, 2)
        fitting = [p.dim() == 2 and p.shape[dim] % size == 0 for p in params]
    pairs = list(zip(params, fitting, strict=True))
    groups = [
        {"params": [p for p, fits in pairs if fits]},
        {"params": [p for p, fits in pairs if not fits], "matrix_layout": "tensor"},
    ]
    rule = cls if issubclass(cls, Rule) else cls.rule
    merged = {"lr": 1e-2, **preset, **options}
    if issubclass(cls, SOAPMuon) and "adam_warmup_steps" in merged:
        merged["muon_warmup_steps"] = merged.pop("adam_warmup_steps")
    for name in OF_BASES:
        if name not in {field.name for field in fields(rule)}:
            merged.pop(name, None)
    groups = [group for group in groups if group["params"]]
    return MatrixOptimizer(groups, rule(**merged)) if cls is rule else cls(groups, **merged)


def whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with its factors as whole matrices; those of `strangers` are whole."""
    return {
        key: unpack_triangle(x.flatten(-2), x.shape[-2] - (x.shape[-2] == 2 * x.shape[-1] + 1))
        if key.startswith("factor")
        and not key.endswith(("_codes", "_scale", "_diagonal"))
        and x.dim() > 1
        and x.shape[-1] != x.shape[-2]
        else x
        for key, x in state.items()
    }


class Run(NamedTuple):
    """An optimizer and its parameters, in their order."""

    optimizer: Any
    params: list[torch.nn.Parameter]

    def steps(self, numbers: Iterable[int]) -> None:
        """Take steps with gradients that are drawn from their numbers alone."""
        run(self.optimizer, self.params, numbers)

    @property
    def groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    def state(self, number: int) -> dict[str, Tensor]:
        """Return the state of a parameter by its number."""
        state: dict[str, Tensor] = self.optimizer.state[self.params[number]]
        return state


def run_of(
    kind: Any,
    shapes: Iterable[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Run:
    """Make an optimizer of a kind of `KINDS`, or of a class of optimizers, with parameters of these
    shapes, which are equal at every call."""
    params = parameters(shapes, dtype)
    if isinstance(kind, str):
        return Run(make(kind, params, **options), params)
    return Run(kind(params, **{"lr": 1e-2, **options}), params)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    )


def parameters(
    shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.nn.Parameter]:
    return [parameter(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def clones(params: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    """Make parameters of equal values and strides, without gradients."""
    return [
        torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params
    ]


def give_gradients(params: Iterable[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(
            p.grad_dtype or p.dtype
        )


def copy_gradients(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for p, q in zip(source, target, strict=True):
        q.grad = None if p.grad is None else p.grad.detach().to(q.dtype, copy=True)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def run_both(
    a: tuple[torch.optim.Optimizer, Sequence[Tensor]],
    b: tuple[torch.optim.Optimizer, Sequence[Tensor]],
    steps: Iterable[int],
) -> None:
    """Take two optimizers through the same gradients."""
    for step in steps:
        give_gradients(a[1], step)
        copy_gradients(a[1], b[1])
        a[0].step()
        b[0].step()


def copied(a: Run, how: Any) -> Run:
    """Copy an optimizer with its parameters by `how`, such as `copy.deepcopy`."""
    optimizer = how(a.optimizer)
    old, new = ([p for group in o.param_groups for p in group["params"]] for o in (a[0], optimizer))
    copies = dict(zip(map(id, old), new, strict=True))
    return Run(optimizer, [copies[id(p)] for p in a.params])


def assert_same(a: Run, b: Run) -> None:
    """Check that weights and state are equal to the bit."""
    assert all_same(a.params, b.params)
    assert same_state(a.optimizer, a.params, b.optimizer, b.params)


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Save a state as torch does, and return what is loaded."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
    )


def all_same(params: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(same(p.detach(), q.detach()) for p, q in zip(params, others, strict=True))


def same_state(
    a: torch.optim.Optimizer,
    params: Iterable[Tensor],
    b: torch.optim.Optimizer,
    others: Iterable[Tensor],
) -> bool:
    """Whether two states have equal keys, and values and dtypes equal to the bit."""
    for p, q in zip(params, others, strict=True):
        ours, theirs = a.state.get(p, {}), b.state.get(q, {})
        if ours.keys() != theirs.keys() or not all(
            same(value, theirs[key]) for key, value in ours.items()
        ):
            return False
    return True


def largest_difference(params: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    pairs = list(zip(params, others, strict=True))
    assert all(p.shape == q.shape for p, q in pairs)
    return max(
        float((p.detach().double() - q.detach().double()).abs().max())
        for p, q in pairs
        if p.numel()
    )


def moment_of(optimizer: torch.optim.Optimizer, p: Tensor) -> str:
    """The name of its first moment."""
    return next(name for name in ("exp_avg", "momentum_buffer") if name in optimizer.state[p])


def snapshot(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    state = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    return [p.detach().clone() for p in params] + state
