"""Chooses the weights that get adapters (`lather.models.lora`), and merges adapters into weights.

    attention         the projections of every block's attention
    experts           gate/up and down of the routed experts; each expert has an A and a B, and gate
                      and up share the same A
    shared_experts    gate, up and down of the shared experts
    dense             gate, up and down of dense blocks

The name of a weight is that of its parameter without `.weight`: `layers.0.self_attn.q_proj`,
`layers.0.mlp.experts.down_proj`. The parameters of its adapter are
`layers.0.self_attn.q_proj.lora.A` and `.B`, and for experts `layers.0.mlp.experts.down_lora.A` and
`.B`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

from lather.errors import ConfigError
from lather.models.block import Block
from lather.models.decoder import Decoder
from lather.models.entry_names import entry_name, split_entry
from lather.models.experts import Experts
from lather.models.layers import Linear
from lather.models.lora import Adapter, LoraConfig
from lather.models.moe import MoE
from lather.safetensors_file import Index, TensorHeader, TensorSource

GROUPS = ("attention", "experts", "shared_experts", "dense")
FACTOR = re.compile(r".*[._]lora\.[AB]")
"""Matches the names of adapters' parameters."""


def adaptable(model: Decoder) -> dict[str, str]:
    """Return the weights that can have an adapter, in order, each with its group."""
    groups: dict[str, str] = {}
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        for name, module in block.named_modules():
            path = f"layers.{layer}.{name}"
            if isinstance(module, Experts):
                groups |= dict.fromkeys((f"{path}.gate_up_proj", f"{path}.down_proj"), "experts")
            # a single row is the gate of shared experts; eh_proj is of no group
            elif (
                isinstance(module, Linear)
                and module.out_features > 1
                and not name.startswith("mtp.")
            ):
                feed_forward = "shared_experts" if isinstance(block.mlp, MoE) else "dense"
                groups[path] = "attention" if name.startswith("self_attn.") else feed_forward
    return groups


def adapted(model: Decoder, config: LoraConfig) -> list[str]:
    """Return the weights to which `config` gives an adapter. Raises ConfigError for a target that
    the model does not have."""
    if not config.rank:
        return []
    groups = adaptable(model)
    chosen: set[str] = set()
    instead = {} if model.routers() else {"experts": "dense"}
    for target in (instead.get(target, target) for target in config.targets):
        names = {name for name, group in groups.items() if group == target}
        if target not in GROUPS:
            names = set(matching(target, groups, "lora.targets", "weight that can have an adapter"))
        elif not names:
            raise ConfigError(
                f"lora.targets = {target!r} is not valid: the model has none; it has "
                f"{', '.join(dict.fromkeys(groups.values()))}"
            )
        chosen |= names
    return [name for name in groups if name in chosen]


def matching(pattern: str, names: Iterable[str], field: str, what: str) -> list[str]:
    """Return the names that the glob pattern matches. Raises ConfigError, with the nearest names,
    if there are none."""
    names = list(names)
    if matches := [name for name in names if fnmatch.fnmatchcase(name, pattern)]:
        return matches
    near = get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
    raise ConfigError(
        f"{field} = {pattern!r} is not valid: it matches no {what}; the nearest are "
        f"{', '.join(near)}"
    )


def add_adapters(model: Decoder, config: LoraConfig) -> None:
    """Add the adapters of `config`, filled with zeros, to the model in place; on the meta device
    they take no memory. Raises ConfigError for a target that the model does not have."""
    for name in adapted(model, config):
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, Experts):
            adapter = Adapter(getattr(module, part), config.rank, config.scale)
            setattr(module, f"{part.removesuffix('_proj')}_lora", adapter)
        else:
            layer = getattr(module, part)
            assert isinstance(layer, Linear)
            layer.lora = Adapter(layer.weight, config.rank, config.scale)


def is_adapters(parameter: str) -> bool:
    """Tell whether this is the name of an adapter's parameter, or of an expert's entry of it."""
    return FACTOR.fullmatch(split_entry(parameter)[0]) is not None


def factor_names(parameter: str) -> tuple[str, str]:
    """Return the names of A and B for a weight's parameter, such as
    `layers.0.self_attn.q_proj.weight`, or for an expert's entry of it."""
    name, index = split_entry(parameter)
    if name.endswith(".weight"):
        adapter = f"{name.removesuffix('.weight')}.lora"
    else:
        adapter = f"{name.removesuffix('_proj')}_lora"
    a, b = (entry_name(f"{adapter}.{factor}", *index) for factor in "AB")
    return a, b


@dataclass(frozen=True)
class MergedTensors:
    """The weights of a checkpoint with its adapters merged into them, read on demand; merging needs
    memory for another matrix."""

    stored: TensorSource
    scale: float

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return {
            name: tensor for name, tensor in self.stored.tensors.items() if not is_adapters(name)
        }

    def read(self, name: str, index: Index = ()) -> Tensor:
        weight = self.stored.read(name, index)
        a, b = factor_names(name)
        if a not in self.stored.tensors:
            return weight
        return weight.addmm_(self.stored.read(b, index), self.stored.read(a), alpha=self.scale)
