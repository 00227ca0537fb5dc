"""Computes Muon, NorMuon and SOAP-Muon slowly and literally in NumPy float64, for comparison with
the package's optimizers.

Written from the specification alone (the rules' specification: "Newton-Schulz", "Muon",
"SOAP-Muon", "Hyperball"; the optimizer specification: "Refresh", "second_moment", "matrix_layout")
and independent of the package: nothing is imported from it and none of its code was read. Every
matrix is handled on its own and nothing is batched, cached or skipped for speed.

Names follow the specification: `w` is a parameter, `g` its gradient, `t` the 1-based step of that
parameter, `b` the momentum, `n` the numerator, `k` a Kronecker factor, `q` its eigenbasis (columns
are eigenvectors), `v` the second moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from reference import (
    Array,
    MatrixState,
    State,
    apply_on_dim,
    by_dim,
    contraction,
    descending,
    eigh_descending,
    is_nearly_diagonal,
    project_in,
    project_out,
    rotated_diagonal,
    stacked,
    state_of_matrix,
    unstacked,
)
from reference_newton_schulz import COEFFICIENTS, orthogonalize, scale_of


@dataclass(kw_only=True)
class Options:
    """The options that Muon and SOAP-Muon share; with `normalize="row"` Muon is NorMuon."""

    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    slow_momentum_start: int = 0
    fast_momentum: float = 0.85
    slow_momentum: float = 0.98
    slow_share: float = 0.5615
    steps: int = 5
    coefficients: str = "quintic"
    scale: str | float = "match_rms_adamw"
    normalize: str | None = None
    beta2: float = 0.95
    weight_decay: float = 0.01
    weight_decay_method: str = "decoupled"
    keep_norm: bool = False
    matrix_layout: str = "tensor"
    maximize: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("matrix_layout", ("tensor", "per_expert", "stacked")),
            ("coefficients", tuple(COEFFICIENTS)),
            ("normalize", (None, "row")),
            ("weight_decay_method", ("decoupled", "independent", "palm", "l2")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown to the reference, which has {known}"
                )


@dataclass(kw_only=True)
class SOAPMuonOptions(Options):
    """The options of SOAP-Muon."""

    shampoo_beta: float = 0.95
    eps: float = 1e-8
    sides: str = "smaller"
    max_precond_dim: int = 8192
    statistics_of: str = "momentum"
    precondition_frequency: int | Callable[[int], int] = 10
    precondition_warmup_steps: int = 0
    muon_warmup_steps: int = 1
    refresh_method: str = "qr"
    power_iter_steps: int = 1
    second_moment: str = "rotate"
    use_adaptive_criteria: bool = False
    adaptive_update_tolerance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (
            ("sides", ("smaller", "larger", "both", "auto")),
            ("statistics_of", ("momentum", "gradient")),
            ("refresh_method", ("qr", "eigh")),
            ("second_moment", ("permute", "rotate")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is unknown to the reference, which has {known}"
                )


def numerator(g: Array, matrix: MatrixState, t: int, options: Options) -> Array:
    """Update the momentum in place and return the matrix that is orthogonalized: the momentum, or
    Nesterov's look ahead."""
    mu, b = options.momentum, matrix["momentum_buffer"]
    if 0 < options.slow_momentum_start < t:
        return two_momenta(g, b, matrix["momentum_gap"], options)
    b[...] = mu * b + (1 - mu) * g
    return mu * b + (1 - mu) * g if options.nesterov else b.copy()


def two_momenta(g: Array, b: Array, gap: Array, options: Options) -> Array:
    """Update a fast average b and a slow average b + gap in place and return their mixture; with
    Nesterov's look ahead, that of one more step with the same gradient."""
    fast, slow, share = options.fast_momentum, options.slow_momentum, options.slow_share
    s = slow * (b + gap) + (1 - slow) * g
    b[...] = fast * b + (1 - fast) * g
    gap[...] = s - b
    if options.nesterov:
        s = slow * s + (1 - slow) * g
        b = fast * b + (1 - fast) * g
    return (1 - share) * b + share * s


def with_norm_of(y: Array, x: Array) -> Array:
    """Scale the matrix y to the Frobenius norm of x; zeros stay zeros."""
    norm = np.linalg.norm(y)
    return y * (np.linalg.norm(x) / norm) if norm > 0 else y


