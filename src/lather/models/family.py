"""The parts that every model family has: a configuration with common fields and checks, and a
description of its blocks and of its published Hugging Face folders."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from lather.errors import require
from lather.models.rotary import YarnConfig

FP8 = "fp8"
"""transformers' word for weights in block-scaled FP8."""
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
"""transformers' words for attention without a window and with one."""


@dataclass(frozen=True)
class FamilyConfig:
    """The fields that every family has, with the names and meanings of the published `config.json`,
    and checks whose errors name a field as `model.<field>`."""

    model_type: str = ""
    """Hugging Face name of the model family; or module:FAMILY, which says where to find it."""
    vocab_size: int = 4096
    """Number of tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_hidden_layers: int = 6
    """Number of blocks, including dense blocks."""
    num_attention_heads: int = 6
    """Number of attention heads; of query heads, where several share a key-value head."""
    max_position_embeddings: int = 2048
    """Maximal length of a sequence, in tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """YaRN, which adapts the rotary embedding to longer sequences; left out: no YaRN."""
    rms_norm_eps: float = 1e-6
    """Constant added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """Use the embedding as the weight of the head, too."""

    balance_fields: ClassVar[Mapping[str, str]] = {
        "aux_loss_alpha": "balance_coefficient",
        "router_aux_loss_coef": "balance_coefficient",
        "seq_aux": "balance_level",
    }
    """Names of fields of the published load-balancing loss, without influence on the logits, and
    the keys of `[moe]` that say the same."""

    zero_centered_norms: ClassVar[bool] = False
    """Whether the norms of the residual stream are zero-centered (`RMSNorm`)."""

    @property
    def num_routed_experts(self) -> int:
        """Number of routed experts of an MoE block, under any of its usual names; 0: there are
        none."""
        names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
        return next((int(getattr(self, name)) for name in names if hasattr(self, name)), 0)

    @property
    def num_experts_per_tok(self) -> int:
        """Number of routed experts per token (top-k); 0: there are none."""
        return 0

    @property
    def balance_loss_coef(self) -> float:
        """Coefficient of each block's load-balancing loss, which is 1 for an even load."""
        return 0.0

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The kind of attention of each block, in transformers' words."""
        return (FULL_ATTENTION,) * self.num_hidden_layers

    @property
    def num_nextn_predict_layers(self) -> int:
        """The number of blocks of multi-token prediction, which have the indices after those of the
        main model; a field of the families that may have some."""
        return 0

    def is_dense(self, index: int) -> bool:
        """Tell whether block `index`, counted from 0, has a dense feed-forward layer, not
        experts."""
        return self.num_routed_experts == 0

    @property
    def transformers_note(self) -> str:
        """A sentence about fields that Lather obeys and transformers ignores; empty: there are
        none."""
        return ""

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.{name}", getattr(self, name), constraint)

    def _require_family_and_ranges(self, may_be_zero: Container[str]) -> None:
        """Check that the model's type is the family's or names a module, that integers are at least
        1, and that floats are finite and above 0; the fields in `may_be_zero` may be 0."""
        for each in fields(self):
            name, value = each.name, getattr(self, each.name)
            least = int(name not in may_be_zero and name != "num_nextn_predict_layers")
            if name == "model_type":
                is_family = value == each.default or ":" in value
                self._require(name, is_family, f"{each.default!r}, or module:FAMILY of your own")
            elif each.type == "float":
                above = value > 0 if least else value >= 0
                words = "greater than 0" if least else "at least 0"
                self._require(name, above and value < math.inf, f"{words} and finite")
            elif each.type in ("int", "int | None") and value is not None:
                left_out = ", or left out" if each.type != "int" else ""
                self._require(name, value >= least, f"at least {least}{left_out}")

    def _require_at_most(self, name: str, most: str) -> None:
        limit = getattr(self, most)
        constraint = f"at most {most} ({limit}): lower {name} or raise {most}"
        self._require(name, getattr(self, name) <= limit, constraint)

    def _require_divides(self, name: str, whole: str) -> None:
        multiple = getattr(self, whole)
        divides = multiple % getattr(self, name) == 0
        self._require(name, divides, f"a divisor of {whole} ({multiple})")

    def _require_rotary(self, size: str) -> None:
        self._require(size, getattr(self, size) % 2 == 0, "even: rotary embedding rotates pairs")
        constraint = "greater than 1 for YaRN, which divides by its logarithm"
        divides = isinstance(self.rope_scaling, YarnConfig)
        self._require("rope_theta", not divides or self.rope_theta > 1, constraint)


@dataclass(frozen=True)
class Family:
    """A model family. Its module has everything that is true of it alone.

    A field of its `config.json` is a field of the configuration with the same name, or is described
    here, or is one of `lather.models.hf.known_fields`. A value in `defaults`, `written` and
    `agreeing` may be a function that computes it.
    """

    config: type[Any]
    """A subclass of `FamilyConfig`, or of classes of `lather.models.shared_fields`."""
    block: Callable[[Any, int], Any]
    """Builds the `Block` with this index, counted from 0, of a configuration."""
    architecture: str
    """Name of the model's class in transformers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the configuration that may be left out or null, and their values in that case,
    which are transformers'; a function gets the fields that were read."""
    nullable: frozenset[str] = frozenset()
    """Fields of the configuration that must be present and may be null."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that are written, and their values, with which a field that is read must agree;
    a function gets the configuration."""
    agreeing: Mapping[str, Any] = field(default_factory=dict)
    """The same for fields that are not written."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, and the names that they stand for."""
    ignored: frozenset[str] = frozenset()
    """Fields without influence on training."""
    quantization: str = FP8
    """The `quant_method` of quantized weights that can be read."""
    rope_scaling_required: bool = False
    """True if transformers has another default for `rope_scaling` than none."""
    text_field: str = ""
    """The field of `config.json` that holds those of the text model, whose other fields are of
    images or common; empty: there is none."""
    other_architectures: tuple[str, ...] = ()
    """Other classes of transformers whose folders hold this model, among other parts."""
    prefix: str = "model."
    """Beginning of all published names but the head's."""
    left_out: str = ""
    """A regular expression of the names of tensors that a folder may hold besides, which are left
    out with a note; empty: there are none."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the names of Lather's parameters and buffers, and the published text in their place;
    each is replaced in the result of those before it."""
    in_memory: Mapping[str, str] = field(default_factory=dict)
    """The same for the names that transformers has in memory, where they are not Lather's."""
    unsqueezed: Mapping[str, int] = field(default_factory=dict)
    """Ends of the names of Lather's parameters and buffers that are published with another dim of
    size 1, and the number of this dim."""
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Published names of an expert's gate, up and down."""
    stacks_experts: bool = False
    """True: the experts are published as stacks like Lather's; each by itself can be read, too."""
    transposes_experts: bool = False
    """False: each expert's matrices are published by themselves. True: they are stacked and
    transposed, or stacked and packed in MXFP4."""

    @property
    def model_type(self) -> str:
        """Hugging Face name of the family."""
        return str(self.config.model_type)
