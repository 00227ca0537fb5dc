"""Chooses the weights that get adapters (`lather.models.lora`), and merges adapters into weights.

    attention         the projections of every block's attention
    experts           gate/up and down of the routed experts; each expert has an A and a B, and gate
                      and up share one A
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
from lather.models.decoder import Block, Decoder
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
    found = {}
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        prefix = f"layers.{layer}"
        for name, module in block.named_modules():
            if isinstance(module, Linear):
                found[f"{prefix}.{name}"] = _group(block, name)
            elif isinstance(module, Experts):
                found |= {
                    f"{prefix}.{name}.{stack}": "experts" for stack in ("gate_up_proj", "down_proj")
                }
    return found


def _group(block: Block, name: str) -> str:
    if name.startswith("self_attn."):
        return "attention"
    return "shared_experts" if isinstance(block.mlp, MoE) else "dense"


def adapted(model: Decoder, config: LoraConfig) -> list[str]:
    """Return the weights to which `config` gives an adapter. Raises ConfigError for a target that
    the model does not have."""
    if not config.rank:
        return []
    groups = adaptable(model)
    chosen: set[str] = set()
    for target in config.targets:
        if target in GROUPS:
            found = [name for name, group in groups.items() if group == target]
            if not found:
                there = ", ".join(dict.fromkeys(groups.values()))
                raise ConfigError(
                    f"lora.targets = {target!r} is not valid: the model has none; it has {there}"
                )
        else:
            found = matching(target, groups, "lora.targets", "weight that can have an adapter")
        chosen.update(found)
    return [name for name in groups if name in chosen]


def matching(pattern: str, names: Iterable[str], field: str, what: str) -> list[str]:
    """Return the names that the glob pattern matches. Raises ConfigError, with the nearest names,
    if there are none."""
    names = list(names)
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
        raise ConfigError(
            f"{field} = {pattern!r} is not valid: it matches no {what}; the nearest are "
            f"{', '.join(near)}"
        )
    return found


def add_adapters(model: Decoder, config: LoraConfig) -> None:
    """Add the adapters of `config`, filled with zeros, to the model in place; on the meta device
    they take no memory. Raises ConfigError for a target that the model does not have."""
    for name in adapted(model, config):
        owner, _, part = name.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, Experts):
            setattr(
                module,
                f"{part.removesuffix('_proj')}_lora",
                Adapter(getattr(module, part), config.rank, config.scale),
            )
        else:
            layer = getattr(module, part)
            assert isinstance(layer, Linear)
            layer.lora = Adapter(layer.weight, config.rank, config.scale)


def is_adapters(parameter: str) -> bool:
    """Tell whether this is the name of an adapter's parameter, or of an expert's entry of one."""
    return FACTOR.fullmatch(split_entry(parameter)[0]) is not None


def factor_names(parameter: str) -> tuple[str, str]:
    """Return the names of A and B for a weight's parameter, such as
    `layers.0.self_attn.q_proj.weight`, or for an expert's entry of it."""
    name, at = split_entry(parameter)
    stem = (
        f"{name.removesuffix('.weight')}.lora"
        if name.endswith(".weight")
        else f"{name.removesuffix('_proj')}_lora"
    )
    names = f"{stem}.A", f"{stem}.B"
    return (entry_name(names[0], at[0]), entry_name(names[1], at[0])) if at else names


@dataclass(frozen=True)
class MergedTensors:
    """The weights of a checkpoint with its adapters merged into them, read on demand; merging needs
    memory for one more matrix."""

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
