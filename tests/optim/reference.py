"""Computes SOAP and KLSOAP slowly and literally in NumPy float64, for comparison with the package's
optimizers.

Written from the specification alone (the optimizer specification: "Inner Adam", "SOAP", "Refresh",
"KLSOAP and REKLS", "second_moment", "matrix_layout") and independent of the package: nothing is
imported from it and none of its code was read. Every matrix is handled on its own, every product is
spelt out, and nothing is batched, cached or skipped for speed.

Names follow the specification: `w` is a parameter, `g` its gradient, `t` the 1-based step of that
parameter, `k` a Kronecker factor, `q` its eigenbasis (columns are eigenvectors), `eigenvalues` the
diagonal of q^T k q (KL only), `m` and `v` the moments. Until a parameter has its first basis, its
`basis_i` are identities, so that projecting changes nothing. REKLS is `ReferenceKLSOAP` with
`refresh_method="eigh"`, StackedSOAP with `matrix_layout="stacked"`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
from reference_newton_schulz import orthogonalize, scale_of

Array = npt.NDArray[np.float64]
State = dict[str, Any]
MatrixState = dict[str, Array]  # the part of a State that belongs to one matrix, as views


@dataclass(kw_only=True)
class Options:
    """The options that SOAP and KLSOAP share, with the specification's names and defaults."""

    lr: float
    betas: tuple[float, float]
    second_moment: str
    precondition_frequency: int | Callable[[int], int]
    eps: float = 1e-8
    weight_decay: float = 0.01
    refresh_method: str = "qr"
    adam_warmup_steps: int = 1
    nesterov: bool = False
    correct_bias: bool = True
    use_adaptive_criteria: bool = False
    adaptive_update_tolerance: float | None = None
    power_iter_steps: int = 1
    max_update_rms: float = 0.0
    precondition_1d: bool = False
    max_precond_dim: int = 8192
    sides: str = "both"
    matrix_layout: str = "tensor"
    maximize: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("second_moment", ("permute", "rotate")),
            ("refresh_method", ("qr", "eigh")),
            ("matrix_layout", ("tensor", "per_expert", "stacked")),
            ("sides", ("both", "smaller", "larger", "auto")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown to the reference, which has {known}"
                )


@dataclass(kw_only=True)
class SOAPOptions(Options):
    """SOAP's options; the specification calls `nesterov` `use_nesterov`, and
    `refresh_method="eigh"` `use_eigh`."""

    lr: float = 3e-3
    betas: tuple[float, float] = (0.95, 0.95)
    shampoo_beta: float = -1
    use_decoupled_weight_decay: bool = True
    use_nesterov: bool = False
    precondition_frequency: int | Callable[[int], int] = 10
    precondition_warmup_steps: int = 0
    trace_normalization: bool = False
    normalize_preconditioned_grads: bool = False
    second_moment: str = "permute"
    statistics_of: str = "gradient"
    orthogonalize: bool = False
    fp32_matmul_prec: str = "highest"
    use_eigh: bool = False
    qr_fp32_matmul_prec: str = "highest"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nesterov = self.nesterov or self.use_nesterov
        self.refresh_method = "eigh" if self.use_eigh else self.refresh_method
        self.adam_warmup_steps = max(self.adam_warmup_steps, 1)
        if self.adam_warmup_steps >= self.precondition_warmup_steps > 0:
            self.adam_warmup_steps = max(1, self.precondition_warmup_steps - 1)


@dataclass(kw_only=True)
class KLSOAPOptions(Options):
    """The options of KLSOAP, REKLS and StackedSOAP, with KLSOAP's defaults."""

    betas: tuple[float, float] = (0.9, 0.95)
    shampoo_beta: float = 0.95
    weight_decay_method: str = "decoupled"
    precondition_frequency: int | Callable[[int], int] = 1
    initial_eigenvalue: float = 1.0
    eigenvalue_floor: float = 0.0
    second_moment: str = "rotate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.shampoo_beta < 1:
            raise ValueError(
                f"shampoo_beta={self.shampoo_beta} must be in [0, 1) here; only SOAP has a value "
                "that stands for betas[1]"
            )
        if self.weight_decay_method not in ("decoupled", "independent", "l2", "palm"):
            raise ValueError(
                f"weight_decay_method={self.weight_decay_method!r} is unknown to the reference"
            )


