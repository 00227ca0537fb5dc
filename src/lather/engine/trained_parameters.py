"""Selects the parameters of a model that are trained, by the patterns of `[train]` and by
`[lora]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lather.config.config import Config
from lather.errors import ConfigError, as_toml, require
from lather.models.adapted import add_adapters, is_adapters, matching
from lather.models.decoder import Decoder
from lather.models.experts import Experts
from lather.models.families import build_model
from lather.models.lora import LoraConfig, fresh_adapters


@dataclass(frozen=True)
class Trained:
    """The trained parameters of a model."""

    names: frozenset[str]
    num_trained: int
    """Number of trained scalars."""
    num_parameters: int
    """Number of scalars in all parameters of the model, adapters included."""

    def describe(self) -> str:
        share = 100 * self.num_trained / self.num_parameters
        return (
            f"{self.num_trained:,} of {self.num_parameters:,} parameters are "
            f"trained ({share:.3g} %), {len(self.names)} tensors"
        )


def trained_parameters(config: Config) -> Trained:
    """Return the parameters that `[train] trainable` and `frozen` and `[lora]` select; nothing is
    allocated.

    With adapters, only the adapters and the parameters that `trainable` names are trained. Raises
    ConfigError for a pattern or a target that matches nothing, and if no parameter is selected.
    """
    parameters = dict(outline(config).named_parameters())
    train, has_adapters = config.train, config.lora.rank > 0
    trained = {
        name for name in parameters if is_adapters(name) or not (has_adapters or train.trainable)
    }
    for pattern in train.trainable:
        trained.update(matching(pattern, parameters, "train.trainable", "parameter"))
    for pattern in train.frozen:
        trained.difference_update(matching(pattern, parameters, "train.frozen", "parameter"))
    if not trained:
        patterns = as_toml(train.frozen)
        raise ConfigError(
            f"train.frozen = {patterns} is not valid: it leaves nothing to train; give fewer "
            "patterns"
        )
    sizes = {name: p.numel() for name, p in parameters.items()}
    return Trained(frozenset(trained), sum(sizes[name] for name in trained), sum(sizes.values()))


def active_parameters(config: Config) -> int:
    """Return the number of scalars in the parameters that a token meets: of each layer's experts
    only as many as it chooses."""
    model, chosen = outline(config), config.model.num_experts_per_tok
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if isinstance(module, Experts):
            experts = len(module.down_proj)
            total -= (
                sum(p.numel() for p in module.parameters())
                // experts
                * (experts - min(chosen, experts))
            )
    return total


def check_finetuning(config: Config) -> None:
    """Raise ConfigError for a pattern that matches nothing, if nothing is trained, and for adapters
    of random weights."""
    trained_parameters(config)
    fits = not config.lora.rank or bool(config.init_from)
    require(
        fits,
        "lora.rank",
        config.lora.rank,
        "0 without init_from: adapters are added to trained weights",
    )


def check_adapters_are_all(config: Config) -> None:
    """Raise ConfigError unless the run has adapters and trains nothing else."""
    if not config.lora.rank:
        raise ConfigError(
            "--adapter needs a run with adapters, and this one has lora.rank = 0: export the "
            "model, without --adapter"
        )
    if config.moe.bias_update_rate:
        raise ConfigError(
            "--adapter leaves out the balancing biases that moe.bias_update_rate = "
            f"{config.moe.bias_update_rate} has changed, and without "
            "them tokens go to other experts: train adapters with 0"
        )
    if others := sorted(name for name in trained_parameters(config).names if not is_adapters(name)):
        raise ConfigError(
            "--adapter leaves out parameters that train.trainable has trained besides the "
            f"adapters, such as {others[0]!r}: "
            "export the merged model, without --adapter"
        )


def outline(config: Config) -> Decoder:
    """Return the whole model with its adapters on the meta device."""
    model = build_model(config.model, None, torch.device("meta"))
    add_adapters(model, config.lora)
    return model


def train_only(model: nn.Module, names: frozenset[str]) -> None:
    """Freeze all parameters of a model, or of a part of it, except these."""
    for name, p in model.named_parameters():
        p.requires_grad_(name in names)


@torch.no_grad()
def with_adapters(model: Decoder, config: LoraConfig, generator: torch.Generator) -> Decoder:
    """Add new adapters to the model and return it; on the meta device nothing is drawn."""
    add_adapters(model, config)
    if not model.embed_tokens.weight.is_meta:
        for name, value in fresh_adapters(model, generator):
            model.get_parameter(name).copy_(value)
    return model
