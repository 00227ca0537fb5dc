"""Reduces a large decoder to two blocks of each kind, so that the activations of a forward pass can
be measured on a small machine.

Blocks are of one kind if they have the same modules, settings and parameter shapes; they then keep
the same bytes for backward. Two blocks of each kind are kept because the second shows what a
further block adds: some tensors (rotary tables) are shared by all blocks. The two share their
parameters. The model is built on the meta device, and only the remaining blocks get memory.
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
    """The blocks of a decoder that was reduced, by their index in the whole one."""

    kinds: list[list[int]]
    """The indices grouped by kind. The first two of a kind remain; the second stands for the
    removed ones."""

    @property
    def kept(self) -> tuple[int, ...]:
        """The remaining blocks, in order."""
        return tuple(sorted(index for kind in self.kinds for index in kind[:2]))

    def restore(self, profile: SavedTensors) -> SavedTensors:
        """Return the saved tensors of the whole decoder, from a profile of the reduced one."""
        name = "layers.{}".format
        names = {name(index): name(block) for index, block in enumerate(self.kept)}
        renamed = SavedTensors(
            tuple(one.renamed(names) for one in profile.storages), profile.num_tokens
        )
        return expand(renamed, [list(map(name, kind)) for kind in self.kinds if len(kind) > 1])


def block_kinds(layers: nn.ModuleList) -> list[list[int]]:
    """Return the indices of the blocks, grouped by kind, in order."""
    kinds: dict[Hashable, list[int]] = {}
    for index, block in enumerate(layers):
        kinds.setdefault(_signature(block), []).append(index)
    return list(kinds.values())


def _signature(block: nn.Module) -> Hashable:
    return tuple(
        (
            path,
            type(module).__qualname__,
            tuple(
                (name, _setting(value))
                for name, value in vars(module).items()
                if name not in NOT_SETTINGS
            ),
            tuple((name, _setting(t)) for name, t in _own_tensors(module)),
        )
        for path, module in block.named_modules()
    )


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of the module itself, by name; a tensor with two names
    appears twice."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _setting(value: Any) -> Hashable:
    """Return a hashable form of a value, or of an object's contents, that does not depend on memory
    addresses."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        return tuple((str(key), _setting(item)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return tuple(map(_setting, value))
    text = object.__repr__(value)
    return (
        (type(value).__qualname__, _setting(getattr(value, "__dict__", {})))
        if repr(value) == text
        else repr(value)
    )


def keep_two_of_each(decoder: nn.Module) -> SampledBlocks:
    """Keep only the first two blocks of each kind in `decoder.layers`; the second gets the first
    one's parameters."""
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    blocks = SampledBlocks(block_kinds(layers))
    for first, second in (kind[:2] for kind in blocks.kinds if len(kind) > 1):
        layers[second] = copy.deepcopy(
            layers[first], memo={id(p): p for p in layers[first].parameters()}
        )
    decoder.layers = nn.ModuleList(layers[index] for index in blocks.kept)
    return blocks


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, generator: torch.Generator) -> None:
    """Allocate the parameters and buffers of a model on the meta device, in place; tied ones stay
    tied.

    Vectors and matrices get small random numbers, so that a router has a choice to make. Stacks of
    experts are zero, which takes no time and, until they are written to, no memory. Buffers are
    zero, since the values that a model computes when it is built are not known here."""
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
                made[id(meta)] = (
                    nn.Parameter(real.to(device), requires_grad=meta.requires_grad)
                    if is_parameter
                    else real.to(device)
                )
            setattr(module, name, made[id(meta)])
