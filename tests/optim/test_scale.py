"""Updates of scale-free rules do not depend on the scale of the gradients: the weights are the
same, to the bit for powers of two."""

import itertools
from typing import Any

import pytest
import torch
from optim_helpers import largest_difference, parameters
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon, SOAPMuon
from lather.optim.functional import (
    get_eigenbasis_eigh,
    get_eigenbasis_qr,
    get_eigenbasis_svd,
    orthogonalize,
)
from lather.optim.linalg import scale as linalg_scale
from lather.optim.linalg.eigenbasis import is_still_diagonal, update_eigenbasis_and_momentum
from lather.optim.linalg.scale import norms, powers_of_two

Params = list[nn.Parameter]

POWERS = [2.0**-62, 2.0**-50, 2.0**-34, 2.0**-21, 2.0**20, 2.0**41, 2.0**60]
OTHERS = [1e-18, 1e-10, 3e-7, 1e-3, 1e5, 1e18]
TINY = [1e-20, 1e-30, 2.0**-110]
"""Scales whose squares fp32 does not have."""

SHAPES = ((6, 6), (3, 6, 6), (4, 5, 5), (8, 5))


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def trained(cls: type[MatrixOptimizer], options: dict[str, Any], scale: float) -> Params:
    """Take eight steps with gradients times `scale`; one expert gets no token in each third one."""
    params = parameters(SHAPES)
    with_matrices = [p for p in params if p.dim() == 2 or "matrix_layout" in options]
    optimizer = cls(with_matrices, lr=0.05, **options)
    for step in range(8):
        for number, p in enumerate(params):
            p.grad = draw(*p.shape, seed=100 * step + number) * scale
            if p.dim() == 3 and options.get("matrix_layout") == "per_expert" and step % 3 == 2:
                p.grad[1] = 0
        optimizer.step()
    assert optimizer.counters["refreshes_failed"] == 0
    return params


PER_EXPERT, STACKED = {"matrix_layout": "per_expert"}, {"matrix_layout": "stacked"}
MUON: list[dict[str, Any]] = [
    *({}, PER_EXPERT, STACKED),
    {"coefficients": "polar_express", "nesterov": False},
    {"steps": 2, "scale": "spectral", "momentum": 0.0},
    {"normalize": "row", **PER_EXPERT},
    {"normalize": "row", "keep_norm": True},
    {"keep_norm": True, **PER_EXPERT},
    *({"newton_schulz_dtype": "bfloat16"}, {"state_dtype": torch.bfloat16}),
]
WARM = {"muon_warmup_steps": 3, "precondition_frequency": 2}
SOAP_MUON: list[dict[str, Any]] = [
    *({}, PER_EXPERT, STACKED, {"eps": 0.1}, {"sides": "both", **PER_EXPERT}),
    {"sides": "both", "refresh_method": "cholesky_qr"},
    {"sides": "both", "refresh_method": "root_qr", "first_bases": "iteration"},
    {"refresh_method": "eigh", "second_moment": "permute"},
    {"refresh_method": "qr", "statistics_of": "gradient", "normalize": "row"},
    {"use_adaptive_criteria": True, "adaptive_update_tolerance": 0.1, "keep_norm": True},
]


@pytest.mark.parametrize("options", MUON, ids=str)
def test_muon(options: dict[str, Any]) -> None:
    expected = trained(Muon, options, 1.0)
    for scale in POWERS:
        assert largest_difference(trained(Muon, options, scale), expected) == 0, scale
    is_narrow = {torch.bfloat16, "bfloat16"} & set(options.values())
    rounding = 1e-2 if is_narrow else 1e-5
    for scale in [*OTHERS, *TINY]:
        assert largest_difference(trained(Muon, options, scale), expected) < rounding, scale


