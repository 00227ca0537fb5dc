"""DeepSeek-V3 (arXiv:2412.19437) and models of the same form, such as Moonlight and Kimi-K2
(arXiv:2507.20534): the blocks of DeepSeek-V2, with sigmoid scores and a correction bias for the
choice of experts, by which loss-free balancing evens out the load.

Fields have the names and meanings of the published Hugging Face `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from lather.models.families import deepseek_v2
from lather.models.families.deepseek_v2 import DeepseekV2Config, latent_block
from lather.models.family import Family
from lather.models.rotary import Rotary
from lather.models.routing import Router
from lather.models.shared_fields import DeepseekExpertsFields, MultiTokenFields


@dataclass(frozen=True)
class DeepseekV3Config(MultiTokenFields, DeepseekV2Config):
    """Sizes and options of a DeepSeek-V3 model."""

    model_type: str = "deepseek_v3"
    """Hugging Face name of the model family."""
    topk_method: str = "noaux_tc"
    """noaux_tc: a token goes to the experts with the best scores plus bias in the `topk_group`
    groups whose two best experts have the largest sum."""
    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to a sum of 1, before they are multiplied by
    `routed_scaling_factor`."""
    rope_interleave: bool = True
    """Rotate pairs of neighboring coordinates, as published weights need it; false: pairs across
    the halves."""

    best_of_group: ClassVar[Mapping[str, int]] = {"noaux_tc": 2}

    @property
    def transformers_note(self) -> str:
        return ""

    @property
    def rotary(self) -> Rotary:
        return replace(super().rotary, interleaved=self.rope_interleave)

    def router(self) -> Router:
        return DeepseekExpertsFields.router(self)


@dataclass(frozen=True)
class KimiK2Config(DeepseekV3Config):
    """Sizes and options of a Kimi-K2 model."""

    model_type: str = "kimi_k2"
    """Hugging Face name of the model family."""


FAMILY = Family(
    DeepseekV3Config,
    latent_block,
    architecture="DeepseekV3ForCausalLM",
    defaults={
        "first_k_dense_replace": 3,
        "topk_method": "noaux_tc",
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        "aux_loss_alpha": 0.0001,
        "seq_aux": True,
        "rms_norm_eps": 1e-6,
    },
    nullable=deepseek_v2.FAMILY.nullable,
    written={**deepseek_v2.FAMILY.written, "scoring_func": "sigmoid"},
    agreeing={"num_shared_experts": lambda config: config.n_shared_experts},
    aliases=deepseek_v2.FAMILY.aliases,
    ignored=frozenset({"num_mtp_layers"}),
)
KIMI_K2 = replace(FAMILY, config=KimiK2Config)
