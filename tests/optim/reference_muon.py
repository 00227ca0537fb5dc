"""Slow, literal Muon, NorMuon and SOAP-Muon in NumPy float64, to compare the package's optimizers with.

Written from the specification alone (the rules' specification: "Newton-Schulz", "Muon", "SOAP-Muon"; the optimizer
specification: "second_moment", "matrix_layout") and independent of the package: nothing is imported from it and none of
its code was read. Every matrix is handled on its own and nothing is batched, cached or skipped for speed.

Names follow the specification: `w` is a parameter, `g` its gradient, `t` the 1-based step of that parameter, `b` the
momentum, `n` the numerator, `k` a Kronecker factor, `q` its eigenbasis (columns are eigenvectors), `v` the second moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    project_in,
    project_out,
    rotated_diagonal,
    stacked,
    state_of_matrix,
    unstacked,
)

COEFFICIENTS = {
    "quintic": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        (1.875, -1.25, 0.375),
    ),
}


def orthogonalize(x: np.ndarray, steps: int = 5, coefficients: str = "quintic") -> Array:
    """Newton-Schulz of one matrix, on its smaller side; past the end of the sequence its last coefficients repeat."""
    x = np.array(x, dtype=np.float64)
    m, n = x.shape
    if m > n:
        return orthogonalize(x.T, steps, coefficients).T
    x = x / (np.linalg.norm(x) + 1e-7)
    sequence = COEFFICIENTS[coefficients]
    for i in range(steps):
        a, b, c = sequence[min(i, len(sequence) - 1)]
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def scale_of(shape: Sequence[int], scale: str | float) -> float:
    """What an orthogonalized matrix of this shape is multiplied by."""
    m, n = shape
    if scale == "match_rms_adamw":
        return float(0.2 * np.sqrt(max(m, n)))
    if scale == "spectral":
        return float(np.sqrt(max(1.0, m / n)))
    return float(scale)


@dataclass(kw_only=True)
class Options:
    """What Muon and SOAP-Muon have in common."""

    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: str = "quintic"
    scale: str | float = "match_rms_adamw"
    weight_decay: float = 0.0
    eps: float = 1e-8
    matrix_layout: str = "tensor"

    def __post_init__(self) -> None:
        for name, known in (("matrix_layout", ("tensor", "per_expert", "stacked")), ("coefficients", tuple(COEFFICIENTS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown to the reference, which has {known}")


@dataclass(kw_only=True)
class MuonOptions(Options):
    """The options of Muon; with `normalize="row"` it is NorMuon."""

    normalize: str | None = None
    normalize_beta: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize not in (None, "row"):
            raise ValueError(f"normalize={self.normalize!r} is unknown to the reference, which has None and 'row'")


@dataclass(kw_only=True)
class SOAPMuonOptions(Options):
    """The options of SOAP-Muon; `adam_warmup_steps` steps are plain Muon."""

    beta2: float = 0.95
    shampoo_beta: float = 0.95
    sides: str = "smaller"
    statistics_of: str = "momentum"
    orthogonalize: bool = True
    precondition_frequency: int | Callable[[int], int] = 10
    precondition_warmup_steps: int = 0
    adam_warmup_steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("sides", ("smaller", "both")), ("statistics_of", ("momentum", "gradient"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown to the reference, which has {known}")


def numerator(g: Array, matrix: MatrixState, options: Options) -> Array:
    """Updates the momentum in place and returns what is orthogonalized: the momentum, or Nesterov's look ahead."""
    mu, b = options.momentum, matrix["momentum_buffer"]
    b[...] = mu * b + (1 - mu) * g
    return mu * b + (1 - mu) * g if options.nesterov else b.copy()


def scaled_orthogonal(x: Array, options: Options) -> Array:
    return scale_of(x.shape, options.scale) * orthogonalize(x, options.steps, options.coefficients)


def with_norm_of(y: Array, x: Array) -> Array:
    """The matrix y with the Frobenius norm of x; zeros stay zeros."""
    norm = np.linalg.norm(y)
    return y * (np.linalg.norm(x) / norm) if norm > 0 else y


def update_muon(g: Array, matrix: MatrixState, t: int, idle: bool, options: MuonOptions) -> Array:
    u = orthogonalize(numerator(g, matrix, options), options.steps, options.coefficients)
    if options.normalize == "row":
        v = matrix["row_moment"]
        v[...] = options.normalize_beta * v + (1 - options.normalize_beta) * np.mean(u * u, axis=1)
        u = with_norm_of(u / (np.sqrt(v)[:, None] + options.eps), u)
    return scale_of(u.shape, options.scale) * u


def update_factors(x: Array, matrix: MatrixState, t: int, options: SOAPMuonOptions) -> None:
    beta = 1 - (1 - options.shampoo_beta) / (1 - options.shampoo_beta**t)
    for dim, k in by_dim(matrix, "factor").items():
        k[...] = beta * k + (1 - beta) * contraction(x, dim)


def first_bases(matrix: MatrixState) -> None:
    """The eigenvectors of the factors, descending; the identity where a factor is zero. V is zero, so it need not be turned."""
    for dim, k in by_dim(matrix, "factor").items():
        matrix[f"basis_{dim}"][...] = eigh_descending(k)[1]


