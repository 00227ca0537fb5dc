"""The optimizers against the plain PyTorch programs of lather.optim.reference, in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lather import optim
from lather.optim import reference

STEPS, WARMUP = 24, 6
SHAPES = [(6, 6), (5, 8), (8, 5), (3, 4, 6)]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SOAP": [
        {"precondition_frequency": f, "adam_warmup_steps": WARMUP, "shampoo_beta": 0.9, **more}
        for f in (1, 3, 10)
        for more in ({}, {"weight_decay": 0.3}, {"betas": (0.8, 0.99), "eps": 1e-3})
    ],
    "Muon": [{}, {"weight_decay": 0.3}, {"momentum": 0.8, "nesterov": False}, {"steps": 3}],
    "AdamW": [{}, {"weight_decay": 0.3}, {"betas": (0.8, 0.99), "eps": 1e-3}],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def moved(name: str, start: Tensor, grads: Tensor, **options: Any) -> Tensor:
    """Return the movement of a parameter under the optimizer of this name; a parameter of three
    dims holds experts."""
    p = torch.nn.Parameter(start.clone())
    layout = "per_expert" if p.dim() == 3 else "tensor"
    optimizer = getattr(optim, name)([p], lr=1e-2, matrix_layout=layout, **options)
    for g in grads:
        p.grad = g
        optimizer.step()
    return p.detach() - start


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_parameter_moves_as_in_the_plain_program(
    name: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    start, grads = drawn(*shape), drawn(STEPS, *shape)
    run = getattr(reference, name.lower())
    matrices = start if start.dim() == 3 else start[None]
    histories = grads.reshape(STEPS, *matrices.shape).unbind(1)
    expected = torch.stack(
        [run(w, list(g), lr=1e-2, **options) - w for w, g in zip(matrices, histories, strict=True)]
    ).reshape(shape)
    torch.testing.assert_close(moved(name, start, grads, **options), expected, rtol=1e-9, atol=1e-9)

    wrong = moved(name, start, grads, **options | {"weight_decay": 0.5})
    assert not torch.allclose(wrong, expected, rtol=1e-5, atol=1e-5)
