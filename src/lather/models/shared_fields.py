"""Fields that the configurations of several families share, with the names and meanings of the
published `config.json`: routed experts, multi-token prediction, transformers' balance loss, the
experts of Qwen and of DeepSeek, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, HeadSizes
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import FamilyConfig
from lather.models.gated_mlp import GatedMLP
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import Choice, Router


@dataclass(frozen=True)
class RoutedFields(FamilyConfig):
    """Fields of models with routed experts, whose number has a name of each family's own (see
    `FamilyConfig.num_routed_experts`)."""

    num_experts_per_tok: int = 2
    """Number of routed experts per token (top-k)."""


@dataclass(frozen=True)
class MultiTokenFields(FamilyConfig):
    """The field of models that may predict the tokens after the next one."""

    num_nextn_predict_layers: int = 0
    """Number of further blocks, which predict the tokens after the next one (multi-token
    prediction); 0: none. Published models have 1."""


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
class SparseStepFields(RouterLossFields):
    """Fields of Qwen's models with routed experts, in which single blocks may be dense."""

    intermediate_size: int = 512
    """Width of the feed-forward layer of dense blocks."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    decoder_sparse_step: int = 1
    """Every n-th block has experts, where n is this number; the other blocks are dense."""
    mlp_only_layers: tuple[int, ...] = ()
    """Numbers, from 0, of additional dense blocks."""
    num_experts: int = 8
    """Number of experts per MoE block."""
    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to a sum of 1."""

    def is_dense(self, index: int) -> bool:
        return index in self.mlp_only_layers or (index + 1) % self.decoder_sparse_step != 0

    def feed_forward(self, index: int, shared_width: int = 0) -> MoE | GatedMLP:
        """Build the feed-forward layer of the block with this index, with a gated shared expert of
        `shared_width`; 0: none."""
        hidden = self.hidden_size
        if self.is_dense(index):
            return GatedMLP(hidden, self.intermediate_size)
        sizes = hidden, self.num_experts, self.num_experts_per_tok
        return MoE(
            Router(*sizes, normalize=self.norm_topk_prob),
            Experts(self.num_experts, hidden, self.moe_intermediate_size),
            GatedMLP(hidden, shared_width) if shared_width else None,
            gates_shared_experts=shared_width > 0,
        )

    def _require_experts(self) -> None:
        self._require_at_most("num_experts_per_tok", "num_experts")
        last, numbers = self.num_hidden_layers - 1, self.mlp_only_layers
        different = len(set(numbers)) == len(numbers) and all(0 <= n <= last for n in numbers)
        self._require("mlp_only_layers", different, f"different blocks from 0 to {last}")


@dataclass(frozen=True)
class DeepseekExpertsFields(RoutedFields):
    """Fields of models with dense blocks first, and then shared and routed experts, which are those
    of DeepSeek-V3 (arXiv:2412.19437) unless `router` is overridden: chosen in groups, by sigmoid
    scores plus a correction bias."""

    intermediate_size: int = 512
    """Width of the feed-forward layer of dense blocks."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    first_k_dense_replace: int = 1
    """Number of dense blocks at the start."""
    n_routed_experts: int = 8
    """Number of routed experts per MoE block."""
    n_shared_experts: int = 1
    """Number of shared experts per MoE block, merged into one feed-forward layer of this multiple
    of `moe_intermediate_size`; 0: none."""
    n_group: int = 1
    """Number of groups of neighboring experts. A group's score is the sum of those of its two best
    experts (deepseek_v2: that of the best)."""
    topk_group: int = 1
    """Number of groups, those with the best scores, that a token's experts may come from."""
    norm_topk_prob: bool = True
    """Normalize the weights of a token's experts to a sum of 1, before they are multiplied by
    `routed_scaling_factor`."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of a token's experts."""

    def is_dense(self, index: int) -> bool:
        return index < self.first_k_dense_replace

    def feed_forward(self, index: int) -> MoE | GatedMLP:
        """Build the feed-forward layer of the block with this index."""
        hidden, width = self.hidden_size, self.moe_intermediate_size
        if self.is_dense(index):
            return GatedMLP(hidden, self.intermediate_size)
        shared = GatedMLP(hidden, self.n_shared_experts * width) if self.n_shared_experts else None
        return MoE(self.router(), Experts(self.n_routed_experts, hidden, width), shared)

    def router(self) -> Router:
        """Build the router of a block."""
        return Router(
            self.hidden_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            score="sigmoid",
            normalize=self.norm_topk_prob,
            scale=self.routed_scaling_factor,
            choice=Choice(self.n_group, self.topk_group, best_of_group=2, correction_bias=True),
        )

    def _require_experts(self, best_of_group: int = 2) -> None:
        """Check the fields of the experts. `best_of_group`: number of experts that make a group's
        score; 0: a token's experts may come from any group."""
        self._require_at_most("first_k_dense_replace", "num_hidden_layers")
        self._require_at_most("num_experts_per_tok", "n_routed_experts")
        self._require_divides("n_group", "n_routed_experts")
        self._require_at_most("topk_group", "n_group")
        if best_of_group:
            size = self.n_routed_experts // self.n_group
            most = f"at most {self.n_routed_experts // best_of_group}"
            words = f"1, or {most}, so that each group has {best_of_group} experts"
            self._require("n_group", self.n_group == 1 or size >= best_of_group, words)
            reach = size * self.topk_group
            words = f"at most the {reach} experts of topk_group groups"
            self._require("num_experts_per_tok", self.num_experts_per_tok <= reach, words)


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


@dataclass(frozen=True)
class DenseFields(GroupedQueryFields):
    """Fields of models that have a dense feed-forward layer in every block."""

    intermediate_size: int = 512
    """Width of the feed-forward layer."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=())
        self._require_heads()

    def dense_block(self, attention: GroupedQueryAttention) -> Block:
        """Build a block with this attention."""
        mlp = GatedMLP(self.hidden_size, self.intermediate_size)
        return Block(attention, mlp, self.hidden_size, self.rms_norm_eps)


@dataclass(frozen=True)
class PartialRotaryFields(GroupedQueryFields):
    """The same with a rotary embedding of a part of each head."""

    partial_rotary_factor: float = 0.5
    """Share of each head's columns, the first, that the rotary embedding covers; their number,
    rounded down, is even."""

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a part of each head."""
        size = int(self.head_dim * self.partial_rotary_factor)
        return Rotary(size, self.rope_theta, self.rope_scaling)

    def _require_heads(self) -> None:
        super()._require_heads()
        size, width = self.rotary.size, self.head_dim
        holds = 0 < size <= width and size % 2 == 0
        constraint = f"a share of head_dim ({width}) that is even and not 0, not {size} columns"
        self._require("partial_rotary_factor", holds, constraint)


def head_dim_of(fields: Mapping[str, int]) -> int:
    """Return the width of a head where `head_dim` is left out, from the other fields."""
    return fields["hidden_size"] // max(fields["num_attention_heads"], 1)