def refresh(matrix: MatrixState) -> None:
    """One step of orthogonal iteration of each basis; V_new = (S_L o S_L) V (S_R o S_R)^T with S = Q_new^T Q_old."""
    v, bases = matrix["exp_avg_sq"], by_dim(matrix, "basis")
    for dim, k in by_dim(matrix, "factor").items():
        q_old = bases[dim]
        order = descending(rotated_diagonal(k, q_old))
        q_new = np.linalg.qr(k @ q_old[:, order]).Q
        s = q_new.T @ q_old
        v[...] = apply_on_dim(s * s, v, dim)
        bases[dim][...] = q_new


def is_refresh_due(t: int, options: SOAPMuonOptions) -> bool:
    f = options.precondition_frequency
    return t <= options.precondition_warmup_steps or t % (f(t) if callable(f) else f) == 0


def preconditioned(n: Array, matrix: MatrixState, t: int, options: SOAPMuonOptions) -> Array:
    """The numerator divided by the root of its second moment in the eigenbasis, its norm kept; updates V in place."""
    v, bases = matrix["exp_avg_sq"], by_dim(matrix, "basis")
    x = project_in(n, bases)
    v[...] = options.beta2 * v + (1 - options.beta2) * x**2
    correction = 1 - options.beta2 ** (t - options.adam_warmup_steps)
    y = x / (np.sqrt(v / correction) + options.eps)
    return project_out(with_norm_of(y, x), bases)


def update_soap_muon(g: Array, matrix: MatrixState, t: int, idle: bool, options: SOAPMuonOptions) -> Array:
    n = numerator(g, matrix, options)
    if not idle:
        update_factors(n if options.statistics_of == "momentum" else g, matrix, t, options)
    if t <= options.adam_warmup_steps:
        return scaled_orthogonal(n, options)
    if t == options.adam_warmup_steps + 1:
        first_bases(matrix)
    elif not idle and is_refresh_due(t, options):
        refresh(matrix)
    result = preconditioned(n, matrix, t, options)
    return scaled_orthogonal(result, options) if options.orthogonalize else result


class Reference:
    """An optimizer over copies of `params`, one set of options for all of them."""

    options_type: Callable[..., Options]
    update: Callable[..., Array]  # U of one matrix, from (g, its state, t, whether it is an idle expert, options)

    def __init__(self, params: list[np.ndarray], **options: Any) -> None:
        self.options = self.options_type(**options)
        self.params: list[Array] = [np.array(p, dtype=np.float64) for p in params]
        self.state: list[State] = [{} for _ in params]
        for p in self.params:
            if p.ndim != 2 and not (p.ndim == 3 and self.options.matrix_layout != "tensor"):
                raise ValueError(f"the reference has no layout {self.options.matrix_layout!r} of a parameter of shape {p.shape}")

    def new_state(self, shape: tuple[int, ...]) -> State:
        """Zeros, for a parameter of this shape, which is the merged one for a stacked parameter."""
        return {"step": 0, "momentum_buffer": np.zeros(shape)}

    def step(self, grads: list[np.ndarray | None]) -> None:
        """One step; a parameter whose gradient is None is left alone altogether."""
        for i, grad in zip(range(len(self.params)), grads, strict=True):
            if grad is not None:
                self._step_parameter(i, np.array(grad, dtype=np.float64))

    def _step_parameter(self, i: int, g: Array) -> None:
        p, o = self.params[i], self.options
        if g.shape != p.shape:
            raise ValueError(f"gradient {i} has shape {g.shape}, its parameter {p.shape}")
        merge = p.ndim == 3 and o.matrix_layout == "stacked"
        w, g = (stacked(p), stacked(g)) if merge else (p, g)
        state = self.state[i] = self.state[i] or self.new_state(w.shape)
        state["step"] += 1
        batched = w.ndim == 3
        for index in range(len(w)) if batched else [...]:
            idle = batched and not g[index].any()
            u = self.update(g[index], state_of_matrix(state, index), state["step"], idle, o)
            w[index] = (1 - o.lr * o.weight_decay) * w[index] - o.lr * u
        if merge:
            p[...] = unstacked(w, p.shape)


class ReferenceMuon(Reference):
    """Muon, and NorMuon with `normalize="row"`."""

    options: MuonOptions
    options_type = MuonOptions
    update = staticmethod(update_muon)

    def new_state(self, shape: tuple[int, ...]) -> State:
        row_moment = {"row_moment": np.zeros(shape[:-1])} if self.options.normalize == "row" else {}
        return {**super().new_state(shape), **row_moment}


class ReferenceSOAPMuon(Reference):
    """SOAP-Muon; dims of factors and bases are those of the matrix, 0 for its rows, also where experts are a leading dim."""

    options: SOAPMuonOptions
    options_type = SOAPMuonOptions
    update = staticmethod(update_soap_muon)

    def new_state(self, shape: tuple[int, ...]) -> State:
        *batch, m, n = shape
        state = {**super().new_state(shape), "exp_avg_sq": np.zeros(shape)}
        for dim, size in enumerate((m, n)):
            if self.options.sides == "both" or dim == (0 if m <= n else 1):
                state[f"factor_{dim}"] = np.zeros((*batch, size, size))
                state[f"basis_{dim}"] = np.zeros((*batch, size, size)) + np.eye(size)
        return state