def contraction(g: Array, dim: int) -> Array:
    """Contract g with itself over all dims but `dim`."""
    unfolded = np.moveaxis(g, dim, 0).reshape(g.shape[dim], -1)
    return unfolded @ unfolded.T


def apply_on_dim(matrix: Array, x: Array, dim: int) -> Array:
    """Return y with y[..., i, ...] = sum over j of matrix[i, j] x[..., j, ...], where i and j are
    indices of `dim`."""
    return np.moveaxis(np.tensordot(matrix, x, axes=(1, dim)), 0, dim)


def project_in(x: Array, bases: dict[int, Array]) -> Array:
    for dim, q in bases.items():
        x = apply_on_dim(q.T, x, dim)
    return x


def project_out(x: Array, bases: dict[int, Array]) -> Array:
    for dim, q in bases.items():
        x = apply_on_dim(q, x, dim)
    return x


def eigh_descending(k: Array) -> tuple[Array, Array]:
    """Return eigenvalues and eigenvectors of k, eigenvalues descending; zeros and the identity when
    k is zero."""
    if not k.any():
        return np.zeros(len(k)), np.eye(len(k))
    values, vectors = np.linalg.eigh(k)
    return values[::-1], vectors[:, ::-1]


def rotated_diagonal(k: Array, q: Array) -> Array:
    return np.diag(q.T @ k @ q)


def descending(values: Array) -> npt.NDArray[np.intp]:
    return np.argsort(-values, kind="stable")


def is_nearly_diagonal(k: Array, q: Array, tolerance: float) -> bool:
    rotated = q.T @ k @ q
    return bool(np.linalg.norm(np.diag(rotated)) >= (1 - tolerance) * np.linalg.norm(rotated))


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


def is_batch_of_matrices(shape: Sequence[int], options: Options) -> bool:
    return options.matrix_layout == "per_expert" and len(shape) >= 3


def is_stacked(shape: Sequence[int], options: Options) -> bool:
    if options.matrix_layout == "stacked" and len(shape) > 3:
        raise ValueError(
            f"the reference stacks parameters of three dims only, got shape {tuple(shape)}"
        )
    return options.matrix_layout == "stacked" and len(shape) == 3


def stacked(p: Array) -> Array:
    """Copy (b, m, n) to the shape (m, b*n) if n <= m: matrix[i, e*n + j] = p[e, i, j]; otherwise to
    (b*m, n)."""
    _, m, n = p.shape
    return np.concatenate(list(p), axis=1 if n <= m else 0)


def unstacked(matrix: Array, shape: tuple[int, ...]) -> Array:
    """Undo `stacked` for a parameter of this shape."""
    b, m, n = shape
    return np.stack(np.split(matrix, b, axis=1 if n <= m else 0))


def dims_with_factor(matrix_shape: Sequence[int], options: Options) -> list[int]:
    if len(matrix_shape) == 1 and not options.precondition_1d:
        return []
    wanted = set(range(len(matrix_shape)))
    if len(matrix_shape) == 2 and options.sides != "both":
        m, n = matrix_shape
        smaller = 0 if m <= n else 1
        if options.sides != "auto" or max(m, n) > 8 * min(m, n):
            wanted = {1 - smaller} if options.sides == "larger" else {smaller}
    return [dim for dim in sorted(wanted) if matrix_shape[dim] <= options.max_precond_dim]


