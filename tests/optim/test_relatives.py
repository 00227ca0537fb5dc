"""Shampoo, PSGD-Kron, AdaMuon and Scion against NumPy programs in fp64, which were written from the
papers and share no code with the package."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparison import TOLERANCE, gradients, largest, starting_points
from optim_helpers import largest_difference, parameters
from reference_newton_schulz import orthogonalize
from torch import nn

from lather.optim import AdaMuon, MatrixOptimizer, PSGDKron, Scion, Shampoo
from lather.optim.rules.psgd_kron import largest_eigenvalue

SHAPES = [(6, 6), (5, 8), (8, 5)]
STEPS = 12
LR = 1e-2
Arrays = dict[str, Any]


# --- from the papers ------------------------------------------------------------------------------


def power(k: Any, exponent: float, damping: float) -> Any:
    """Return the power of a symmetric matrix whose eigenvalues are increased by a part of the
    largest."""
    values, vectors = np.linalg.eigh(k)
    return (vectors * (values + damping * values.max()) ** exponent) @ vectors.T


def shampoo(g: Any, s: Arrays, t: int, o: Arrays) -> Any:
    """Compute Shampoo as Distributed Shampoo does: averages are divided by 1 - beta^t, roots are
    computed anew before the steps 1, f, 2 f, ..."""
    b1, b2 = o.get("betas", (0.9, 0.95))
    sides = {"both": "LR", "smaller": "L" if g.shape[0] <= g.shape[1] else "R"}[
        o.get("sides", "both")
    ]
    for side, product in (("L", g @ g.T), ("R", g.T @ g)):
        s[side] = b2 * s.get(side, 0) + (1 - b2) * product
    if t == 1 or t % o.get("precondition_frequency", 10) == 0:
        exponent = -(o.get("exponent") or 0.5 / len(sides))
        damped = {k: power(s[k] / (1 - b2**t), exponent, o.get("damping", 1e-4)) for k in "LR"}
        s["roots"] = [damped[k] if k in sides else np.eye(len(s[k])) for k in "LR"]
    s["M"] = b1 * s.get("M", 0) + (1 - b1) * g
    s["V"] = b2 * s.get("V", 0) + (1 - b2) * g * g
    m = s["M"] / (1 - b1**t)
    u = s["roots"][0] @ m @ s["roots"][1]
    adam = m / (np.sqrt(s["V"] / (1 - b2**t)) + o.get("eps", 1e-8))
    norms = {"none": u, "momentum": m, "adam": adam}
    return u * np.linalg.norm(norms[o.get("grafting", "adam")]) / np.linalg.norm(u)


def by_power_iteration(a: Any) -> float:
    x = a[np.argmax(np.diag(a))]
    for _ in range(2):
        x = a @ (x / np.linalg.norm(x))
    return float(np.linalg.norm(x))


def psgd_kron(g: Any, s: Arrays, t: int, o: Arrays) -> Any:
    """Compute PSGD with Q <- (1 - c (A - 1)) Q (1 - c (A - 1)), where A is made of the covariance
    of P (M + noise) as one matrix of (m n) x (m n)."""
    (m, n), beta = g.shape, o.get("momentum", 0.9)
    s["sum"] = beta * s.get("sum", 0) + (1 - beta) * g
    momentum = s["sum"] / (1 - beta**t)
    size = np.sqrt(np.mean(momentum**2))
    if t == 1:
        s["Q"], s["c"] = [np.eye(m) / size**0.25, np.eye(n) / size**0.25], [0.0, 0.0]
    whitening = np.kron(s["Q"][0] @ s["Q"][0], s["Q"][1] @ s["Q"][1])
    noise = (o.get("damping", 1e-2) * size) ** 2 * np.eye(m * n)
    covariance = whitening @ (np.outer(momentum, momentum) + noise) @ whitening
    covariance = covariance.reshape(m, n, m, n)
    for i, a in enumerate(
        (np.einsum("ijkj->ik", covariance) / n, np.einsum("jijk->ik", covariance) / m)
    ):
        now = by_power_iteration(a) + 1
        s["c"][i] = max(0.9 * s["c"][i] + 0.1 * now, now)
        left = np.eye(len(a)) - o.get("fit_lr", 0.1) / 2 / s["c"][i] * (a - np.eye(len(a)))
        s["Q"][i] = (left @ s["Q"][i] @ left + (left @ s["Q"][i] @ left).T) / 2
    u = s["Q"][0] @ s["Q"][0] @ momentum @ s["Q"][1] @ s["Q"][1]
    rms, limit = np.sqrt(np.mean(u**2)), o.get("max_update_rms", 1.1)
    return u * min(1, limit / rms) if limit else u


def momentum_of(g: Any, s: Arrays, mu: float, nesterov: bool) -> Any:
    s["B"] = mu * s.get("B", 0) + (1 - mu) * g
    return mu * s["B"] + (1 - mu) * g if nesterov else s["B"]


def adamuon(g: Any, s: Arrays, t: int, o: Arrays) -> Any:
    """Compute AdaMuon without its eps, which changes the eighth digit."""
    x = momentum_of(g, s, o.get("momentum", 0.95), o.get("nesterov", True))
    x = orthogonalize(np.sign(x) if o.get("signs", True) else x)
    beta = o.get("beta2", 0.95)
    s["V"] = beta * s.get("V", 0) + (1 - beta) * x * x
    x = x / np.sqrt(s["V"])
    return 0.2 * np.sqrt(x.size) * x / np.linalg.norm(x)


def scion(g: Any, s: Arrays, t: int, o: Arrays) -> Any:
    d, (m, n) = momentum_of(g, s, o.get("momentum", 0.9), o.get("nesterov", False)), g.shape
    if o.get("scale") == "sign":
        return np.sign(d) / n
    return max(1, np.sqrt(m / n)) * orthogonalize(d)


RULES: dict[str, tuple[type[MatrixOptimizer], Callable[..., Any], float]] = {
    "Shampoo": (Shampoo, shampoo, 0.01),
    "PSGDKron": (PSGDKron, psgd_kron, 0.01),
    "AdaMuon": (AdaMuon, adamuon, 0.01),
    "Scion": (Scion, scion, 0.0),
}
"""The class, the program, and the weight decay that the class has by default."""


def difference(name: str, options: Arrays, wrong: Arrays | None = None) -> float:
    """Return the largest difference of weights after twelve steps, in units of the rate."""
    cls, program, decay = RULES[name]
    expected, states = starting_points(SHAPES), [Arrays() for _ in SHAPES]
    params = [nn.Parameter(torch.tensor(w)) for w in expected]
    optimizer = cls(params, **{"lr": LR, **options, **(wrong or {})})
    for t, grads in enumerate(gradients(SHAPES, STEPS, missing=()), 1):
        for i, g in enumerate(grads):
            params[i].grad = torch.tensor(g)
            u = program(g, states[i], t, options)
            expected[i] = (1 - LR * options.get("weight_decay", decay)) * expected[i] - LR * u
        optimizer.step()
    return max(largest(p.detach().numpy() - w) for p, w in zip(params, expected, strict=True)) / LR


OPTIONS: dict[str, list[Arrays]] = {
    "Shampoo": [
        *({}, {"grafting": "momentum"}, {"grafting": "none", "exponent": 0.2}),
        {"precondition_frequency": 3, "betas": (0.8, 0.9), "damping": 1e-2, "eps": 0.1},
        {"sides": "smaller", "precondition_frequency": 1, "weight_decay": 0.3},
    ],
    "PSGDKron": [
        *({}, {"momentum": 0.5, "fit_lr": 0.5, "max_update_rms": 0.0}),
        {"damping": 0.3, "max_update_rms": 0.5, "weight_decay": 0.3},
    ],
    "AdaMuon": [{}, {"signs": False, "beta2": 0.9}, {"nesterov": False, "weight_decay": 0.3}],
    "Scion": [{}, {"scale": "sign", "nesterov": True}, {"momentum": 0.8, "weight_decay": 0.3}],
}


@pytest.mark.parametrize(
    ("name", "options"), [(name, one) for name, some in OPTIONS.items() for one in some], ids=str
)
def test_they_do_what_the_papers_say(name: str, options: Arrays) -> None:
    assert difference(name, options) < TOLERANCE


WRONG: dict[str, list[Arrays]] = {
    "Shampoo": [
        *({"betas": (0.909, 0.95)}, {"betas": (0.9, 0.9595)}, {"eps": 1e-3}, {"exponent": 0.2525}),
        *({"damping": 2e-4}, {"precondition_frequency": 9}, {"sides": "smaller"}),
        {"grafting": "momentum"},
    ],
    "PSGDKron": [
        *({"momentum": 0.909}, {"fit_lr": 0.101}, {"damping": 2e-2}, {"sides": "smaller"}),
        {"max_update_rms": 0.3},
    ],
    "AdaMuon": [{"momentum": 0.9405}, {"beta2": 0.9405}, {"signs": False}, {"scale": 0.5}],
    "Scion": [{"momentum": 0.909}, {"scale": "sign"}, {"nesterov": True}, {"steps": 4}],
}


@pytest.mark.parametrize(
    ("name", "wrong"), [(name, one) for name, some in WRONG.items() for one in some], ids=str
)
def test_tolerance_rejects_a_small_error(name: str, wrong: Arrays) -> None:
    assert difference(name, {}, wrong) > 100 * TOLERANCE
    assert difference(name, {}, {"lr": 1.01 * LR}) > 100 * TOLERANCE


# --- special cases --------------------------------------------------------------------------------


def moved(cls: type[MatrixOptimizer], grads: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the last update of a matrix with these gradients."""
    return updates_of(cls, grads, **options)[-1]


