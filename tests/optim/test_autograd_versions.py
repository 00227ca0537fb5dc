"""A step tells autograd that it has changed the weights, as torch's optimizers do: a graph from
before the step raises in its backward pass, and does not give gradients of other weights."""

import pytest
import torch
from optim_helpers import KINDS, give_gradients, make, parameters
from torch import nn

from lather.optim import AdamW

SHAPES = [(4, 6), (3, 4, 5), (16,), (5,), ()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_from_before_the_step_raises(kind: str) -> None:
    params = parameters(SHAPES)
    optimizer = make(kind, params)
    for step in range(3):
        give_gradients(params, step)
        losses = [(p * p).sum() for p in params]
        versions = [p._version for p in params]
        optimizer.step()
        assert all(p._version > version for p, version in zip(params, versions, strict=True))
        for loss, p in zip(losses, params, strict=True):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(loss, p)


def test_a_parameter_without_gradient_keeps_its_graph() -> None:
    p, q = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
    optimizer = AdamW([p, q])
    q.grad = torch.ones(16)
    loss = (p * p).sum()
    optimizer.step()
    (gradient,) = torch.autograd.grad(loss, p)
    torch.testing.assert_close(gradient, 2 * torch.ones(16))


def test_a_backward_pass_after_the_step_has_the_gradient_of_the_new_weights() -> None:
    p = nn.Parameter(torch.ones(16))
    optimizer = AdamW([p], lr=0.01, weight_decay=0.0)
    (p * p).sum().backward()
    optimizer.step()
    (gradient,) = torch.autograd.grad((p * p).sum(), p)
    torch.testing.assert_close(gradient, torch.full((16,), 2 * 0.99))
