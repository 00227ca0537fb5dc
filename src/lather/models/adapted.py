"""The choice of weights that get adapters (`lather.models.lora`), and the merging of adapters into them.

    attention         the projections of every block's attention
    experts           gate/up and down of the routed experts, one A and B for each expert, for gate and up one A together
    shared_experts    gate, up and down of the shared experts
    dense             gate, up and down of dense blocks

A weight is called as its parameter is, without `.weight`: `layers.0.self_attn.q_proj`, `layers.0.mlp.experts.down_proj`. Its adapter's
parameters are `layers.0.self_attn.q_proj.lora.A` and `.B`, of experts `layers.0.mlp.experts.down_lora.A` and `.B`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch import Tensor

from lather.errors import ConfigError
from lather.models.decoder import Block, Decoder
from lather.models.entry_names import entry_name, split_entry
from lather.models.experts import Experts
from lather.models.hf.safetensors_folder import DescribedTensor, Index, TensorSource
from lather.models.layers import Linear
from lather.models.lora import Adapter, LoraConfig
from lather.models.moe import MoE

GROUPS = ("attention", "experts", "shared_experts", "dense")
FACTOR = re.compile(r".*[._]lora\.[AB]")
"""The name of a parameter of an adapter."""


def adaptable(model: Decoder) -> dict[str, str]:
    """The weights that can have an adapter, in order, each with its group."""
    found = {}
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        prefix = f"layers.{layer}"
        for name, module in block.named_modules():
            if isinstance(module, Linear):
                found[f"{prefix}.{name}"] = _group(block, name)
            elif isinstance(module, Experts):
                found |= {f"{prefix}.{name}.{stack}": "experts" for stack in ("gate_up_proj", "down_proj")}
    return found


def _group(block: Block, name: str) -> str:
    if name.startswith("self_attn."):
        return "attention"
    return "shared_experts" if isinstance(block.mlp, MoE) else "dense"


def adapted(model: Decoder, config: LoraConfig) -> list[str]:
    """The weights that `config` gives an adapter. Raises ConfigError for a target that the model does not have."""
    if not config.rank:
        return []
    groups = adaptable(model)
    chosen: set[str] = set()
    for target in config.targets:
        if target in GROUPS:
            found = [name for name, group in groups.items() if group == target]
            if not found:
                there = ", ".join(dict.fromkeys(groups.values()))
                raise ConfigError(f"lora.targets = {target!r} is not valid: the model has none; it has {there}")
        else:
            found = matching(target, groups, "lora.targets", "weight that can have an adapter")
        chosen.update(found)
    return [name for name in groups if name in chosen]


def matching(pattern: str, names: Iterable[str], field: str, what: str) -> list[str]:
    """The names that the glob pattern matches. Raises ConfigError, with the nearest ones, if there are none."""
    names = list(names)
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
        raise ConfigError(f"{field} = {pattern!r} is not valid: it matches no {what}; the nearest are {', '.join(near)}")
    return found


def add_adapters(model: Decoder, config: LoraConfig) -> None:
    """Give the model the adapters of `config`, all zero, in place; on the meta device they take no memory. Raises ConfigError for a target
    that the model does not have."""
    for name in adapted(model, config):
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, Experts):
            setattr(module, f"{part.removesuffix('_proj')}_lora", Adapter(getattr(module, part), config.rank, config.scale))
        else:
            layer = getattr(module, part)
            assert isinstance(layer, Linear)
            layer.lora = Adapter(layer.weight, config.rank, config.scale)


def is_adapters(parameter: str) -> bool:
    """Whether the parameter, or an expert's entry of it, is an adapter's."""
    return FACTOR.fullmatch(split_entry(parameter)[0]) is not None


def factor_names(parameter: str) -> tuple[str, str]:
    """The names of A and B for a weight's parameter, `layers.0.self_attn.q_proj.weight`, or an expert's entry of it."""
    name, expert = split_entry(parameter)
    stem = f"{name.removesuffix('.weight')}.lora" if name.endswith(".weight") else f"{name.removesuffix('_proj')}_lora"
    names = f"{stem}.A", f"{stem}.B"
    return names if expert is None else (entry_name(names[0], expert), entry_name(names[1], expert))


@dataclass(frozen=True)
class MergedTensors:
    """The weights of a checkpoint with its adapters merged into them, read on demand; a matrix more is in memory meanwhile."""

    stored: TensorSource
    scale: float

    @property
    def tensors(self) -> Mapping[str, DescribedTensor]:
        return {name: tensor for name, tensor in self.stored.tensors.items() if not is_adapters(name)}

    def read(self, name: str, index: Index = ()) -> Tensor:
        weight = self.stored.read(name, index)
        a, b = factor_names(name)
        if a not in self.stored.tensors:
            return weight
        return weight.addmm_(self.stored.read(b, index), self.stored.read(a), alpha=self.scale)
