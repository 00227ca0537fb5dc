"""DeepSeekMoE (arXiv:2401.06066), a family outside of the package (docs/adding-a-family.md):
grouped-query attention, leading dense layers, then shared and routed experts.

`model_type = "deepseek_moe:FAMILY"` names it where Python finds this file."""

from dataclasses import dataclass

from lather.models.attention import GroupedQueryAttention, HeadSizes
from lather.models.block import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.gated_mlp import GatedMLP
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import Router
from lather.models.shared_fields import RoutedFields


@dataclass(frozen=True)
class DeepseekMoeConfig(RoutedFields):
    """Sizes of a DeepSeekMoE style model."""

    model_type: str = "deepseek"
    """The family, by its Hugging Face name."""
    intermediate_size: int = 512
    """Width of the dense layers' feed-forward."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward."""
    first_k_dense_replace: int = 1
    """Leading blocks that are dense."""
    num_key_value_heads: int = 6
    """Heads of keys and values, a divisor of the heads of queries."""
    n_routed_experts: int = 8
    """Routed experts per MoE block."""
    n_shared_experts: int = 1
    """Shared experts per MoE block, merged into one feed-forward of this multiple of
    `moe_intermediate_size`."""
    norm_topk_prob: bool = False
    """Scale the chosen experts' weights to sum 1."""
    aux_loss_alpha: float = 0.001
    """Coefficient of each block's load-balancing loss; 0: none."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(
            may_be_zero=("first_k_dense_replace", "n_shared_experts", "aux_loss_alpha")
        )
        self._require_divides("num_attention_heads", "hidden_size")
        self._require_divides("num_key_value_heads", "num_attention_heads")
        self._require_at_most("first_k_dense_replace", "num_hidden_layers")
        self._require_at_most("num_experts_per_tok", "n_routed_experts")

    @property
    def balance_loss_coef(self) -> float:
        """Coefficient of each block's load-balancing loss."""
        return self.aux_loss_alpha

    def is_dense(self, index: int) -> bool:
        return index < self.first_k_dense_replace


def _block(config: DeepseekMoeConfig, index: int) -> Block:
    head_dim = config.hidden_size // config.num_attention_heads
    attention = GroupedQueryAttention(
        HeadSizes(
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, head_dim
        ),
        Rotary(head_dim, config.rope_theta, config.rope_scaling),
    )
    is_dense = config.is_dense(index)
    mlp = GatedMLP(config.hidden_size, config.intermediate_size) if is_dense else _moe(config)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _moe(config: DeepseekMoeConfig) -> MoE:
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
    )
    experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    width = config.n_shared_experts * config.moe_intermediate_size
    return MoE(router, experts, GatedMLP(config.hidden_size, width))


FAMILY = Family(
    DeepseekMoeConfig,
    _block,
    architecture="DeepseekForCausalLM",
    defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-6},
    written={"attention_bias": False, "moe_layer_freq": 1},
)
