"""The model families, a file each. `Family` describes the content of a file, docs/your-model.md how
to add a family."""

from __future__ import annotations

import types
from collections.abc import Mapping
from contextlib import nullcontext

import torch

from lather.models.decoder import Decoder
from lather.models.families import deepseek_v2, gpt_oss, qwen3_moe
from lather.models.families.deepseek_v2 import DeepseekV2Config as DeepseekV2Config
from lather.models.family import Family

ModelConfig = deepseek_v2.DeepseekV2Config | qwen3_moe.Qwen3MoeConfig | gpt_oss.GptOssConfig
"""The configuration of any family."""
_FAMILIES = (deepseek_v2.FAMILY, qwen3_moe.FAMILY, gpt_oss.FAMILY)
FAMILIES: Mapping[str, Family] = types.MappingProxyType(
    {family.model_type: family for family in _FAMILIES}
)


def build_model(
    config: ModelConfig,
    generator: torch.Generator | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """Build the model on `device`. Its weights are drawn on CPU from `generator` (None: torch's
    default), so that they are the same on every device.

    On the meta device no weights are drawn and no memory is used; this gives the sizes, or a model
    whose weights are loaded later.
    """
    is_meta = device is not None and device.type == "meta"
    block = FAMILIES[config.model_type].block
    with torch.device("meta") if is_meta else nullcontext():
        blocks = [block(config, index) for index in range(config.num_hidden_layers)]
        decoder = Decoder(blocks, config)
    if is_meta:
        return decoder
    with torch.no_grad():
        for name, value in decoder.fresh_weights(config.initializer_range, generator):
            decoder.get_parameter(name).copy_(value)
    return decoder.to(device)