def with_norm(y: Array, norm: float) -> Array:
    """Scale the matrix y to a Frobenius norm; it is unchanged where that is zero."""
    return y * (norm / np.linalg.norm(y)) if norm > 0 and y.any() else y


def scaled_orthogonal(x: Array, matrix: MatrixState, options: Options) -> Array:
    """Return U: x orthogonalized, its rows evened out if asked for, and scaled."""
    u = orthogonalize(x, options.steps, options.coefficients)
    if options.normalize == "row":
        v = matrix["row_moment"]
        v[...] = options.beta2 * v + (1 - options.beta2) * np.mean(u * u, axis=1)
        u = with_norm_of(u / (np.sqrt(v)[:, None] + 1e-8), u)
    return scale_of(u.shape, options.scale) * u


def update_muon(g: Array, matrix: MatrixState, t: int, idle: bool, options: Options) -> Array:
    return scaled_orthogonal(numerator(g, matrix, t, options), matrix, options)


def update_factors(x: Array, matrix: MatrixState, t: int, options: SOAPMuonOptions) -> None:
    beta = 1 - (1 - options.shampoo_beta) / (1 - options.shampoo_beta**t)
    for dim, k in by_dim(matrix, "factor").items():
        k[...] = beta * k + (1 - beta) * contraction(x, dim)


def first_bases(matrix: MatrixState) -> None:
    """Return the eigenvectors of the factors, descending; the identity where a factor is zero. V is
    zero, so it need not be turned."""
    for dim, k in by_dim(matrix, "factor").items():
        matrix[f"basis_{dim}"][...] = eigh_descending(k)[1]


def refresh(matrix: MatrixState, options: SOAPMuonOptions) -> None:
    """Make new bases, by orthogonal iteration or eigh; V follows. The momentum is in parameter
    coordinates and stays.

    "rotate": V_new = (S_L o S_L) V (S_R o S_R)^T with S = Q_new^T Q_old; "permute": V is re-ordered
    with the columns.
    """
    tolerance = (
        1e-7 if options.adaptive_update_tolerance is None else options.adaptive_update_tolerance
    )
    v, bases = matrix.get("exp_avg_sq"), by_dim(matrix, "basis")
    for dim, k in by_dim(matrix, "factor").items():
        q_old = bases[dim]
        if options.use_adaptive_criteria and is_nearly_diagonal(k, q_old, tolerance):
            continue
        order = None
        if options.refresh_method == "eigh":
            q_new = eigh_descending(k)[1]
        else:
            order = descending(rotated_diagonal(k, q_old))
            q_new = q_old[:, order]
            for _ in range(options.power_iter_steps):
                q_new = np.linalg.qr(k @ q_new).Q
        if options.second_moment == "rotate":
            s = q_new.T @ q_old
            v[...] = apply_on_dim(s * s, v, dim)
        elif order is not None:
            v[...] = np.take(v, order, axis=dim)
        bases[dim][...] = q_new


def is_refresh_due(t: int, options: SOAPMuonOptions) -> bool:
    f = options.precondition_frequency
    return t <= options.precondition_warmup_steps or t % (f(t) if callable(f) else f) == 0


def preconditioned(n: Array, matrix: MatrixState, t: int, options: SOAPMuonOptions) -> Array:
    """Divide the numerator by the root of its second moment in the eigenbasis, keeping its norm;
    update V in place. `eps` is relative to the root mean square of the numerator, so that the
    result does not depend on the scale of the gradients."""
    v, bases = matrix["exp_avg_sq"], by_dim(matrix, "basis")
    x = project_in(n, bases)
    v[...] = options.beta2 * v + (1 - options.beta2) * x**2
    eps = options.eps * np.sqrt(np.mean(x**2))
    y = x / (np.sqrt(v / (1 - options.beta2**t)) + (eps or 1.0))
    return project_out(with_norm_of(y, x), bases)


def update_soap_muon(
    g: Array, matrix: MatrixState, t: int, idle: bool, options: SOAPMuonOptions
) -> Array:
    n = numerator(g, matrix, t, options)  # 1.
    if not idle:
        update_factors(n if options.statistics_of == "momentum" else g, matrix, t, options)  # 2.
    has_bases = t > options.muon_warmup_steps and bool(by_dim(matrix, "basis"))
    x = preconditioned(n, matrix, t, options) if has_bases else n  # 3.
    u = scaled_orthogonal(x, matrix, options)  # 4.
    if t == options.muon_warmup_steps:  # 5.
        first_bases(matrix)
    elif t > options.muon_warmup_steps and not idle and is_refresh_due(t, options):
        refresh(matrix, options)
    return u


