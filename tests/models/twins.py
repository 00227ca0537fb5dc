"""Makes our models' twins in Hugging Face transformers, with the same weights, and returns the
results of both by our names.

Results are not compared in fp64, because transformers computes norms, rotation and router scores in
fp32 whatever the weights are."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lather.models.decoder import Decoder
from lather.models.families import ModelConfig
from lather.models.hf.config_json import config_to_hugging_face
from models.tiny import (
    FAMILY_SIZES,
    gradients,
    next_token_loss,
    tiny_family_config,
    tiny_family_model,
)

TOLERANCE = 1e-5
TOKENS = (
    torch.randperm(3 * 21, generator=torch.Generator().manual_seed(0))
    % FAMILY_SIZES["gpt_oss"]["vocab_size"]
).view(3, 21)
"""Tokens among which every token of the vocabulary occurs."""


def twin(ours: Decoder, config: ModelConfig) -> nn.Module:
    """Make transformers' model with our weights, and with eager attention and experts."""
    fields = config_to_hugging_face(config)
    architecture = getattr(transformers, fields.pop("architectures")[0])
    fields.pop("model_type")
    twin_config = architecture.config_class(
        **fields, attn_implementation="eager", experts_implementation="eager"
    )
    model: nn.Module = architecture(twin_config)
    named = ((published_name(name, config), weight) for name, weight in ours.state_dict().items())
    missing, unexpected = model.load_state_dict(
        {name: _lay(weight, name, config) for name, weight in named}, strict=False
    )
    assert unexpected == []
    assert all(
        "shared_experts" in name and not model.get_parameter(name).numel() for name in missing
    )
    return model


def published_name(name: str, config: ModelConfig) -> str:
    if config.model_type == "gpt_oss":
        name = name.replace("mlp.gate.", "mlp.router.")
        name = name.replace("gate_up_bias", "gate_up_proj_bias").replace(
            "down_bias", "down_proj_bias"
        )
    return name if name.startswith("lm_head") else f"model.{name}"


def _lay(weight: Tensor, theirs: str, config: ModelConfig) -> Tensor:
    """Transpose the weights of GPT-OSS's experts, which multiply from the other side."""
    turned = config.model_type == "gpt_oss" and theirs.endswith(("gate_up_proj", "down_proj"))
    return weight.transpose(1, 2) if turned else weight


def expected_results(model_type: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return logits, loss and every gradient of the twin."""
    config, ours = (
        tiny_family_config(model_type, **changes),
        tiny_family_model(model_type, **changes),
    )
    model = twin(ours, config)
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
    """Continue the prompt with transformers' own generation."""
    tokens_BS = torch.tensor([prompt])
    whole: Tensor = model.generate(  # type: ignore[operator]
        tokens_BS,
        attention_mask=torch.ones_like(tokens_BS),
        do_sample=False,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()
