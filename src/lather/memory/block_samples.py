"""A big decoder cut down to two blocks of each kind, so that what a forward pass keeps can be measured on a small machine.

Blocks are of one kind if they have the same modules, settings, and shapes of parameters; what they keep for backward is then the same, too.
There are two of a kind because the second shows what a further one adds: some tensors (rotary tables) are shared by all blocks. The two
share their parameters. The model is built without memory, on the meta device, and only what stays is given some.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lather.memory.profile import SavedTensors, expand

NOT_SETTINGS = {*vars(nn.Module()), "training"}
"""Attributes that every module has."""


@dataclass(frozen=True)
class SampledBlocks:
    """The blocks that were left of a decoder, by their index in the whole one."""

    kept: tuple[int, ...]
    """The blocks that are left, in order."""
    stands_for: Mapping[int, tuple[int, ...]]
    """A second block of its kind -> the blocks left out that are like it."""
    first_of: Mapping[int, int]
    """A second block of its kind -> the first."""

    @property
    def num_blocks(self) -> int:
        return len(self.kept) + sum(map(len, self.stands_for.values()))

    def restore(self, profile: SavedTensors) -> SavedTensors:
        """The tensors that the whole decoder keeps, from a profile of what was left."""
        name = "layers.{}".format
        renamed = profile.renamed({name(index): name(block) for index, block in enumerate(self.kept)})
        kinds = {name(first): (name(second), [name(b) for b in self.stands_for[second]]) for second, first in self.first_of.items()}
        return expand(renamed, kinds)


def block_kinds(layers: nn.ModuleList) -> list[list[int]]:
    """Indices of the blocks, grouped by kind, in order."""
    kinds: dict[Hashable, list[int]] = {}
    for index, block in enumerate(layers):
        kinds.setdefault(_signature(block), []).append(index)
    return list(kinds.values())


def _signature(block: nn.Module) -> Hashable:
    return tuple(
        (
            path,
            type(module).__qualname__,
            tuple((name, _setting(value)) for name, value in vars(module).items() if name not in NOT_SETTINGS),
            tuple((name, _setting(t)) for name, t in _own_tensors(module)),
        )
        for path, module in block.named_modules()
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of the module itself, by name; one that has two names, under both."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _setting(value: Any) -> Hashable:
    """A plain value, or the contents of an object, in a form that does not depend on its address."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((str(key), _setting(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(_setting, value))
    text = object.__repr__(value)
    return (type(value).__qualname__, _setting(getattr(value, "__dict__", {}))) if repr(value) == text else repr(value)


def keep_two_of_each(decoder: nn.Module) -> SampledBlocks:
    """Cut `decoder.layers` down to the first two blocks of each kind, in place; the second has the first one's parameters."""
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    kinds = block_kinds(layers)
    kept = sorted(index for kind in kinds for index in kind[:2])
    twins = {kind[1]: kind[0] for kind in kinds if len(kind) > 1}
    for second, first in twins.items():
        layers[second] = copy.deepcopy(layers[first], memo={id(p): p for p in layers[first].parameters()})
    decoder.layers = nn.ModuleList(layers[index] for index in kept)
    return SampledBlocks(tuple(kept), {kind[1]: tuple(kind[2:]) for kind in kinds if len(kind) > 1}, twins)


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Give the parameters and buffers of a model on the meta device memory, in place; tied ones stay tied.

    Vectors and matrices get small random numbers, so that a router has a choice to make. Stacks of experts are zero, which costs no time
    and, until they are written to, no memory. Buffers are zero: what a model computes for itself when it is built is not known here.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, meta in _own_tensors(module):
            if not meta.is_meta:
                continue
            if id(meta) not in made:
                real = torch.zeros(meta.shape, dtype=meta.dtype)
                is_parameter = isinstance(meta, nn.Parameter)
                if is_parameter and meta.dim() < 3:
                    real.uniform_(-0.02, 0.02, generator=generator)
                made[id(meta)] = nn.Parameter(real.to(device), requires_grad=meta.requires_grad) if is_parameter else real.to(device)
            setattr(module, name, made[id(meta)])