@pytest.fixture(params=["cpu", "gpu"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU on the CPU, too: there, no norm is looked at."""
    if request.param == "gpu":
        monkeypatch.setattr(linalg_scale, "is_cpu", lambda x: False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("options", [{}, {"normalize": "row"}, {"keep_norm": True}], ids=str)
def test_muon_over_the_whole_range_of_fp32(options: dict[str, Any]) -> None:
    """The least element of a gradient or of a momentum is still normal at 2^-100; above 2^60 a
    gradient is refused, unless that is switched off."""
    options = {**PER_EXPERT, **options, "nonfinite": "ignore"}
    expected = trained(Muon, options, 1.0)
    for exponent in (*range(-100, 120, 20), 124):
        found = trained(Muon, options, 2.0**exponent)
        assert largest_difference(found, expected) == 0, exponent
    for exponent in (-126, -116):
        assert largest_difference(trained(Muon, options, 2.0**exponent), expected) < 1e-3


@pytest.mark.usefixtures("path")
def test_the_moments_of_an_expert_without_tokens_may_decay_to_nothing() -> None:
    for cls, options in ((Muon, {}), (Muon, {"keep_norm": True}), (AdamW, {"keep_norm": True})):
        p = nn.Parameter(draw(3, 6, 5))
        optimizer = cls([p], lr=1e-3, weight_decay=0.0, matrix_layout="per_expert", **options)
        p.grad = draw(3, 6, 5, seed=1)
        for _ in range(1500):
            before = p.detach().clone()
            optimizer.step()
            p.grad[1] = 0
            moved = torch.linalg.matrix_norm(p.detach() - before) / torch.linalg.matrix_norm(before)
            assert moved.max() < 0.01, options


@pytest.mark.parametrize("options", SOAP_MUON, ids=str)
def test_soap_muon(options: dict[str, Any]) -> None:
    """Squares of the smallest elements are lost in V and the factors below 1e-15; the update stays
    near that at scale 1 nevertheless."""
    options = {**WARM, **options}
    expected = trained(SOAPMuon, options, 1.0)
    for scale in POWERS:
        limit = 0.05 if scale == 2.0**-62 else 1e-3 if scale == 2.0**-50 else 0
        assert largest_difference(trained(SOAPMuon, options, scale), expected) <= limit, scale
    for scale in OTHERS:
        limit = 0.05 if scale == 1e-18 else 1e-3
        assert largest_difference(trained(SOAPMuon, options, scale), expected) < limit, scale


def test_the_relative_eps_of_soap_muon_matters_as_little_as_an_absolute_one() -> None:
    expected = trained(SOAPMuon, {**WARM, "eps": 1e-8}, 1.0)
    assert largest_difference(trained(SOAPMuon, {**WARM, "eps": 0.0}, 1.0), expected) < 1e-6
    assert largest_difference(trained(SOAPMuon, {**WARM, "eps": 0.1}, 1.0), expected) > 1e-3


def test_squares_that_vanish_in_the_second_moment_do_not_blow_the_update_up() -> None:
    """One element is 1e-5 of the others, whose squares fp32 still has; divided by eps alone it
    would be the whole update."""
    p = nn.Parameter(torch.zeros(4, 4))
    options: dict[str, Any] = {"weight_decay": 0.0, "momentum": 0.0, "precondition_frequency": 100}
    optimizer = SOAPMuon([p], lr=1.0, scale=1.0, **options)
    g = torch.eye(4) * 2.0**-62
    g[3, 3] *= 1e-5
    for _ in range(2):
        before = p.detach().clone()
        p.grad = g.clone()
        optimizer.step()
    assert torch.linalg.svdvals((p.detach() - before)[:3, :3]).min() > 0.5


@pytest.mark.parametrize("scale", [1e-24, 1e-14])
def test_soap_normalizes_updates_whose_squares_vanish(scale: float) -> None:
    """eps of Adam is absolute, so the updates are as small as the gradients; their size is the same
    nevertheless."""
    p = nn.Parameter(torch.zeros(6, 5))
    options: dict[str, Any] = {"weight_decay": 0.0, "eps": 1.0, "nonfinite": "ignore"}
    optimizer = SOAP([p], lr=1.0, normalize_preconditioned_grads=True, **options)
    for step in range(3):
        before = p.detach().clone()
        p.grad = draw(6, 5, seed=step) * scale
        optimizer.step()
        torch.testing.assert_close((p.detach() - before).square().mean().sqrt(), torch.tensor(1.0))
    p.grad = torch.zeros(6, 5)
    optimizer.state.clear()
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p.detach(), before)


def test_kept_norms_of_updates_whose_squares_vanish() -> None:
    """AdamW with a large eps, whose update is as small as the gradient, moves the weights by the
    same angle."""
    ends = []
    for scale in (1.0, 1e-10, 1e-22, 1e-28):
        p = nn.Parameter(draw(6, 5))
        optimizer = AdamW([p], lr=0.1, eps=1e8, keep_norm=True)
        for step in range(3):
            p.grad = draw(6, 5, seed=10 + step) * scale
            optimizer.step()
        ends.append([p])
    for end in ends[1:]:
        assert largest_difference(end, ends[0]) < 1e-5


# --- building blocks ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 16, 16), (3, 8, 20), (2, 300, 260)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_orthogonalize(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    x[1:] *= 1e-3
    expected, kept = orthogonalize(x), x.clone()
    for scale in (*POWERS, 2.0**-80, 2.0**-90):
        assert torch.equal(orthogonalize(x * scale), expected), scale
    rounding = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 0.1}[dtype]
    for scale in (*OTHERS, 1e-20, 1e-30, 1e30):
        torch.testing.assert_close(orthogonalize(x * scale), expected, rtol=0, atol=rounding)
    assert torch.equal(x, kept)


@pytest.mark.usefixtures("path")
def test_orthogonalize_over_the_whole_range_of_fp32() -> None:
    x = draw(3, 5, 9)
    x = x / x.abs().amax((1, 2), keepdim=True)
    x = (x + 0.1 * x.sign()) / 1.1  # no element near zero
    expected = orthogonalize(x)
    for exponent in range(-122, 128, 2):
        assert torch.equal(orthogonalize(x * 2.0**exponent), expected), exponent
    for factor in (1.2e-38, 1e-30, 1e-7, 1e30, 3e38):
        found = orthogonalize(x * factor)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()


def test_cubic_steps_leave_out_a_product() -> None:
    x, products = draw(2, 8, 12), {}
    for name in ("quintic", "cubic"):
        with FlopCounterMode(display=False) as counter:
            orthogonalize(x, 4, name)  # type: ignore[arg-type]
        products[name] = counter.get_total_flops()
    square, whole = 2 * 2 * 8 * 8 * 8, 2 * 2 * 8 * 8 * 12
    assert products == {"quintic": 4 * (square + 2 * whole), "cubic": 4 * 2 * whole}


@pytest.mark.parametrize(("coefficients", "error"), [("cubic", 1e-6), ("hybrid", 1e-3)])
def test_sequences_that_end_at_one(coefficients: Any, error: float) -> None:
    x = draw(2, 8, 12)
    steps = {"cubic": 20, "hybrid": 10}[coefficients]
    values = torch.linalg.svdvals(orthogonalize(x, steps, coefficients))
    assert (values - 1).abs().max() < error
    assert (torch.linalg.svdvals(orthogonalize(x, 10)) - 1).abs().max() > 0.1


def test_a_matrix_orthogonalized_in_any_batch_has_the_same_bits() -> None:
    """One matrix of a batch may be out of range: the others have the bits that they have alone."""
    x = draw(4, 9, 7)
    expected = [orthogonalize(one[None]) for one in x]
    x[1] *= 2.0**-100
    x[2] = 0
    for number, u in enumerate(orthogonalize(x)):
        own = torch.zeros_like(expected[2]) if number == 2 else expected[number]
        assert torch.equal(u[None], own)


def test_a_small_matrix_has_singular_values_as_near_to_one_as_a_large_one() -> None:
    x = torch.linalg.qr(draw(16, 16)).Q[None]
    for scale in (1.0, 1e-10, 1e-20):
        values = torch.linalg.svdvals(orthogonalize(x * scale))
        assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.parametrize("scale", [1e-40, 1e-60, 1e-140])
def test_fp64_has_its_own_range(scale: float) -> None:
    """The squares of all of these are normal numbers of fp64."""
    x = draw(2, 6, 9, dtype=torch.float64)
    found = orthogonalize(x * scale)
    torch.testing.assert_close(found, orthogonalize(x), rtol=0, atol=1e-13)
    for options in ({}, {"normalize": "row"}):
        moved = []
        for factor in (1.0, scale):
            p = nn.Parameter(torch.zeros(6, 9, dtype=torch.float64))
            p.grad = x[0] * factor
            Muon([p], lr=0.1, **options).step()
            moved.append(p.detach())
        torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=1e-13)


def test_what_is_not_finite_stays_so() -> None:
    x = draw(3, 4, 5)
    x[0, 1, 2], x[1, 3, 3] = torch.inf, torch.nan
    u = orthogonalize(x)
    assert not u[:2].isfinite().all(-1).all(-1).any()
    assert u[2].isfinite().all()
    assert not orthogonalize(torch.zeros(2, 3, 4)).any()
    assert orthogonalize(torch.zeros(0, 3, 4)).shape == (0, 3, 4)


@pytest.mark.parametrize("n", [4, 48, 70])
@pytest.mark.parametrize("method", ["qr", "cholesky_qr", "root_qr", "auto"])
def test_bases_of_factors_of_any_scale(method: str, n: int) -> None:
    g = draw(3, n, 2 * n)
    k, q = g @ g.mT, torch.linalg.qr(draw(3, n, n, seed=1)).Q
    expected = get_eigenbasis_qr(k, q, 2, method)
    # even, as for gradients that differ by powers of two
    for exponent in (-110, -76, -34, 42, 100):
        found = get_eigenbasis_qr(k * 2.0**exponent, q, 2, method)
        assert torch.equal(found[0], expected[0]), exponent
        assert torch.equal(found[1], expected[1]), exponent
    v, m = torch.zeros(3, n, 1), torch.zeros(3, n, 1)
    failed = update_eigenbasis_and_momentum(k * 1e-34, q.clone(), m, v, 0, method=method)
    assert not failed.any()


def test_first_bases_of_factors_of_any_scale() -> None:
    g = draw(3, 12, 30)
    k = g @ g.mT
    for method in (lambda k: get_eigenbasis_eigh(k)[0], get_eigenbasis_svd):
        for exponent in (-110, 100):
            assert torch.equal(method(k * 2.0**exponent), method(k))


def test_the_criterion_judges_factors_of_any_scale() -> None:
    g = draw(2, 12, 30)
    k = g @ g.mT
    q = get_eigenbasis_eigh(k)[0]
    q[1] = torch.eye(12)
    for scale, number in itertools.product((1.0, 1e-36, 1e-20, 1e30), range(2)):
        assert is_still_diagonal(k * scale, q, 1e-4).tolist()[number] == (number == 0)


def test_norms_of_any_scale() -> None:
    x = draw(4, 5, 6)
    for scale in (1.0, *POWERS, *OTHERS, *TINY, 1e30):
        expected = torch.linalg.vector_norm((x * scale).double(), dim=(1, 2))
        share = norms(x * scale).double() / expected
        torch.testing.assert_close(share, torch.ones_like(share), rtol=0, atol=1e-6)
    assert norms(x.bfloat16()).dtype == torch.float32
    assert norms(torch.zeros(2, 0, 3)).tolist() == [0, 0]


def test_powers_of_two_are_exact() -> None:
    x = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    size = powers_of_two(-x.float().view(-1, 1, 1)).double()
    assert torch.equal(size.log2().round().remainder(2), torch.zeros(len(x), dtype=torch.float64))
    assert torch.equal(2.0 ** size.log2().round(), size)
    assert ((x / size >= 0.5) & (x / size <= 2)).all()


@pytest.mark.parametrize("rank", [1, 2, 16])
def test_polar_express_stays_bounded_in_bf16(rank: int) -> None:
    """The gradient of an expert with one token has rank one."""
    x = draw(8, 32, rank, seed=rank) @ draw(8, rank, 48, seed=rank + 1)
    for steps in (5, 8, 12):
        u = orthogonalize(x, steps, "polar_express", "bfloat16")
        largest = torch.linalg.matrix_norm(u, ord=2)
        assert 0.7 < float(largest.min()) <= float(largest.max()) < 1.3


def test_matrices_without_elements_are_orthogonalized_to_themselves() -> None:
    assert orthogonalize(torch.empty(3, 0, 8)).shape == (3, 0, 8)
