"""The kernels of Muon's step on a CUDA device: the numbers of the references on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lather.kernels.momentum import nesterov_, unit_nesterov_
from lather.kernels.narrow_updates import change_by_
from lather.kernels.narrow_weights import change_
from lather.kernels.remainder import join
from lather.kernels.unit_norm import reference, unit_norm
from lather.optim.batched.plan import change_weights
from lather.optim.batched.roster import Change
from lather.torch_private import fused_sgd_

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = [(3, 63, 500), (1, 1, 1), (2, 768, 2048)]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mu", [0.0, 0.3, 0.95])
def test_momentum(shape: tuple[int, ...], mu: float) -> None:
    g, b = drawn(*shape, seed=0), drawn(*shape, seed=1)
    on_cuda = b.cuda()
    n = nesterov_(on_cuda, g.cuda(), mu)
    torch.testing.assert_close(n.cpu(), nesterov_(b, g, mu), rtol=0, atol=2e-6)
    torch.testing.assert_close(on_cuda.cpu(), b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_unit_norms_of_momentum(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g, b = drawn(*shape, seed=0).cuda(), drawn(*shape, seed=1).cuda()
    before = b.clone()
    y = unit_nesterov_(b, g, 0.95, dtype)
    assert y.equal(unit_norm(nesterov_(before, g, 0.95), dtype))
    assert b.equal(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-36, 1e30, 0.0])
def test_unit_norms(shape: tuple[int, ...], scale: float) -> None:
    x = drawn(*shape, seed=0) * scale
    expected = reference.unit_norm(x.double(), torch.float64)
    for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3)):
        error = torch.dist(unit_norm(x.cuda(), dtype).double().cpu(), expected)
        assert error <= limit * expected.norm()
    x[0, 0, 0] = torch.inf
    found = unit_norm(x.cuda(), torch.float32).isnan().all(-1).all(-1)
    assert found.tolist() == [True] + [False] * (len(x) - 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp32_weights_by_bf16_updates(shape: tuple[int, ...]) -> None:
    """They have the bits of torch's kernel, which takes updates that come from other ranks."""
    w, u = drawn(*shape, seed=0), drawn(*shape, seed=1).bfloat16()
    on_cuda, by_torch = w.cuda(), w.cuda()
    change_by_(on_cuda, u.cuda(), 0.01, 0.3)
    change_by_(w, u, 0.01, 0.3)
    torch.testing.assert_close(on_cuda.cpu(), w, rtol=0, atol=1e-6)
    options = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    fused_sgd_(
        *([by_torch], [u.cuda().float()], []),
        **options,
        lr=0.3,
        weight_decay=0.01 / 0.3,
        is_first_step=False,
    )
    assert on_cuda.equal(by_torch)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_weights_with_remainders(shape: tuple[int, ...]) -> None:
    w, u = drawn(*shape, seed=0).bfloat16(), drawn(*shape, seed=1)
    r = torch.full_like(w, 99, dtype=torch.int16)
    on_cuda = w.cuda(), r.cuda()
    for change, (weights, remainders) in ((u.cuda(), on_cuda), (u, (w, r))):
        change_(weights, change, remainders, decay=0.01, lr=0.3, step=5)
    torch.testing.assert_close(join(*on_cuda).cpu(), join(w, r), rtol=0, atol=2e-6)


def test_fp32_weights_of_many_parameters() -> None:
    weights, updates = ([drawn(7, n, seed=seed) for n in (5, 64, 333)] for seed in (0, 1))
    on_cuda = [w.cuda() for w in weights]
    change_weights(on_cuda, [u.cuda() for u in updates], Change(0.3, 0.01))
    change_weights(weights, updates, Change(0.3, 0.01))
    for found, expected in zip(on_cuda, weights, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)
