"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3, with the amortised refresh of
its algorithm 4. Statistics of earlier steps precondition this one: project in, Adam, project out, then update the factors, then refresh.

Letters: W parameter, G gradient, U update, L and R (here K_i) the Kronecker factors, Q_i their eigenbases, M = exp_avg, V = exp_avg_sq,
both kept in eigenbasis coordinates once a basis exists. Every tensor carries a leading batch dim B (experts, or 1).

Trade-off: one factor and one basis per dim are kept (2 (m^2 + n^2) elements for a matrix) so that a step costs two products per dim
and the eigenvectors may go stale between refreshes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.adam import adam_update
from lather.optim.eigenbasis import DEFAULT_TOLERANCE, RefreshCounts, precondition, update_eigenbasis_and_momentum
from lather.optim.kronecker import bias_corrected_beta, init_kronecker_factors, update_kronecker_factors
from lather.optim.layout import MATRIX_LAYOUTS, layout_of
from lather.optim.optimizer import MatrixOptimizer, MatrixState, _state_bytes, is_finite_number
from lather.shapes import Bool, Float

logger = logging.getLogger(__name__)

PRECISIONS = ("highest", "high", "medium")


def soap_update(w: Float[Tensor, "b *dims"], g: Float[Tensor, "b *dims"], s: MatrixState, o: Mapping[str, Any]) -> None:
    """One step of SOAP for a batch of equal tensors, refresh aside; `w` and `s` change in place, `g` does not.

    `o` are the options of the parameter group, under the names of `SOAP`'s arguments.
    """
    t, lr, idle = s.step, float(o["lr"]), idle_experts(g, o)
    if t == 1:
        for dim, k in init_kronecker_factors(g, s.factors).items():
            s.factors[dim].copy_(k)

    if o["weight_decay"] and o["use_decoupled_weight_decay"]:
        w.mul_(1 - lr * o["weight_decay"])
    elif o["weight_decay"]:
        g = g.add(w.to(g.dtype), alpha=o["weight_decay"])

    bases = s.bases if t > o["adam_warmup_steps"] else {}
    u = adam_update(
        precondition(g, bases, "in"),
        s.exp_avg,
        s.exp_avg_sq,
        t,
        betas=o["betas"],
        eps=o["eps"],
        correct_bias=o["correct_bias"],
        nesterov=o["use_nesterov"],
    )
    w.sub_(_scaled(precondition(u, bases, "out"), s, o), alpha=lr)

    beta = o["shampoo_beta"] if o["shampoo_beta"] >= 0 else o["betas"][1]
    if o["correct_bias"]:
        beta = bias_corrected_beta(beta, t)
    update_kronecker_factors(s.factors, g, beta, keep=idle)


def soap_refresh_due(t: int, o: Mapping[str, Any]) -> bool:
    """Whether step t ends with a refresh: at the end of Adam's warm-up, then every step of the preconditioner's, then every f steps."""
    if t <= o["adam_warmup_steps"]:
        return bool(t == o["adam_warmup_steps"])
    f = o["precondition_frequency"]
    interval = f(t) if callable(f) else f
    if not _is_count(1)(interval):
        raise ValueError(f"precondition_frequency gives {interval!r} for step {t}: it must give an integer >= 1")
    return bool(t <= o["precondition_warmup_steps"] or t % interval == 0)


def soap_refresh(g: Float[Tensor, "b *dims"], s: MatrixState, o: Mapping[str, Any]) -> RefreshCounts:
    """Bring the bases up to date with the factors. The first ones, at the end of Adam's warm-up, are whole eigendecompositions,
    for idle experts too: there is no basis to keep yet."""
    if s.step == o["adam_warmup_steps"]:
        return update_eigenbasis_and_momentum(s.factors, s.bases, s.exp_avg, s.exp_avg_sq, use_eigh=True, second_moment=o["second_moment"])
    tolerance = o["adaptive_update_tolerance"] or DEFAULT_TOLERANCE
    return update_eigenbasis_and_momentum(
        s.factors,
        s.bases,
        s.exp_avg,
        s.exp_avg_sq,
        use_eigh=o["use_eigh"],
        second_moment=o["second_moment"],
        power_iter_steps=o["power_iter_steps"],
        tolerance=tolerance if o["use_adaptive_criteria"] else None,
        keep=idle_experts(g, o),
    )


def idle_experts(g: Float[Tensor, "b *dims"], o: Mapping[str, Any]) -> Bool[Tensor, " b"] | None:
    """The experts that saw no token in this step (their gradient is exactly zero); None where nothing is an expert."""
    if o["matrix_layout"] != "per_expert" or g.dim() < 3:
        return None
    return (g == 0).flatten(1).all(1)


