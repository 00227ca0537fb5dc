"""Sharding in one process changes nothing but that it fills in gradients of zero; clipping is
torch's. tests/distributed/test_engine.py has gradients, norms and clipping on meshes."""

from __future__ import annotations

import pytest
import torch
from engines import Case, make_pair
from torch import nn

from lather.parallel.local_parameters import clip_factor
from models.tiny import random_normal


def test_parameters_of_one_process_stay_what_they_are() -> None:
    pair = make_pair(Case(layers=2, changes={"tie_word_embeddings": True}))
    part, local = pair.engine.part, pair.engine.parameters
    assert [entry.parameter for entry in local] == [*part.parameters()]
    assert all(entry.parameter is entry.source for entry in local)
    part.norm.weight.requires_grad_(requires_grad=True)
    part.stages[-1].norm.register_forward_hook(lambda module, args, out: args[0])
    pair.run(pair.tokens())
    assert torch.equal(part.norm.weight.grad, torch.zeros_like(part.norm.weight))
    local.clear_gradients()
    assert all(p.grad is None for p in part.parameters())


@pytest.mark.parametrize("max_norm", [0.5, 5.0])
def test_clipping_has_torchs_bits(max_norm: float) -> None:
    grads = [random_normal(7, 3, seed=seed) for seed in range(3)]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    norm = torch.tensor(2.0)
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.clone()
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    factor = clip_factor(norm, max_norm)
    assert (factor == 1.0) == (max_norm > 2.0)
    assert all(torch.equal(p.grad, grad * factor) for p, grad in zip(params, grads, strict=True))


def test_the_factor_of_a_huge_norm_is_none_that_an_optimizer_refuses() -> None:
    assert 0.0 < clip_factor(torch.tensor(3e38), 1e-8) < 1e-37
