"""Makes modules whose saved tensors are known, and their profiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lather.memory.profile import SavedStorage, SavedTensors, profile_saved_tensors

F32 = 4


class Act(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y


def square(x: Tensor) -> Tensor:
    return x * x


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def profile_of(model: nn.Module, *inputs: Tensor) -> SavedTensors:
    return profile_saved_tensors(model, lambda: model(*inputs).sum(), num_tokens=7)


def only(profile: SavedTensors, kind: str = "activation") -> SavedStorage:
    (one,) = (one for one in profile.storages if one.kind == kind)
    return one


@dataclass
class Plan:
    """Tensors that a custom function keeps in an attribute."""

    index: Tensor
    nested: dict[str, list[Tensor]]
