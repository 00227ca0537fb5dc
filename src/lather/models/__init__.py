"""Mixture-of-experts language models: shared layers, and one file per model family.

This package exports the names that scripts usually need; the modules have the rest.
"""

from lather.models.decoder import Decoder as Decoder
from lather.models.decoder import DecoderOutput as DecoderOutput
from lather.models.experts import Experts as Experts
from lather.models.families import FAMILIES as FAMILIES
from lather.models.families import ModelConfig as ModelConfig
from lather.models.families import build_model as build_model
from lather.models.generate import Continuations as Continuations
from lather.models.generate import Sampling as Sampling
from lather.models.generate import generate as generate
from lather.models.hf.config_json import config_from_hugging_face as config_from_hugging_face
from lather.models.hf.config_json import config_to_hugging_face as config_to_hugging_face
from lather.models.hf.model_export import save_hugging_face as save_hugging_face
from lather.models.hf.model_folder import load_hugging_face as load_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face as model_from_hugging_face
from lather.models.moe import MoE as MoE
from lather.models.routing import Router as Router
from lather.models.token_positions import KeyValueCache as KeyValueCache