def _scaled(u: Tensor, s: MatrixState, o: Mapping[str, Any]) -> Tensor:
    """The optional normalisations of the update, each per matrix."""
    per_matrix = (len(u),) + (1,) * (u.dim() - 1)
    if o["trace_normalization"] and s.factors:
        trace = s.factors[min(s.factors)].diagonal(dim1=-2, dim2=-1).sum(-1)
        u = u * trace.sqrt().view(per_matrix)
    if o["normalize_preconditioned_grads"]:
        u = u / (1e-30 + _rms(u).view(per_matrix))
    if o["max_update_rms"] > 0:
        u = u * (o["max_update_rms"] / (_rms(u) + 1e-12)).clamp(max=1).view(per_matrix)
    return u


def _rms(u: Tensor) -> Tensor:
    return u.reshape(len(u), -1).square().mean(1).sqrt()


class SOAP(MatrixOptimizer):
    """Adam in the slowly turning eigenbasis of Shampoo's preconditioner (arXiv:2409.11321).

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; every option below may differ per group.
        lr: learning rate, >= 0.
        betas: decay rates of Adam's two moments, each in [0, 1).
        shampoo_beta: decay rate of the Kronecker factors in [0, 1); negative: `betas[1]`.
        eps: added to the root of the second moment, >= 0.
        weight_decay: >= 0. Decoupled (W -= lr * weight_decay * W) unless `use_decoupled_weight_decay` is False, then added to the
            gradient.
        use_nesterov: Adam's momentum one step ahead.
        precondition_frequency: steps between refreshes of the eigenbases, an int >= 1 or a callable of the step.
        precondition_warmup_steps: refresh at every step up to this one.
        adam_warmup_steps: plain Adam for this many steps, then the first eigenbases; at least 1, and less than
            `precondition_warmup_steps` if that is set.
        precondition_1d: also give 1-D parameters a factor; otherwise they are plain Adam.
        max_precond_dim: a longer dim has no factor. 0: no dim has one, so the group is AdamW.
        trace_normalization: multiply the update by the root of the first factor's trace.
        normalize_preconditioned_grads: scale the update to rms 1.
        correct_bias: Adam's bias correction, and the same for the factors.
        second_moment: how exp_avg_sq follows the turning bases: "permute" or "rotate" (see `lather.optim.eigenbasis`).
        fp32_matmul_prec, qr_fp32_matmul_prec: torch's fp32 matmul precision for the update and for the refresh.
        use_eigh: refresh by whole eigendecompositions instead of orthogonal iteration.
        use_adaptive_criteria: leave out bases that still diagonalise their factor to `adaptive_update_tolerance` in (0, 1), default 1e-7.
        power_iter_steps: steps of orthogonal iteration per refresh, >= 1.
        max_update_rms: clip each matrix's update to this rms; 0: no clipping.
        matrix_layout: "tensor" (a factor per dim) or "per_expert" (the leading dim of a parameter with three or more dims is a batch of
            experts, and one that saw no token keeps its factors and basis; a 2-D parameter is one matrix).
        nonfinite: a non-finite gradient: "raise" before anything changes, "skip" that parameter and count it, or "ignore".
        state_dtype: dtype of moments, factors and bases, whatever the parameter's.
        max_state_bytes: refuse a parameter whose state would take more bytes.

    Raises:
        ValueError, TypeError: at construction, for a value out of range or a parameter that the layout cannot take; names the remedy.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float = -1,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        use_decoupled_weight_decay: bool = True,
        use_nesterov: bool = False,
        precondition_frequency: int | Callable[[int], int] = 10,
        precondition_warmup_steps: int = 0,
        adam_warmup_steps: int = 1,
        precondition_1d: bool = False,
        max_precond_dim: int = 8192,
        trace_normalization: bool = False,
        normalize_preconditioned_grads: bool = False,
        correct_bias: bool = True,
        second_moment: str = "permute",
        fp32_matmul_prec: str = "highest",
        use_eigh: bool = False,
        qr_fp32_matmul_prec: str = "highest",
        use_adaptive_criteria: bool = False,
        adaptive_update_tolerance: float | None = None,
        power_iter_steps: int = 1,
        max_update_rms: float = 0.0,
        matrix_layout: str = "tensor",
        nonfinite: str = "raise",
        state_dtype: torch.dtype = torch.float32,
        max_state_bytes: int | None = None,
    ) -> None:
        options = dict(locals())
        for other in ("self", "params", "__class__"):
            options.pop(other)
        check_soap_options(options)
        super().__init__(params, options)

    def _check_options(self, options: dict[str, Any]) -> None:
        check_soap_options(options)

    def _update(self, w: Tensor, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> None:
        soap_update(w, g, state, options)

    def _refresh_due(self, step: int, options: Mapping[str, Any]) -> bool:
        return soap_refresh_due(step, options)

    def _refresh(self, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> RefreshCounts:
        return soap_refresh(g, state, options)


def _is_count(minimum: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(minimum: float = 0.0, below: float | None = None) -> Callable[[Any], bool]:
    return lambda value: is_finite_number(value) and value >= minimum and (below is None or value < below)


def _one_of(*choices: str) -> tuple[str, Callable[[object], bool]]:
    return "one of " + ", ".join(repr(choice) for choice in choices), lambda value: value in choices


_BOOL: tuple[str, Callable[[object], bool]] = ("True or False", lambda value: isinstance(value, bool))

_CONSTRAINTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": (
        "a number >= 0",
        lambda lr: _is_number()(float(lr) if isinstance(lr, Tensor) else lr),
    ),
    "betas": (
        "two numbers in [0, 1)",
        lambda betas: isinstance(betas, tuple | list) and len(betas) == 2 and all(map(_is_number(below=1.0), betas)),
    ),
    "shampoo_beta": ("a number below 1 (negative: betas[1])", _is_number(minimum=-float("inf"), below=1.0)),
    "eps": ("a number >= 0", _is_number()),
    "weight_decay": ("a number >= 0", _is_number()),
    "use_decoupled_weight_decay": _BOOL,
    "use_nesterov": _BOOL,
    "precondition_frequency": ("an integer >= 1 or a callable of the step", lambda f: callable(f) or _is_count(1)(f)),
    "precondition_warmup_steps": ("an integer >= 0", _is_count(0)),
    "adam_warmup_steps": ("an integer", lambda steps: isinstance(steps, int) and not isinstance(steps, bool)),
    "precondition_1d": _BOOL,
    "max_precond_dim": ("an integer >= 0 (0: no preconditioning)", _is_count(0)),
    "trace_normalization": _BOOL,
    "normalize_preconditioned_grads": _BOOL,
    "correct_bias": _BOOL,
    "second_moment": _one_of("permute", "rotate"),
    "fp32_matmul_prec": _one_of(*PRECISIONS),
    "use_eigh": _BOOL,
    "qr_fp32_matmul_prec": _one_of(*PRECISIONS),
    "use_adaptive_criteria": _BOOL,
    "adaptive_update_tolerance": (
        "a number in (0, 1) or None",
        lambda tol: tol is None or (is_finite_number(tol) and 0 < tol < 1),
    ),
    "power_iter_steps": ("an integer >= 1", _is_count(1)),
    "max_update_rms": ("a number >= 0 (0: no clipping)", _is_number()),
    "matrix_layout": _one_of(*MATRIX_LAYOUTS),
    "nonfinite": _one_of("raise", "skip", "ignore"),
    "state_dtype": ("torch.float32 or torch.float64", lambda dtype: dtype in (torch.float32, torch.float64)),
    "max_state_bytes": ("an integer >= 1 or None", lambda size: size is None or _is_count(1)(size)),
}


def check_soap_options(options: dict[str, Any]) -> None:
    """Raise ValueError for an option out of range, naming value and constraint; bring the two warm-ups into order, with a log line."""
    for name, (constraint, holds) in _CONSTRAINTS.items():
        if name in options and not holds(options[name]):
            raise ValueError(f"{name}={options[name]!r} is not valid: give {constraint}")
    adam, precondition = options["adam_warmup_steps"], options["precondition_warmup_steps"]
    adam = max(adam, 1)
    if adam >= precondition > 0:
        adam = max(1, precondition - 1)
    if adam != options["adam_warmup_steps"]:
        logger.info(
            "adam_warmup_steps %d becomes %d: at least 1, and less than precondition_warmup_steps (%d) if that is set",
            options["adam_warmup_steps"],
            adam,
            precondition,
        )
        options["adam_warmup_steps"] = adam


def state_bytes(shape: tuple[int, ...], options: Mapping[str, Any] | None = None) -> int:
    """Bytes of optimizer state that a parameter of `shape` will have, without allocating anything.

    `options` are those of its group that matter: `matrix_layout`, `max_precond_dim`, `precondition_1d`, `state_dtype`; missing ones
    have SOAP's defaults.
    """
    defaults = {"matrix_layout": "tensor", "max_precond_dim": 8192, "precondition_1d": False, "state_dtype": torch.float32}
    merged = {**defaults, **(options or {})}
    return _state_bytes(layout_of(tuple(shape), merged), merged)
