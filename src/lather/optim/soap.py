"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner.

Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv:2409.11321, algorithm 3, with the amortised refresh of
its algorithm 4. Statistics of earlier steps precondition this one: project in, Adam, project out, then update the factors, then refresh.

Letters: W parameter, G gradient, U update, L and R (here K_i) the Kronecker factors, Q_i their eigenbases, M = exp_avg, V = exp_avg_sq,
both kept in eigenbasis coordinates once a basis exists. Every tensor carries a leading batch dim B (matrices of equal shape).

Trade-off: one factor and one basis per dim are kept (2 (m^2 + n^2) elements for a matrix) so that a step costs two products per dim
and the eigenvectors may go stale between refreshes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.adam import adam_update
from lather.optim.eigenbasis import precondition
from lather.optim.kronecker import bias_corrected_beta, update_kronecker_factors
from lather.optim.optimizer import MatrixOptimizer, RefreshKind
from lather.optim.options import arguments_of, check_options
from lather.optim.state import MatrixState
from lather.shapes import Float

logger = logging.getLogger(__name__)


def soap_update(g: Float[Tensor, "b *dims"], w: Tensor | None, s: MatrixState, o: Mapping[str, Any]) -> Float[Tensor, "b *dims"]:
    """One step of SOAP for a batch of equal tensors, refresh aside: returns U and changes the state `s` in place.

    `o` are the options of the parameter group, under the names of `SOAP`'s arguments. `w` are the parameters, where weight decay is
    coupled; decoupled decay and W -= lr U are the caller's.
    """
    t = s.step
    if t == 1:
        update_kronecker_factors(s.factors, g, beta=0.0)
    if w is not None:
        g = g.add(w, alpha=o["weight_decay"])

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
    u = _normalized(precondition(u, bases, "out"), s, o)

    beta = o["shampoo_beta"] if o["shampoo_beta"] >= 0 else o["betas"][1]
    if o["correct_bias"]:
        beta = bias_corrected_beta(beta, t)
    update_kronecker_factors(s.factors, g, beta, s.active)
    return u


def _normalized(u: Tensor, s: MatrixState, o: Mapping[str, Any]) -> Tensor:
    """The optional normalisations of the update, each per matrix."""
    per_matrix = (len(u),) + (1,) * (u.dim() - 1)
    if o["trace_normalization"] and s.factors:
        trace = s.factors[min(s.factors)].diagonal(dim1=-2, dim2=-1).sum(-1)
        u = u * trace.sqrt().view(per_matrix)
    if o["normalize_preconditioned_grads"]:
        u = u / (1e-30 + _rms(u).view(per_matrix))
    return clip_rms(u, o["max_update_rms"])


