"""Fields that the configurations of several families share, with the names and meanings of the
published `config.json`: routed experts, transformers' balance loss, grouped queries."""

from __future__ import annotations

from dataclasses import dataclass

from lather.models.attention import HeadSizes
from lather.models.family import FamilyConfig
from lather.models.rotary import Rotary


@dataclass(frozen=True)
class RoutedFields(FamilyConfig):
    """Fields of models with routed experts, whose number has a name of each family's own (see
    `FamilyConfig.num_routed_experts`)."""

    num_experts_per_tok: int = 2
    """Number of routed experts per token (top-k)."""


@dataclass(frozen=True)
class RouterLossFields(RoutedFields):
    """Fields of models with routed experts that transformers trains with its balance loss."""

    router_aux_loss_coef: float = 0.03
    """Coefficient of the published load-balancing loss, a mean over blocks that is
    `num_experts_per_tok` for an even load; 0: no such loss. Published models, which are large, have
    0.001 or less; small models collapse with it."""

    @property
    def balance_loss_coef(self) -> float:
        num_moe = sum(not self.is_dense(index) for index in range(self.num_hidden_layers))
        return self.router_aux_loss_coef * self.num_experts_per_tok / max(1, num_moe)


@dataclass(frozen=True)
class GroupedQueryFields(FamilyConfig):
    """Fields of models with `GroupedQueryAttention`."""

    num_key_value_heads: int = 2
    """Number of key-value heads; it divides the number of query heads."""
    head_dim: int = 32
    """Width of a head; even."""

    @property
    def head_sizes(self) -> HeadSizes:
        return HeadSizes(
            self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        )

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of whole heads."""
        return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)

    def _require_heads(self) -> None:
        self._require_rotary("head_dim")
        self._require_divides("num_key_value_heads", "num_attention_heads")


def head_dim_of(fields: dict[str, int]) -> int:
    """Return the width of a head where `head_dim` is left out, from the other fields."""
    return fields["hidden_size"] // max(fields["num_attention_heads"], 1)
