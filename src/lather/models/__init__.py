"""Mixture-of-experts language models: shared layers, and one file per model family.

This package exports the names that scripts usually need; the modules have the rest.
"""

from lather.models.decoder import Decoder, DecoderOutput
from lather.models.experts import Experts
from lather.models.families import FAMILIES, ModelConfig, build_model
from lather.models.generate import Continuations, Sampling, generate
from lather.models.hf.config_json import config_from_hugging_face, config_to_hugging_face
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import load_hugging_face, model_from_hugging_face
from lather.models.key_value_cache import KeyValueCache
from lather.models.moe import MoE
from lather.models.routing import Router

__all__ = [
    "FAMILIES",
    "Continuations",
    "Decoder",
    "DecoderOutput",
    "Experts",
    "KeyValueCache",
    "MoE",
    "ModelConfig",
    "Router",
    "Sampling",
    "build_model",
    "config_from_hugging_face",
    "config_to_hugging_face",
    "generate",
    "load_hugging_face",
    "model_from_hugging_face",
    "save_hugging_face",
]