def clip_rms(u: Float[Tensor, "b *dims"], max_rms: float) -> Float[Tensor, "b *dims"]:
    """Each matrix of `u` scaled down to root mean square `max_rms` if it is above; 0: unchanged."""
    if max_rms == 0:
        return u
    return u * (max_rms / (_rms(u) + 1e-12)).clamp(max=1).view((len(u),) + (1,) * (u.dim() - 1))


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
        precondition_frequency: steps between refreshes of the eigenbases, an int >= 1 or a callable of the step
            (see `lather.optim.schedules`).
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
        use_eigh: refresh by whole eigendecompositions; the same as `refresh_method="eigh"`.
        refresh_method: "qr" or "cholesky_qr", two ways to the same orthogonal iteration, "auto", the faster of them for the size and
            device, or "eigh".
        use_adaptive_criteria: leave out bases that still diagonalise their factor to `adaptive_update_tolerance` in (0, 1), default 1e-7.
        power_iter_steps: steps of orthogonal iteration per refresh, >= 1.
        stagger_refresh: spread the refreshes over the steps of an interval by cost, instead of all in its last one.
        async_refresh: on CUDA, refresh on a side stream during the next forward and backward; the new bases are in place before the next
            step begins, so the numbers are the same. Until then, or until a `state_dict()`, `state` is not to be read.
        max_update_rms: clip each matrix's update to this rms; 0: no clipping.
        matrix_layout: "tensor" (a factor per dim), "per_expert" (the leading dim of a parameter with three or more dims is a batch of
            experts, and one that saw no token keeps its factors and basis; a 2-D parameter is one matrix) or "stacked" ((b, m, n) is one
            matrix, (m, b*n) if n <= m, else (b*m, n)).
        maximize: ascend instead of descend.
        nonfinite: a non-finite gradient: "raise" before anything changes, "skip" that parameter and count it, or "ignore".
        state_dtype: dtype of the state, whatever the parameter's: torch.float32, torch.float64 (then all arithmetic is fp64), or
            torch.bfloat16 for moments and bases, while factors stay fp32; {"moments": dtype} or {"bases": dtype} set one of the two.
        max_state_bytes: refuse a parameter whose state would take more bytes.
        batched: work on equal matrices together; False: one by one, with the same result to rounding.
        bucket_bytes: bound on the temporary memory of a step (that of one matrix is the least).
        num_streams: CUDA streams over which the batches of the update are spread (the most that any group asks for).
        ownership: of a parameter that is spread over ranks: "whole", every matrix has one rank that keeps its state and works on it; or
            "replicated", for a matrix whose state no rank can keep: all keep rows of it, gather them in each step and compute the same.
        tp_group: ranks that have one tensor-parallel shard each of the parameters whose group has a `partition_dim`: 0 or 1, the dim
            along which they were cut in equal parts, or None where every rank has a copy.

    Raises:
        ValueError, TypeError: at construction, for a value out of range or a parameter that the layout cannot take; names the remedy.
    """

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
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
        refresh_method: str = "auto",
        qr_fp32_matmul_prec: str = "highest",
        use_adaptive_criteria: bool = False,
        adaptive_update_tolerance: float | None = None,
        power_iter_steps: int = 1,
        stagger_refresh: bool = False,
        async_refresh: bool = False,
        max_update_rms: float = 0.0,
        matrix_layout: str = "tensor",
        maximize: bool = False,
        nonfinite: str = "raise",
        state_dtype: torch.dtype | dict[str, torch.dtype] = torch.float32,
        max_state_bytes: int | None = None,
        batched: bool = True,
        bucket_bytes: int = 2**28,
        num_streams: int = 1,
        ownership: str = "whole",
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        options = arguments_of(locals())
        check_soap_options(options)
        super().__init__(params, options, tp_group)

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        check_soap_options(options)

    def _refresh_kind(self, step: int, options: Mapping[str, Any]) -> RefreshKind:
        if step <= options["adam_warmup_steps"]:
            return "first" if step == options["adam_warmup_steps"] else "none"
        return "all" if step <= options["precondition_warmup_steps"] else "interval"

    def _refresh_method(self, kind: RefreshKind, options: Mapping[str, Any]) -> str:
        return "eigh" if options["use_eigh"] else super()._refresh_method(kind, options)

    def _update(self, g: Tensor, w: Tensor | None, state: MatrixState, options: Mapping[str, Any]) -> Tensor:
        return soap_update(g, w, state, options)

    def _couples_decay(self, options: Mapping[str, Any]) -> bool:
        return bool(options["weight_decay"]) and not options["use_decoupled_weight_decay"]

    def _decay(self, lr: float, options: Mapping[str, Any]) -> float:
        return lr * float(options["weight_decay"]) if options["use_decoupled_weight_decay"] else 0.0


def check_soap_options(options: dict[str, Any]) -> None:
    """Raise ValueError for an option out of range, naming value and constraint; bring the two warm-ups into order, with a log line."""
    check_options(options)
    if options.get("use_eigh") and options.get("refresh_method", "auto") not in ("auto", "eigh"):
        raise ValueError(f"use_eigh=True contradicts refresh_method={options['refresh_method']!r}: give refresh_method alone")
    adam, precondition_steps = options["adam_warmup_steps"], options["precondition_warmup_steps"]
    adam = max(adam, 1)
    if adam >= precondition_steps > 0:
        adam = max(1, precondition_steps - 1)
    if adam != options["adam_warmup_steps"]:
        logger.info(
            "adam_warmup_steps %d becomes %d: at least 1, and less than precondition_warmup_steps (%d) if that is set",
            options["adam_warmup_steps"],
            adam,
            precondition_steps,
        )
        options["adam_warmup_steps"] = adam
