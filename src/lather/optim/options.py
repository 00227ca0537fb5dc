"""What each option of the family may be, checked at construction; a bad value is named with its constraint."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lather.optim.layout import MATRIX_LAYOUTS

logger = logging.getLogger(__name__)

PRECISIONS = ("highest", "high", "medium")
REFRESH_METHODS = ("qr", "eigh", "cholesky_qr", "auto")
WEIGHT_DECAY_METHODS = ("decoupled", "independent", "l2", "palm")

OTHER_GROUP_KEYS = {"params", "param_names", "name", "partition_dim"}
OTHER_GROUP_KEYS |= {"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"}
"""What a parameter group may hold besides options: torch's own keys, a label, the dim along which tensor-parallel shards were cut, and what
torch's learning-rate schedulers leave there."""

MAX_BF16_BETA = 1 - 2**-8
"""Largest decay rate that bf16, with its 8 significant bits, can carry out."""

Check = tuple[str, Callable[[Any], bool]]
"""The constraint in words, and whether a value holds it."""


def is_finite_number(value: object) -> bool:
    """A plain finite int or float (bool is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object, minimum: int) -> bool:
    """An int of at least `minimum` (bool is not one)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: Any, minimum: float = 0.0, below: float = math.inf) -> bool:
    return is_finite_number(value) and minimum <= value < below


def _one_of(*choices: str) -> Check:
    return "one of " + ", ".join(repr(choice) for choice in choices), lambda value: isinstance(value, str) and value in choices


def _count(minimum: int, more: str = "") -> Check:
    return f"an integer >= {minimum}{more}", lambda value: is_count(value, minimum)


def _is_state_dtype(value: Any) -> bool:
    if isinstance(value, Mapping):
        return set(value) <= {"moments", "bases"} and all(dtype in (torch.float32, torch.bfloat16) for dtype in value.values())
    return value in (torch.float32, torch.float64, torch.bfloat16)


_BOOL: Check = ("True or False", lambda value: isinstance(value, bool))
_NON_NEGATIVE: Check = ("a number >= 0", _is_number)

CONSTRAINTS: dict[str, Check] = {
    "lr": ("a number >= 0", lambda lr: _is_number(float(lr) if isinstance(lr, Tensor) and lr.numel() == 1 else lr)),
    "betas": (
        "two numbers in [0, 1)",
        lambda betas: isinstance(betas, tuple | list) and len(betas) == 2 and all(_is_number(beta, below=1.0) for beta in betas),
    ),
    "shampoo_beta": ("a number below 1 (negative: betas[1])", lambda beta: _is_number(beta, -math.inf, 1.0)),
    "eps": _NON_NEGATIVE,
    "weight_decay": _NON_NEGATIVE,
    "use_decoupled_weight_decay": _BOOL,
    "weight_decay_method": _one_of(*WEIGHT_DECAY_METHODS),
    "use_nesterov": _BOOL,
    "nesterov": _BOOL,
    "precondition_frequency": ("an integer >= 1 or a callable of the step", lambda f: callable(f) or is_count(f, 1)),
    "precondition_warmup_steps": _count(0),
    "adam_warmup_steps": ("an integer", lambda steps: isinstance(steps, int) and not isinstance(steps, bool)),
    "precondition_1d": _BOOL,
    "max_precond_dim": _count(0, " (0: no preconditioning)"),
    "trace_normalization": _BOOL,
    "normalize_preconditioned_grads": _BOOL,
    "correct_bias": _BOOL,
    "initial_eigenvalue": ("a number > 0", lambda value: _is_number(value) and value > 0),
    "second_moment": _one_of("permute", "rotate"),
    "fp32_matmul_prec": _one_of(*PRECISIONS),
    "use_eigh": _BOOL,
    "refresh_method": _one_of(*REFRESH_METHODS),
    "qr_fp32_matmul_prec": _one_of(*PRECISIONS),
    "use_adaptive_criteria": _BOOL,
    "adaptive_update_tolerance": ("a number in (0, 1) or None", lambda tol: tol is None or (is_finite_number(tol) and 0 < tol < 1)),
    "power_iter_steps": _count(1),
    "max_update_rms": ("a number >= 0 (0: no clipping)", _is_number),
    "matrix_layout": _one_of(*MATRIX_LAYOUTS),
    "stagger_refresh": _BOOL,
    "async_refresh": _BOOL,
    "ownership": _one_of("whole", "replicated"),
    "maximize": _BOOL,
    "nonfinite": _one_of("raise", "skip", "ignore"),
    "state_dtype": (
        "torch.float32, torch.float64, torch.bfloat16 or {'moments': dtype, 'bases': dtype} of fp32 or bf16",
        _is_state_dtype,
    ),
    "max_state_bytes": ("an integer >= 1 or None", lambda size: size is None or is_count(size, 1)),
    "batched": _BOOL,
    "bucket_bytes": _count(1),
    "num_streams": _count(1),
}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option out of range, naming value and constraint."""
    for name, value in options.items():
        if name in CONSTRAINTS and not CONSTRAINTS[name][1](value):
            raise ValueError(f"{name}={value!r} is not valid: give {CONSTRAINTS[name][0]}")
    dtype, betas = options.get("state_dtype"), options.get("betas", (0.0, 0.0))
    moments = dtype.get("moments") if isinstance(dtype, Mapping) else dtype
    if moments is torch.bfloat16 and max(betas) > MAX_BF16_BETA:
        raise ValueError(
            f"betas={tuple(betas)!r} with bf16 moments: a moment that decays by less than 1 part in 256 per step is rounded back to "
            f"what it was. Give betas up to {MAX_BF16_BETA}, or keep the moments in fp32: state_dtype={{'bases': torch.bfloat16}}"
        )


def arguments_of(local_names: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a constructor's `locals()`."""
    return {name: value for name, value in local_names.items() if name not in ("self", "params", "tp_group", "__class__")}


def refresh_interval(step: int, options: Mapping[str, Any]) -> int:
    """f(t): the steps between refreshes at step t. Raises ValueError if a callable gives anything but an integer >= 1."""
    f = options["precondition_frequency"]
    interval = f(step) if callable(f) else f
    if not is_count(interval, 1):
        raise ValueError(f"precondition_frequency gives {interval!r} for step {step}: it must give an integer >= 1")
    return int(interval)


def saveable(value: Any) -> Any:
    """The value of an option as torch's tools for checkpoints take it: dtypes by name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return {key: saveable(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def dtype_option(value: Any) -> Any:
    """The inverse, for `state_dtype`."""
    if isinstance(value, str):
        return getattr(torch, value, value)
    return {key: dtype_option(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def comparable(value: Any) -> Any:
    """A hashable stand-in for the value of an option."""
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, list):
        return tuple(value)
    return id(value) if callable(value) else value