class Reference:
    """An optimizer over copies of `params`, one set of options for all of them."""

    options_type: Callable[..., Options]
    # U of one matrix, from (g, its state, t, whether it is an idle expert, options)
    update: Callable[..., Array]

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.options = self.options_type(**options)
        self.params: list[Array] = [np.array(p, dtype=np.float64) for p in params]
        self.state: list[State] = [{} for _ in params]
        for p in self.params:
            if p.ndim != 2 and not (p.ndim == 3 and self.options.matrix_layout != "tensor"):
                raise ValueError(
                    f"the reference has no layout {self.options.matrix_layout!r} of a parameter of "
                    f"shape {p.shape}"
                )

    def new_state(self, shape: tuple[int, ...]) -> State:
        """Make zeros, for a parameter of this shape, which is the merged one for a stacked
        parameter."""
        state = {"step": 0, "momentum_buffer": np.zeros(shape)}
        if self.options.slow_momentum_start:
            state["momentum_gap"] = np.zeros(shape)
        if self.options.normalize == "row":
            state["row_moment"] = np.zeros(shape[:-1])
        if self.options.keep_norm:
            state["norm"] = np.zeros(shape[:-2])
        return state

    def step(self, grads: list[np.ndarray | None]) -> None:
        """Take one step; a parameter whose gradient is None is left alone altogether."""
        for i, grad in zip(range(len(self.params)), grads, strict=True):
            if grad is not None:
                self._step_parameter(i, np.array(grad, dtype=np.float64))

    def _step_parameter(self, i: int, g: Array) -> None:
        p, o = self.params[i], self.options
        g = -g if o.maximize else g
        if g.shape != p.shape:
            raise ValueError(f"gradient {i} has shape {g.shape}, its parameter {p.shape}")
        merge = p.ndim == 3 and o.matrix_layout == "stacked"
        w, g = (stacked(p), stacked(g)) if merge else (p, g)
        state = self.state[i] = self.state[i] or self.new_state(w.shape)
        state["step"] += 1
        batched = w.ndim == 3
        for index in range(len(w)) if batched else [...]:
            idle = batched and not g[index].any()
            couples = o.weight_decay_method == "l2" and not o.keep_norm
            coupled = g[index] + o.weight_decay * w[index] if couples else g[index]
            matrix = state_of_matrix(state, index)
            if o.keep_norm and state["step"] == 1:
                state["norm"][index] = np.linalg.norm(w[index])
            u = self.update(coupled, matrix, state["step"], idle, o)
            if o.keep_norm:
                r = float(state["norm"][index])
                w[index] = with_norm(w[index] - o.lr * with_norm(u, r), r)
            else:
                rate = {"decoupled": o.lr, "independent": 1.0, "palm": o.lr**2, "l2": 0.0}[
                    o.weight_decay_method
                ]
                w[index] = (1 - rate * o.weight_decay) * w[index] - o.lr * u
        if merge:
            p[...] = unstacked(w, p.shape)


class ReferenceMuon(Reference):
    """Muon, and NorMuon with `normalize="row"`."""

    options_type = Options
    update = staticmethod(update_muon)


class ReferenceSOAPMuon(Reference):
    """SOAP-Muon; dims of factors and bases are those of the matrix, 0 for its rows, also where
    experts are a leading dim."""

    options: SOAPMuonOptions
    options_type = SOAPMuonOptions
    update = staticmethod(update_soap_muon)

    def new_state(self, shape: tuple[int, ...]) -> State:
        *batch, m, n = shape
        state = super().new_state(shape)
        smaller = 0 if m <= n else 1
        both = self.options.sides == "both" or (
            self.options.sides == "auto" and max(m, n) <= 8 * min(m, n)
        )
        wanted = {0, 1} if both else {1 - smaller if self.options.sides == "larger" else smaller}
        for dim, size in enumerate((m, n)):
            if dim in wanted and size <= self.options.max_precond_dim:
                state["exp_avg_sq"] = np.zeros(shape)
                state[f"factor_{dim}"] = np.zeros((*batch, size, size))
                state[f"basis_{dim}"] = np.zeros((*batch, size, size)) + np.eye(size)
        return state
