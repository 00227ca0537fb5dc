"""Parameters, gradients and comparisons that the tests of SOAP share."""

import torch
from torch import Tensor


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def snapshot(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter]) -> list[Tensor]:
    state = [value.clone() for p in params for value in optimizer.state.get(p, {}).values()]
    return [p.detach().clone() for p in params] + state