def new_state(shape: tuple[int, ...], options: Options) -> State:
    """Make zero moments and factors, identity bases and, for KL, initial eigenvalues; a stacked
    `shape` is the merged one."""
    state: State = {"step": 0, "exp_avg": np.zeros(shape), "exp_avg_sq": np.zeros(shape)}
    batch_shape, matrix_shape = (
        (shape[:1], shape[1:]) if is_batch_of_matrices(shape, options) else ((), shape)
    )
    for dim in dims_with_factor(matrix_shape, options):
        n = matrix_shape[dim]
        state[f"factor_{dim}"] = np.zeros((*batch_shape, n, n))
        state[f"basis_{dim}"] = np.zeros((*batch_shape, n, n)) + np.eye(n)
        if isinstance(options, KLSOAPOptions):
            state[f"eigenvalues_{dim}"] = np.full(
                (*batch_shape, n), float(options.initial_eigenvalue)
            )
    return state


def state_of_matrix(state: State, index: int | EllipsisType) -> MatrixState:
    return {key: value[index] for key, value in state.items() if key != "step"}


def by_dim(matrix: MatrixState, name: str) -> dict[int, Array]:
    """Return the "factor", "basis" or "eigenvalues" of a matrix's state, by dim, ascending; views,
    not copies."""
    prefix = name + "_"
    return {
        int(key.removeprefix(prefix)): value
        for key, value in matrix.items()
        if key.startswith(prefix)
    }


def adam(g: Array, matrix: MatrixState, t: int, options: Options) -> Array:
    """Apply the inner Adam: update M and V in place, return u."""
    b1, b2 = options.betas
    m, v = matrix["exp_avg"], matrix["exp_avg_sq"]
    m[...] = b1 * m + (1 - b1) * g
    v[...] = b2 * v + (1 - b2) * g**2
    c1, c1_next, c2 = (
        (1 - b1**t, 1 - b1 ** (t + 1), 1 - b2**t) if options.correct_bias else (1.0, 1.0, 1.0)
    )
    numerator = b1 * m / c1_next + (1 - b1) * g / c1 if options.nesterov else m / c1
    return np.asarray(numerator / (np.sqrt(v / c2) + options.eps))


def adam_in_eigenbasis(g: Array, matrix: MatrixState, t: int, options: Options) -> Array:
    bases = by_dim(matrix, "basis")
    return project_out(adam(project_in(g, bases), matrix, t, options), bases)


def clipped(u: Array, options: Options) -> Array:
    if options.max_update_rms > 0:
        u = u * min(1.0, options.max_update_rms / (rms(u) + 1e-12))
    return u


def normalized(u: Array, matrix: MatrixState, options: SOAPOptions) -> Array:
    factors = by_dim(matrix, "factor")
    if options.orthogonalize and u.ndim == 2:
        u = scale_of(u.shape, "match_rms_adamw") * orthogonalize(u)
    if options.trace_normalization and factors:
        u = u * np.sqrt(np.trace(factors[min(factors)]))
    if options.normalize_preconditioned_grads:
        u = u / (1e-30 + rms(u))
    return clipped(u, options)


def update_factors_soap(g: Array, matrix: MatrixState, t: int, options: SOAPOptions) -> None:
    """Update factors from the gradient, or from the momentum as it is, without bias correction; the
    first sample counts whole."""
    beta = options.shampoo_beta if options.shampoo_beta >= 0 else options.betas[1]
    if options.correct_bias:
        beta = 1 - (1 - beta) / (1 - beta ** (t + 1))
    if options.statistics_of == "momentum":
        g = project_out(matrix["exp_avg"], by_dim(matrix, "basis"))
        beta = 0.0 if t == 1 else beta
    for dim, k in by_dim(matrix, "factor").items():
        k[...] = beta * k + (1 - beta) * contraction(g, dim)