def updates_of(cls: type[MatrixOptimizer], grads: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the updates of a matrix with these gradients."""
    p, updates = nn.Parameter(torch.zeros_like(grads[0])), []
    optimizer = cls([p], lr=1.0, weight_decay=0.0, **options)
    for g in grads:
        before, p.grad = p.detach().clone(), g
        optimizer.step()
        updates.append(before - p.detach())
    return torch.stack(updates)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_shampoo_of_a_first_gradient_without_damping_is_its_polar_factor() -> None:
    g = drawn(1, 5, 5)
    left, _, right = torch.linalg.svd(g[0])
    u = moved(Shampoo, g, grafting="none", damping=1e-14)
    torch.testing.assert_close(u, left @ right, rtol=0, atol=1e-8)


def test_psgd_makes_the_mean_product_of_updates_an_identity() -> None:
    """Gradients have covariances of condition 100 on either side."""
    left, right = (
        torch.linalg.qr(drawn(n, n)).Q * torch.logspace(0, -1, n, dtype=torch.float64)
        for n in (8, 6)
    )
    grads = left @ drawn(900, 8, 6) @ right.mT
    updates = updates_of(PSGDKron, grads, momentum=0.0, max_update_rms=0.0)[-400:]
    for last in (updates, updates.mT):
        spread = torch.linalg.eigvalsh((last @ last.mT).mean(0)) / last.shape[-1]
        assert 0.7 < spread.min() <= spread.max() < 1.4, spread
    raw = torch.linalg.eigvalsh((grads @ grads.mT).mean(0))
    assert raw.max() / raw.min() > 80


def test_psgd_goes_on_soon_after_a_huge_gradient() -> None:
    grads = drawn(60, 8, 6)
    calm = updates_of(PSGDKron, grads, momentum=0.0)
    grads[20] *= 1e8
    shaken = updates_of(PSGDKron, grads, momentum=0.0)
    sizes = (shaken.square().mean((1, 2)) / calm.square().mean((1, 2))).sqrt()
    assert sizes[:20].min() == sizes[:20].max() == 1
    assert sizes[-1] > 0.8


def test_scion_with_decay_1_over_radius_keeps_weights_in_the_ball() -> None:
    p = nn.Parameter(torch.zeros(6, 8))
    optimizer = Scion([p], lr=0.1, scale="sign", weight_decay=1 / 3)
    for _ in range(300):
        p.grad = torch.ones(6, 8)
        optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((6, 8), -3 / 8), rtol=1e-3, atol=0)


def test_scion_keeps_no_second_moment_of_the_rows_of_signs() -> None:
    """They have one norm, so that `normalize="row"`, which a group may inherit, has nothing to
    do."""
    states = {}
    for scale in ("sign", "spectral"):
        p = nn.Parameter(torch.zeros(6, 8))
        p.grad = torch.ones(6, 8)
        optimizer = Scion([p], lr=0.1, scale=scale, normalize="row")
        optimizer.step()
        states[scale] = optimizer.state[p].keys()
    assert states["sign"] == {"step", "momentum_buffer"}
    assert states["spectral"] == {"step", "momentum_buffer", "row_moment"}


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *((Shampoo, {"grafting": "momentum"}), (Shampoo, {"eps": 0.0}), (PSGDKron, {})),
        *((AdaMuon, {}), (AdaMuon, {"signs": False}), (Scion, {}), (Scion, {"scale": "sign"})),
    ],
    ids=str,
)
def test_updates_have_the_scale_that_the_rule_gives_them(
    cls: type[MatrixOptimizer], options: Arrays
) -> None:
    """Only Shampoo with the norm of the momentum passes the scale of gradients on."""
    grads = drawn(7, 6, 8).float()
    expected = moved(cls, grads, **options)
    for scale in (1e-12, 1e-5, 1e10):
        passed_on = scale if options.get("grafting") == "momentum" else 1.0
        found = moved(cls, grads * scale, **options) / passed_on
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max())


@pytest.mark.parametrize("cls", [Shampoo, PSGDKron, AdaMuon, Scion])
def test_matrices_without_gradient_stay_and_begin_later(cls: type[MatrixOptimizer]) -> None:
    """A gradient of zeros leaves no state behind that a first gradient would meet."""
    shapes = [(3, 6, 5)]
    late, never = parameters(shapes), parameters(shapes)
    options: Arrays = {"lr": 0.1, "weight_decay": 0.0, "matrix_layout": "per_expert"}
    options |= {"precondition_frequency": 1} if cls is Shampoo else {}
    a, b = cls(late, **options), cls(never, **options)
    grads = drawn(4, 3, 6, 5).float()
    for step, g in enumerate(grads):
        if step == 2:
            g.zero_()
        g[1] = g[1] if step == 3 else 0
        late[0].grad = g
        never[0].grad = g.clone()
        never[0].grad[1] = 0
        a.step()
        b.step()
    assert torch.equal(never[0][1], parameters(shapes)[0][1])
    assert torch.equal(late[0][::2], never[0][::2])
    moved_by = (late[0][1] - never[0][1]).detach()
    assert moved_by.isfinite().all()
    assert 0 < moved_by.abs().max() < 1
    assert largest_difference(late, never) == moved_by.abs().max()


def test_the_estimate_of_the_largest_eigenvalue_is_near_and_not_above() -> None:
    x = drawn(4, 9, 30)
    a = x @ x.mT
    a[3] = 0
    values, found = torch.linalg.eigvalsh(a)[:, -1], largest_eigenvalue(a)
    assert found[3] == 0
    share = found[:3] / values[:3]
    assert 0.8 < share.min() <= share.max() < 1 + 1e-12
