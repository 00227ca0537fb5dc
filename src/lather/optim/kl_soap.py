"""KL-SOAP, REKLS and stacked SOAP: Adam in the eigenbases of factors that are estimated by minimising a KL divergence.

Source: Lin et al., "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization", arXiv:2509.03378. The statistics of
a dim weigh the others by the inverse of their own (`lather.optim.kronecker`), the step's own gradient included: statistics, refresh, then
project in, Adam, project out.

Letters as in `lather.optim.soap`; w_i are the eigenvalues that basis Q_i stands for.

A safe start: eigenvalues begin at 1, not at 0 (whose inverse would make the first gradient count for 1 / eps), the first steps are plain
Adam, and the second moment is rotated into every new basis, so that no coordinate meets a denominator that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lather.optim.adam import adam_update
from lather.optim.eigenbasis import precondition
from lather.optim.kronecker import update_kronecker_factors_kl
from lather.optim.optimizer import MatrixOptimizer, RefreshKind
from lather.optim.options import arguments_of, check_options
from lather.optim.soap import clip_rms
from lather.optim.state import MatrixState
from lather.shapes import Float


def kl_statistics(g: Float[Tensor, "b *dims"], s: MatrixState, o: Mapping[str, Any]) -> None:
    """Change the factors of `s` in place: an average, unbiased from the first gradient on, whitened by the bases of earlier steps."""
    beta = o["shampoo_beta"]
    beta_t = 1 - (1 - beta) / (1 - beta**s.step)
    bases = s.bases if s.step > o["adam_warmup_steps"] + 1 else {}
    update_kronecker_factors_kl(s.factors, bases, s.eigenvalues, g, beta_t, eps=o["eps"], active=s.active)


def kl_update(g: Float[Tensor, "b *dims"], w: Tensor | None, s: MatrixState, o: Mapping[str, Any]) -> Float[Tensor, "b *dims"]:
    """One step after statistics and refresh: returns U and changes the moments of `s`. `w` as in `soap_update`."""
    if w is not None:
        g = g.add(w, alpha=o["weight_decay"])
    bases = s.bases if s.step > o["adam_warmup_steps"] else {}
    u = adam_update(
        precondition(g, bases, "in"),
        s.exp_avg,
        s.exp_avg_sq,
        s.step,
        betas=o["betas"],
        eps=o["eps"],
        correct_bias=o["correct_bias"],
        nesterov=o["nesterov"],
    )
    return clip_rms(precondition(u, bases, "out"), o["max_update_rms"])


class KLSOAP(MatrixOptimizer):
    """SOAP with KL-corrected statistics that include the step's own gradient (arXiv:2509.03378).

    Args:
        params: parameters, (name, parameter) pairs or parameter groups; every option below may differ per group.
        lr: learning rate, >= 0.
        betas: decay rates of Adam's two moments, each in [0, 1).
        shampoo_beta: decay rate of the Kronecker factors, in [0, 1).
        eps: added to the root of the second moment, and the least eigenvalue that statistics divide by, > 0.
        weight_decay: >= 0.
        weight_decay_method: "decoupled" W -= lr wd W; "independent" W -= wd W; "palm" W -= lr^2 wd W; "l2" G += wd W after the statistics.
        refresh_method: "qr", "cholesky_qr" or "auto" (orthogonal iteration, see `SOAP`), or "eigh".
        precondition_frequency: steps between refreshes of the eigenbases, an int >= 1 or a callable of the step.
        adam_warmup_steps: plain Adam for this many steps, while statistics gather; the first bases come in the step after. 0: at once.
        initial_eigenvalue: > 0, what statistics divide by before the first refresh.
        second_moment: "rotate" or "permute" (see `lather.optim.eigenbasis`).
        nesterov: Adam's momentum one step ahead.
        async_refresh: refresh after the update instead of before it, on a side stream as in `SOAP`: a step's update is made in bases that
            do not know its own gradient yet, and the first in none. The numbers are the same on every device and mesh, but not those of
            a refresh before the update.

    The other options are those of `SOAP`, which also says what is raised.
    """

    _phases = ("statistics", "refresh", "update")

    def __init__(  # noqa: PLR0913 - the options are the interface
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.95),
        shampoo_beta: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        weight_decay_method: str = "decoupled",
        refresh_method: str = "qr",
        precondition_frequency: int | Callable[[int], int] = 1,
        adam_warmup_steps: int = 1,
        initial_eigenvalue: float = 1.0,
        second_moment: str = "rotate",
        nesterov: bool = False,
        correct_bias: bool = True,
        power_iter_steps: int = 1,
        max_update_rms: float = 0.0,
        matrix_layout: str = "tensor",
        precondition_1d: bool = False,
        max_precond_dim: int = 8192,
        use_adaptive_criteria: bool = False,
        adaptive_update_tolerance: float | None = None,
        stagger_refresh: bool = False,
        async_refresh: bool = False,
        fp32_matmul_prec: str = "highest",
        qr_fp32_matmul_prec: str = "highest",
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
        self._check_options(options)
        super().__init__(params, options, tp_group)

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        check_options(options)
        stricter = {
            "adam_warmup_steps": (options["adam_warmup_steps"] >= 0, "an integer >= 0"),
            "shampoo_beta": (options["shampoo_beta"] >= 0, "a number in [0, 1)"),
            "eps": (options["eps"] > 0, "a number > 0 (statistics divide by eigenvalues of at least eps)"),
        }
        for name, (holds, constraint) in stricter.items():
            if not holds:
                raise ValueError(f"{name}={options[name]!r} is not valid: give {constraint}")

    def _refresh_kind(self, step: int, options: Mapping[str, Any]) -> RefreshKind:
        if step <= options["adam_warmup_steps"]:
            return "none"
        return "first" if step == options["adam_warmup_steps"] + 1 else "interval"

    def _statistics(self, g: Tensor, state: MatrixState, options: Mapping[str, Any]) -> None:
        kl_statistics(g, state, options)

    def _update(self, g: Tensor, w: Tensor | None, state: MatrixState, options: Mapping[str, Any]) -> Tensor:
        return kl_update(g, w, state, options)

    def _couples_decay(self, options: Mapping[str, Any]) -> bool:
        return bool(options["weight_decay"]) and options["weight_decay_method"] == "l2"

    def _decay(self, lr: float, options: Mapping[str, Any]) -> float:
        share = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}
        return share[options["weight_decay_method"]] * float(options["weight_decay"])


class REKLS(KLSOAP):
    """KLSOAP with a whole eigendecomposition of every factor at every step: the exact rule that KLSOAP follows from afar.

    Takes the arguments of `KLSOAP`; with `refresh_method="eigh"` and `precondition_frequency=1`.
    """

    preset: ClassVar = {"refresh_method": "eigh", "precondition_frequency": 1}

    def __init__(self, params: ParamsT, lr: float | Tensor, *args: Any, **options: Any) -> None:
        super().__init__(params, lr, *args, **{**self.preset, **options})


class StackedSOAP(KLSOAP):
    """KLSOAP in which a stack of experts (b, m, n) is one matrix with shared factors, refreshed by QR at every step.

    Takes the arguments of `KLSOAP`, with `matrix_layout="stacked"`. On parameters of two dims it is KLSOAP.
    """

    preset: ClassVar = {"matrix_layout": "stacked"}

    def __init__(self, params: ParamsT, lr: float | Tensor, *args: Any, **options: Any) -> None:
        super().__init__(params, lr, *args, **{**self.preset, **options})

    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> None:
        super()._check_options(options)
        if options["matrix_layout"] == "per_expert":
            raise ValueError(
                "matrix_layout='per_expert' is not valid for StackedSOAP: make the groups with parameter_groups(model, "
                "expert_layout='stacked'), or use KLSOAP for experts one by one"
            )