def update_factors_kl(g: Array, matrix: MatrixState, t: int, options: KLSOAPOptions) -> None:
    """Update each factor from the gradient whitened on all the other dims that have a factor, by
    the old bases and eigenvalues.

    For a matrix: x = G Q_R diag(1/sqrt(w'_R)) gives L, so that x x^T = G Q_R diag(1/w'_R) Q_R^T
    G^T; R alike.
    """
    beta = 1 - (1 - options.shampoo_beta) / (1 - options.shampoo_beta**t)
    factors, bases, eigenvalues = (
        by_dim(matrix, "factor"),
        by_dim(matrix, "basis"),
        by_dim(matrix, "eigenvalues"),
    )
    for dim, k in factors.items():
        x = g
        for other in factors:
            if other != dim:
                w = np.maximum(
                    eigenvalues[other], options.eigenvalue_floor * eigenvalues[other].mean()
                )
                scale = 1 / np.sqrt(np.maximum(w, options.eps))
                x = apply_on_dim(np.diag(scale) @ bases[other].T, x, other)
        size_of_others = g.size / g.shape[dim]
        k[...] = beta * k + (1 - beta) / size_of_others * contraction(x, dim)


def change_bases(matrix: MatrixState, new_bases: dict[int, Array], options: Options) -> None:
    """Take M out of the stored bases and into the new ones; carry V over if it rotates; then store
    the new bases."""
    m, v, stored = matrix["exp_avg"], matrix["exp_avg_sq"], by_dim(matrix, "basis")
    m[...] = project_in(project_out(m, stored), new_bases)
    for dim, q_new in new_bases.items():
        # V_new = (S_L o S_L) V (S_R o S_R)^T, one dim after the other
        if options.second_moment == "rotate":
            s = q_new.T @ stored[dim]
            v[...] = apply_on_dim(s * s, v, dim)
        stored[dim][...] = q_new


def first_refresh(matrix: MatrixState, options: Options) -> None:
    """Make the first bases: always by eigh, without the adaptive criterion; V stays as it is, or
    rotates."""
    new_bases, eigenvalues = {}, by_dim(matrix, "eigenvalues")
    for dim, k in by_dim(matrix, "factor").items():
        values, new_bases[dim] = eigh_descending(k)
        # an expert that never saw a token keeps its initial eigenvalues
        if dim in eigenvalues and k.any():
            eigenvalues[dim][...] = values
    change_bases(matrix, new_bases, options)


def refresh(matrix: MatrixState, options: Options) -> None:
    """Do a later refresh. Only KL has eigenvalues, and only KL sorts a second time, by the new
    ones."""
    tolerance = (
        1e-7 if options.adaptive_update_tolerance is None else options.adaptive_update_tolerance
    )
    v, new_bases, eigenvalues = (
        matrix["exp_avg_sq"],
        by_dim(matrix, "basis"),
        by_dim(matrix, "eigenvalues"),
    )
    refreshed = False
    for dim, k in by_dim(matrix, "factor").items():
        q = new_bases[dim]
        if options.use_adaptive_criteria and is_nearly_diagonal(k, q, tolerance):
            values = rotated_diagonal(k, q)  # neither these nor the columns are re-ordered
        elif options.refresh_method == "eigh":
            refreshed = True
            values, new_bases[dim] = eigh_descending(k)
        else:
            refreshed = True
            order = descending(rotated_diagonal(k, q))
            q = q[:, order]
            for _ in range(options.power_iter_steps):
                q = np.linalg.qr(k @ q).Q
            values = rotated_diagonal(k, q)
            if dim in eigenvalues:
                second_order = descending(values)
                order, q, values = order[second_order], q[:, second_order], values[second_order]
            new_bases[dim] = q
            if options.second_moment == "permute":
                v[...] = np.take(v, order, axis=dim)
        if dim in eigenvalues and k.any():  # with zeros the first gradient would count for 1 / eps
            eigenvalues[dim][...] = values
    if refreshed:  # otherwise M, V and Q stay exactly what they were
        change_bases(matrix, new_bases, options)


