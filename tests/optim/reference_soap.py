"""A slow, literal SOAP in NumPy float64, to compare the package's optimizer with.

Written from the specification alone (the optimizer specification: "Inner Adam", "SOAP", "Refresh", "second_moment",
"matrix_layout") and independent of the package: nothing is imported from it and none of its code was read. Every
matrix is handled on its own, every product is spelt out, and nothing is batched, cached or skipped for speed.

Names follow the specification: `w` is a parameter, `g` its gradient, `t` the 1-based step of that parameter, `k` a
Kronecker factor, `q` its eigenbasis (columns are eigenvectors, eigenvalues descending), `m` and `v` the moments.
Until a parameter has its first basis, its `basis_i` are identities, so that projecting changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
State = dict[str, Any]
MatrixState = dict[str, Array]  # the part of a State that belongs to one matrix, as views


@dataclass
class Options:
    """The options of SOAP, with the specification's names and defaults."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    shampoo_beta: float = -1
    eps: float = 1e-8
    weight_decay: float = 0.01
    use_decoupled_weight_decay: bool = True
    use_nesterov: bool = False
    precondition_frequency: int | Callable[[int], int] = 10
    precondition_warmup_steps: int = 0
    adam_warmup_steps: int = 1
    precondition_1d: bool = False
    max_precond_dim: int = 8192
    trace_normalization: bool = False
    normalize_preconditioned_grads: bool = False
    correct_bias: bool = True
    second_moment: str = "permute"
    fp32_matmul_prec: str = "highest"
    use_eigh: bool = False
    qr_fp32_matmul_prec: str = "highest"
    use_adaptive_criteria: bool = False
    adaptive_update_tolerance: float | None = None
    power_iter_steps: int = 1
    max_update_rms: float = 0.0
    matrix_layout: str = "tensor"

    def __post_init__(self) -> None:
        if self.second_moment not in ("permute", "rotate") or self.matrix_layout not in ("tensor", "per_expert"):
            raise ValueError(f"unknown to the reference: {self.second_moment=} or {self.matrix_layout=}")
        self.adam_warmup_steps = max(self.adam_warmup_steps, 1)
        if self.adam_warmup_steps >= self.precondition_warmup_steps > 0:
            self.adam_warmup_steps = max(1, self.precondition_warmup_steps - 1)


def contraction(g: Array, dim: int) -> Array:
    """Contraction of g with itself over all dims but `dim`."""
    unfolded = np.moveaxis(g, dim, 0).reshape(g.shape[dim], -1)
    return unfolded @ unfolded.T


def apply_on_dim(matrix: Array, x: Array, dim: int) -> Array:
    """y[..., i, ...] = sum over j of matrix[i, j] x[..., j, ...], where i and j are indices of `dim`."""
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, dim)), 0, dim)


def project_in(x: Array, bases: dict[int, Array]) -> Array:
    for dim, q in bases.items():
        x = apply_on_dim(q.T, x, dim)
    return x


def project_out(x: Array, bases: dict[int, Array]) -> Array:
    for dim, q in bases.items():
        x = apply_on_dim(q, x, dim)
    return x


def basis_by_eigh(k: Array) -> Array:
    """Eigenvectors of k in descending order of the eigenvalues; the identity when k is zero."""
    if not k.any():
        return np.eye(len(k))
    _, ascending = np.linalg.eigh(k)
    return ascending[:, ::-1]


def is_nearly_diagonal(k: Array, q: Array, tolerance: float) -> bool:
    rotated = q.T @ k @ q
    return bool(np.linalg.norm(np.diag(rotated)) >= (1 - tolerance) * np.linalg.norm(rotated))


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


def is_batch_of_matrices(shape: Sequence[int], options: Options) -> bool:
    return options.matrix_layout == "per_expert" and len(shape) >= 3


def dims_with_factor(matrix_shape: Sequence[int], options: Options) -> list[int]:
    if len(matrix_shape) == 1 and not options.precondition_1d:
        return []
    return [dim for dim, size in enumerate(matrix_shape) if size <= options.max_precond_dim]


def new_state(shape: tuple[int, ...], options: Options) -> State:
    """Zero moments and factors, identity bases."""
    state: State = {"step": 0, "exp_avg": np.zeros(shape), "exp_avg_sq": np.zeros(shape)}
    batch_shape, matrix_shape = (shape[:1], shape[1:]) if is_batch_of_matrices(shape, options) else ((), shape)
    for dim in dims_with_factor(matrix_shape, options):
        n = matrix_shape[dim]
        state[f"factor_{dim}"] = np.zeros((*batch_shape, n, n))
        state[f"basis_{dim}"] = np.zeros((*batch_shape, n, n)) + np.eye(n)
    return state


def state_of_matrix(state: State, index: int | EllipsisType) -> MatrixState:
    return {key: value[index] for key, value in state.items() if key != "step"}


def by_dim(matrix: MatrixState, name: str) -> dict[int, Array]:
    """The factors (name "factor") or bases (name "basis") of a matrix by dim, ascending; views, not copies."""
    prefix = name + "_"
    return {int(key.removeprefix(prefix)): value for key, value in matrix.items() if key.startswith(prefix)}


