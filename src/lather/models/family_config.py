"""The fields that the configurations of all families share, and checks of fields."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, fields

from lather.errors import require
from lather.models.rotary import YarnConfig

FULL_ATTENTION = "full_attention"
"""transformers' word for attention without a window."""


@dataclass(frozen=True)
class FamilyConfig:
    """The fields that every family has, with the names and meanings of the published `config.json`,
    and checks whose errors name a field as `model.<field>`."""

    model_type: str = ""
    """Hugging Face name of the model family."""
    vocab_size: int = 4096
    """Number of tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    num_hidden_layers: int = 6
    """Number of blocks, including dense blocks."""
    num_attention_heads: int = 6
    """Number of attention heads; of query heads, where several share a key-value head."""
    num_experts_per_tok: int = 2
    """Number of routed experts per token (top-k)."""
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

    @property
    def attention_types(self) -> tuple[str, ...]:
        """The kind of attention of each block, in transformers' words."""
        return (FULL_ATTENTION,) * self.num_hidden_layers

    def is_dense(self, index: int) -> bool:
        """Tell whether block `index`, counted from 0, has a dense feed-forward layer, not
        experts."""
        return False

    @property
    def transformers_note(self) -> str:
        """A sentence about fields that Lather obeys and transformers ignores; empty: there are
        none."""
        return ""

    def _coefficient_of_a_block(self, router_aux_loss_coef: float) -> float:
        """Return the coefficient of a block's balance loss, which is 1 for an even load, from that
        of transformers' loss: the mean over blocks, which is `num_experts_per_tok`."""
        num_moe = sum(not self.is_dense(index) for index in range(self.num_hidden_layers))
        return router_aux_loss_coef * self.num_experts_per_tok / max(1, num_moe)

    def _require(self, name: str, holds: bool, constraint: str) -> None:
        require(holds, f"model.{name}", getattr(self, name), constraint)

    def _require_family_and_ranges(self, may_be_zero: Container[str]) -> None:
        """Check that the model's type is the family's, that integers are at least 1, and that
        floats are finite and above 0; the fields in `may_be_zero` may be 0."""
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            least = int(name not in may_be_zero)
            if name == "model_type":
                self._require(name, value == field.default, repr(field.default))
            elif field.type == "float":
                above = value > 0 if least else value >= 0
                words = "greater than 0" if least else "at least 0"
                self._require(name, above and value < math.inf, f"{words} and finite")
            elif field.type in ("int", "int | None") and value is not None:
                left_out = ", or left out" if field.type != "int" else ""
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
        self._require("rope_theta", self.rope_scaling is None or self.rope_theta > 1, constraint)