def frequency_divides(t: int, options: Options) -> bool:
    frequency = options.precondition_frequency
    return t % (frequency(t) if callable(frequency) else frequency) == 0


def step_soap(
    w: Array, g: Array, matrix: MatrixState, t: int, idle: bool, options: SOAPOptions
) -> None:
    """Take one step of one matrix, as numbered in the specification; `t` is already incremented; w
    changes in place."""
    if t == 1:  # 1.
        for dim, k in by_dim(matrix, "factor").items():
            k[...] = contraction(g, dim)
    if options.weight_decay > 0 and options.use_decoupled_weight_decay:  # 2.
        w -= options.lr * options.weight_decay * w
    elif options.weight_decay > 0:
        g = g + options.weight_decay * w
    u = adam_in_eigenbasis(g, matrix, t, options)  # 3.
    u = normalized(u, matrix, options)  # 4.
    w -= options.lr * u  # 5.
    if not idle:
        update_factors_soap(g, matrix, t, options)  # 6.
    if t == options.adam_warmup_steps:  # 7.
        first_refresh(matrix, options)
    elif (
        t > options.adam_warmup_steps
        and not idle
        and (t <= options.precondition_warmup_steps or frequency_divides(t, options))
    ):
        # 8.
        refresh(matrix, options)


def step_kl(
    w: Array, g: Array, matrix: MatrixState, t: int, idle: bool, options: KLSOAPOptions
) -> None:
    """Take one step of one matrix, as numbered in the specification; `t` is already incremented; w
    changes in place."""
    if not idle:
        update_factors_kl(g, matrix, t, options)  # 1. and 2.
    if t == options.adam_warmup_steps + 1:  # 3.
        first_refresh(matrix, options)
    elif t > options.adam_warmup_steps + 1 and frequency_divides(t, options) and not idle:
        refresh(matrix, options)
    if options.weight_decay_method == "l2":  # 4.
        g = g + options.weight_decay * w
    else:
        rate = {"decoupled": options.lr, "independent": 1.0, "palm": options.lr**2}[
            options.weight_decay_method
        ]
        w -= rate * options.weight_decay * w
    w -= options.lr * clipped(adam_in_eigenbasis(g, matrix, t, options), options)


class Reference:
    """An optimizer over copies of `params`, one set of options for all of them."""

    options_type: Callable[..., Options]
    step_matrix: Callable[..., None]

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.options = self.options_type(**options)
        self.params: list[Array] = [np.array(p, dtype=np.float64) for p in params]
        self.state: list[State] = [{} for _ in params]

    def step(self, grads: list[np.ndarray | None]) -> None:
        """Take one step; a parameter whose gradient is None is left alone altogether."""
        for i, grad in zip(range(len(self.params)), grads, strict=True):
            if grad is not None:
                self._step_parameter(i, np.array(grad, dtype=np.float64))

    def _step_parameter(self, i: int, g: Array) -> None:
        p = self.params[i]
        if g.shape != p.shape:
            raise ValueError(f"gradient {i} has shape {g.shape}, its parameter {p.shape}")
        g = -g if self.options.maximize else g
        merge = is_stacked(p.shape, self.options)
        w, g = (stacked(p), stacked(g)) if merge else (p, g)
        state = self.state[i] = self.state[i] or new_state(w.shape, self.options)
        state["step"] += 1
        batched = is_batch_of_matrices(w.shape, self.options)
        for index in range(len(w)) if batched else [...]:
            idle = batched and not g[index].any()
            self.step_matrix(
                w[index], g[index], state_of_matrix(state, index), state["step"], idle, self.options
            )
        if merge:
            p[...] = unstacked(w, p.shape)


class ReferenceSOAP(Reference):
    options_type = SOAPOptions
    step_matrix = staticmethod(step_soap)


class ReferenceKLSOAP(Reference):
    options_type = KLSOAPOptions
    step_matrix = staticmethod(step_kl)
