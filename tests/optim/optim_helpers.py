"""Optimizers, parameters, gradients and comparisons that the tests of the family share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lather.optim import KLSOAP, REKLS, SOAP, MatrixOptimizer, StackedSOAP

KINDS: dict[str, tuple[type[MatrixOptimizer], dict[str, Any]]] = {
    "soap": (SOAP, {"precondition_frequency": 2}),
    "soap_per_expert": (SOAP, {"precondition_frequency": 2, "matrix_layout": "per_expert", "second_moment": "rotate"}),
    "soap_stacked": (SOAP, {"precondition_frequency": 3, "matrix_layout": "stacked"}),
    "kl_soap": (KLSOAP, {"precondition_frequency": 3}),
    "kl_soap_per_expert": (KLSOAP, {"matrix_layout": "per_expert", "second_moment": "permute"}),
    "rekls": (REKLS, {}),
    "stacked_soap": (StackedSOAP, {}),
}
"""Every optimizer and layout: name -> class and options."""

FEW_KINDS = ("soap", "kl_soap_per_expert", "stacked_soap")
"""Each layout and rule once."""

CLASSES = {"SOAP": SOAP, "KLSOAP": KLSOAP, "REKLS": REKLS, "StackedSOAP": StackedSOAP}

MATRICES = ((6, 4), (3, 4, 5), (6, 4))
SHAPES = (*MATRICES, (5,), (), (0, 3))

FULL_RANK = {"adam_warmup_steps": 3, "state_dtype": torch.float64}
"""For comparisons to rounding: the eigenvectors of a null space are arbitrary, so the first bases come when factors have full rank."""


def make(kind: str, params: Iterable[Any], **options: Any) -> MatrixOptimizer:
    """The optimizer `kind` over parameters; those with fewer than two dims are in a group with layout "tensor"."""
    cls, preset = KINDS[kind]
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2]},
        {"params": [p for p in params if p.dim() < 2], "matrix_layout": "tensor"},
    ]
    return cls([group for group in groups if group["params"]], **{"lr": 1e-2, **preset, **options})


def coupled_decay(kind: str) -> dict[str, Any]:
    """The option under which weight decay is added to the gradient."""
    return {"use_decoupled_weight_decay": False} if kind.startswith("soap") else {"weight_decay_method": "l2"}


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def parameters(shapes: Iterable[Sequence[int]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [parameter(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def clones(params: Iterable[Tensor]) -> list[torch.nn.Parameter]:
    """New parameters of equal value and strides, without gradients."""
    return [torch.nn.Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in params]


def give_gradients(params: Iterable[Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def copy_gradients(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for p, q in zip(source, target, strict=True):
        q.grad = None if p.grad is None else p.grad.detach().to(q.dtype, copy=True)


def run(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def run_both(a: tuple[torch.optim.Optimizer, Sequence[Tensor]], b: tuple[torch.optim.Optimizer, Sequence[Tensor]], steps: range) -> None:
    """Two optimizers through the same gradients."""
    for step in steps:
        give_gradients(a[1], step)
        copy_gradients(a[1], b[1])
        a[0].step()
        b[0].step()


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def all_same(params: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    return all(same(p.detach(), q.detach()) for p, q in zip(params, others, strict=True))


def same_state(a: torch.optim.Optimizer, params: Iterable[Tensor], b: torch.optim.Optimizer, others: Iterable[Tensor]) -> bool:
    """Equal keys, and equal values and dtypes to the bit."""
    for p, q in zip(params, others, strict=True):
        ours, theirs = a.state.get(p, {}), b.state.get(q, {})
        if ours.keys() != theirs.keys() or not all(same(value, theirs[key]) for key, value in ours.items()):
            return False
    return True


def largest_difference(params: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    pairs = list(zip(params, others, strict=True))
    assert all(p.shape == q.shape for p, q in pairs)
    return max(float((p.detach().double() - q.detach().double()).abs().max()) for p, q in pairs if p.numel())


def snapshot(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[Tensor]:
    state = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    return [p.detach().clone() for p in params] + state