def adam(g: Array, matrix: MatrixState, t: int, options: Options) -> Array:
    """The inner Adam: updates M and V in place, returns u."""
    b1, b2 = options.betas
    m, v = matrix["exp_avg"], matrix["exp_avg_sq"]
    m[...] = b1 * m + (1 - b1) * g
    v[...] = b2 * v + (1 - b2) * g**2
    c1, c1_next, c2 = (1 - b1**t, 1 - b1 ** (t + 1), 1 - b2**t) if options.correct_bias else (1.0, 1.0, 1.0)
    numerator = b1 * m / c1_next + (1 - b1) * g / c1 if options.use_nesterov else m / c1
    return np.asarray(numerator / (np.sqrt(v / c2) + options.eps))


def normalized(u: Array, matrix: MatrixState, options: Options) -> Array:
    factors = by_dim(matrix, "factor")
    if options.trace_normalization and factors:
        u = u * np.sqrt(np.trace(factors[min(factors)]))
    if options.normalize_preconditioned_grads:
        u = u / (1e-30 + rms(u))
    if options.max_update_rms > 0:
        u = u * min(1.0, options.max_update_rms / (rms(u) + 1e-12))
    return u


def update_factors(g: Array, matrix: MatrixState, t: int, options: Options) -> None:
    beta = options.shampoo_beta if options.shampoo_beta >= 0 else options.betas[1]
    if options.correct_bias:
        beta = 1 - (1 - beta) / (1 - beta ** (t + 1))
    for dim, k in by_dim(matrix, "factor").items():
        k[...] = beta * k + (1 - beta) * contraction(g, dim)


def change_bases(matrix: MatrixState, new_bases: dict[int, Array], options: Options) -> None:
    """M out with the stored bases and in with the new ones; V carried over if it rotates; then the new ones stored."""
    m, v, stored = matrix["exp_avg"], matrix["exp_avg_sq"], by_dim(matrix, "basis")
    m[...] = project_in(project_out(m, stored), new_bases)
    for dim, q_new in new_bases.items():
        if options.second_moment == "rotate":  # V_new = (S_L o S_L) V (S_R o S_R)^T, one dim after the other
            s = q_new.T @ stored[dim]
            v[...] = apply_on_dim(s * s, v, dim)
        stored[dim][...] = q_new


def refresh(matrix: MatrixState, options: Options) -> None:
    tolerance = 1e-7 if options.adaptive_update_tolerance is None else options.adaptive_update_tolerance
    v, new_bases = matrix["exp_avg_sq"], by_dim(matrix, "basis")
    refreshed = False
    for dim, k in by_dim(matrix, "factor").items():
        q = new_bases[dim]
        if options.use_adaptive_criteria and is_nearly_diagonal(k, q, tolerance):
            continue
        refreshed = True
        if options.use_eigh:
            new_bases[dim] = basis_by_eigh(k)
            continue
        order = np.argsort(-np.diag(q.T @ k @ q), kind="stable")
        q = q[:, order]
        for _ in range(options.power_iter_steps):
            q = np.linalg.qr(k @ q).Q
        new_bases[dim] = q
        if options.second_moment == "permute":
            v[...] = np.take(v, order, axis=dim)
    if refreshed:  # otherwise M, V and Q stay exactly what they were
        change_bases(matrix, new_bases, options)


def refresh_is_due(t: int, options: Options) -> bool:
    frequency = options.precondition_frequency
    interval = frequency(t) if callable(frequency) else frequency
    return t > options.adam_warmup_steps and (t <= options.precondition_warmup_steps or t % interval == 0)


def step_matrix(w: Array, raw_g: Array, matrix: MatrixState, t: int, idle: bool, options: Options) -> None:
    """One step of one matrix, as numbered in the specification; `t` is already incremented; w changes in place."""
    g = raw_g.copy()
    if t == 1:  # 1.
        for dim, k in by_dim(matrix, "factor").items():
            k[...] = contraction(g, dim)
    if options.weight_decay > 0 and options.use_decoupled_weight_decay:  # 2.
        w -= options.lr * options.weight_decay * w
    elif options.weight_decay > 0:
        g = g + options.weight_decay * w
    bases = by_dim(matrix, "basis")
    u = project_out(adam(project_in(g, bases), matrix, t, options), bases)  # 3.
    u = normalized(u, matrix, options)  # 4.
    w -= options.lr * u  # 5.
    if not idle:
        update_factors(g, matrix, t, options)  # 6.
    if t == options.adam_warmup_steps:  # 7.
        change_bases(matrix, {dim: basis_by_eigh(k) for dim, k in by_dim(matrix, "factor").items()}, options)
    elif refresh_is_due(t, options) and not idle:  # 8.
        refresh(matrix, options)


class ReferenceSOAP:
    """SOAP over copies of `params`, one set of options for all of them."""

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.options = Options(**options)
        self.params: list[Array] = [np.array(p, dtype=np.float64) for p in params]
        self.state: list[State] = [{} for _ in params]

    def step(self, grads: list[np.ndarray | None]) -> None:
        """One step; a parameter whose gradient is None is left alone altogether."""
        for i, grad in zip(range(len(self.params)), grads, strict=True):
            if grad is not None:
                self._step_parameter(i, np.array(grad, dtype=np.float64))

    def _step_parameter(self, i: int, g: Array) -> None:
        w = self.params[i]
        if g.shape != w.shape:
            raise ValueError(f"gradient {i} has shape {g.shape}, its parameter {w.shape}")
        state = self.state[i] = self.state[i] or new_state(w.shape, self.options)
        state["step"] += 1
        batched = is_batch_of_matrices(w.shape, self.options)
        for index in range(len(w)) if batched else [...]:
            idle = batched and not g[index].any()
            step_matrix(w[index], g[index], state_of_matrix(state, index), state["step"], idle, self.options)
