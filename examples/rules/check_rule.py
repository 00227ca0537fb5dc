"""Checks that hold for every rule: the same numbers after a resume, one matrix at a time, and
expert by expert."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lather.optim import MatrixOptimizer, Rule

SHAPES = [(6, 4), (6, 4), (3, 4, 5), (5,)]


def trained(
    rule: Rule, shapes: Sequence[tuple[int, ...]] = SHAPES, resume_at: int = -1
) -> list[Tensor]:
    """Parameters of these shapes after 12 steps."""
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = MatrixOptimizer(params, rule)
    for step in range(12):
        if step == resume_at:
            saved = optimizer.state_dict()
            optimizer = MatrixOptimizer(params, rule)
            optimizer.load_state_dict(saved)
        sizes = [p.numel() for p in params]
        noise = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(step))
        for p, part in zip(params, noise.split(sizes), strict=True):
            p.grad = part.view(p.shape).clone()
        optimizer.step()
    return [p.detach() for p in params]


def check(rule: Rule) -> None:
    whole = trained(rule)
    for one, other in zip(whole, trained(rule, resume_at=7), strict=True):
        assert torch.equal(one, other), "state is kept outside of `s`, or depends on more than t"
    for one, other in zip(whole, trained(replace(rule, batched=False)), strict=True):
        torch.testing.assert_close(one, other, msg="a matrix depends on those of its batch")
    experts = trained(replace(rule, matrix_layout="per_expert"), [(3, 4, 5)])[0]
    for one, other in zip(experts, trained(rule, [(4, 5)] * 3), strict=True):
        torch.testing.assert_close(one, other, msg="an expert depends on the others")
