"""Makes our models' twins in Hugging Face transformers, with the same weights, and returns the
results of both by our names.

Results are not compared in fp64, because transformers computes norms, rotation and router scores in
fp32 whatever the weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lather.models.decoder import Decoder
from lather.models.families import ModelConfig, family_of
from lather.models.hf.config_json import config_to_hugging_face
from models.tiny import (
    FAMILY_SIZES,
    FAMILY_TABLES,
    gradients,
    next_token_loss,
)

TOLERANCE = 1e-5
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = (
    torch.randperm(3 * 21, generator=torch.Generator().manual_seed(0))
    % FAMILY_SIZES["gpt_oss"]["vocab_size"]
).view(3, 21)
"""Tokens among which every token of the vocabulary occurs."""


def twin(ours: Decoder, config: ModelConfig) -> nn.Module:
    """Make transformers' model with our weights, and with eager attention and experts."""
    architecture, twin_config = _twin_config(config)
    model: nn.Module = architecture(twin_config)
    named = ((published_name(name, config), weight) for name, weight in ours.state_dict().items())
    missing, unexpected = model.load_state_dict(
        {name: _lay(weight, name, config) for name, weight in named}, strict=False
    )
    assert unexpected == []
    assert all(_is_empty(name, model) for name in missing)
    return model


def _twin_config(config: ModelConfig) -> tuple[Any, Any]:
    """Return transformers' class of the model and its configuration, which may be those of a family
    of another name. There is no pad token, whose embedding would get no gradient."""
    fields = config_to_hugging_face(config)
    architecture = getattr(transformers, fields.pop("architectures")[0])
    fields = fields.get("text_config", fields)
    fields.pop("model_type")
    return architecture, architecture.config_class(**fields, pad_token_id=None, **EAGER)


def read_back(folder: Path, config: ModelConfig) -> nn.Module:
    """Read a folder with transformers; nothing may be missing from it or left over."""
    loader, options = transformers.AutoModelForCausalLM, dict(EAGER)
    if config.model_type not in transformers.CONFIG_MAPPING:
        loader, options["config"] = _twin_config(config)
    model, info = loader.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert all(_is_empty(name, model) for name in info["missing_keys"])
    return model  # type: ignore[no-any-return]


def _is_empty(name: str, model: nn.Module) -> bool:
    """Tell whether this is a weight of shared experts that are not there."""
    return "shared_experts" in name and not model.get_parameter(name).numel()


def published_name(name: str, config: ModelConfig) -> str:
    """Return transformers' name of one of our parameters."""
    for ours, theirs in FAMILY_TABLES[config.model_type].names.items():
        name = name.replace(ours, theirs)
    return name if name.startswith("lm_head") else f"model.{name}"


def _lay(weight: Tensor, theirs: str, config: ModelConfig) -> Tensor:
    """Transpose the weights that transformers multiplies from the other side, and give those that
    are published with another dim this dim."""
    for end, dim in family_of(config).unsqueezed.items():
        if theirs.endswith(end):
            weight = weight.unsqueeze(dim)
    ends = FAMILY_TABLES[config.model_type].turned
    return weight.transpose(-1, -2) if ends and theirs.endswith(ends) else weight


def results_of_twin(model: nn.Module, ours: Decoder, config: ModelConfig) -> dict[str, Tensor]:
    """Return the twin's logits, loss and every gradient, by our names."""
    output = model(TOKENS, labels=TOKENS)
    output.loss.backward()
    theirs = gradients(model)
    names = {name: published_name(name, config) for name, _ in ours.named_parameters()}
    assert {name for name, grad in theirs.items() if grad.numel()} == set(names.values())
    grads = {name: _lay(theirs[published], published, config) for name, published in names.items()}
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), **grads}


def actual_results(model: Decoder) -> dict[str, Tensor]:
    logits_BSV = model(TOKENS).logits_BSV
    assert logits_BSV is not None
    loss = next_token_loss(logits_BSV, TOKENS)
    loss.backward()
    return {"logits": logits_BSV.detach(), "loss": loss.detach(), **gradients(model)}


def greedy(model: nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    """Continue the prompt with transformers' own generation, without a cache: that of transformers
    is wrong for a window of 1."""
    tokens_BS = torch.tensor([prompt])
    whole: Tensor = model.generate(  # type: ignore[operator]
        tokens_BS,
        attention_mask=torch.ones_like(tokens_BS),
        do_sample=False,
        use_cache=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()
