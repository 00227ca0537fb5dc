"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention, dense blocks first, then
mixture-of-experts blocks with shared experts.

Fields have the names and meanings of the published Hugging Face `config.json`. As in the authors'
code, `norm_topk_prob` and `seq_aux` take effect; transformers 5 ignores both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lather.models.balance import LoadBalance
from lather.models.block import Block
from lather.models.family import Family
from lather.models.gated_mlp import GatedMLP
from lather.models.latent_attention import MultiHeadLatentAttention
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import ANY_EXPERT, Choice, Router
from lather.models.shared_fields import DeepseekExpertsFields

NORMALIZED = """\
transformers ignores norm_topk_prob = true of deepseek_v2: it computes other logits than Lather \
and DeepSeek's code"""


@dataclass(frozen=True)
class DeepseekV2Config(DeepseekExpertsFields):
    """Sizes and options of a DeepSeek-V2 model."""

    model_type: str = "deepseek_v2"
    """Hugging Face name of the model family."""
    q_lora_rank: int | None = None
    """Rank of the query latent; none: queries are projected directly."""
    kv_lora_rank: int = 64
    """Rank of the latent from which keys and values are expanded."""
    qk_nope_head_dim: int = 32
    """Width of the part of a head's query and key without rotary embedding."""
    qk_rope_head_dim: int = 16
    """Width of the part of a head's query and key with rotary embedding; even."""
    v_head_dim: int = 32
    """Width of a head's value."""
    topk_method: str = "greedy"
    """greedy: a token goes to the best of all experts. group_limited_greedy: to the best experts in
    the `topk_group` groups that have the best single experts."""
    norm_topk_prob: bool = False
    """Normalize the weights of a token's experts to a sum of 1, instead of multiplying them by
    `routed_scaling_factor`; without effect if `num_experts_per_tok` is 1."""
    aux_loss_alpha: float = 0.01
    """Coefficient of each block's load-balancing loss; 0: no such loss. Published models, which are
    large, have 0.001; small models collapse with it."""
    seq_aux: bool = False
    """Compute the load-balancing loss for each sequence, not for the micro-batch."""

    best_of_group: ClassVar[Mapping[str, int]] = {"greedy": 0, "group_limited_greedy": 1}
    """Values of `topk_method`, and the number of experts that make a group's score."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(
            may_be_zero=("first_k_dense_replace", "n_shared_experts", "aux_loss_alpha")
        )
        self._require_rotary("qk_rope_head_dim")
        known = f"one of {', '.join(map(repr, self.best_of_group))}"
        self._require("topk_method", self.topk_method in self.best_of_group, known)
        self._require_experts(self.best_of_group[self.topk_method])

    @property
    def normalizes(self) -> bool:
        """True if the weights of a token's experts are normalized; a single weight is not, as it
        would always be 1 and give the router no gradient."""
        return self.norm_topk_prob and self.num_experts_per_tok > 1

    @property
    def balance_loss_coef(self) -> float:
        return self.aux_loss_alpha

    @property
    def transformers_note(self) -> str:
        return NORMALIZED if self.normalizes else ""

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of a part of each head."""
        return Rotary(self.qk_rope_head_dim, self.rope_theta, self.rope_scaling, interleaved=True)

    def router(self) -> Router:
        in_groups = self.topk_method == "group_limited_greedy"
        return Router(
            self.hidden_size,
            self.n_routed_experts,
            self.num_experts_per_tok,
            normalize=self.normalizes,
            scale=1.0 if self.normalizes else self.routed_scaling_factor,
            choice=Choice(self.n_group, self.topk_group) if in_groups else ANY_EXPERT,
        )

    def feed_forward(self, index: int) -> MoE | GatedMLP:
        layer = super().feed_forward(index)
        if isinstance(layer, MoE):
            layer.gate.balance = LoadBalance("sequence" if self.seq_aux else "micro_batch")
        return layer


def latent_block(config: DeepseekV2Config, index: int) -> Block:
    """Build the block with this index of a model with multi-head latent attention."""
    attention = MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        rotary=config.rotary,
        v_head_dim=config.v_head_dim,
    )
    return Block(attention, config.feed_forward(index), config.hidden_size, config.rms_norm_eps)


FAMILY = Family(
    DeepseekV2Config,
    latent_block,
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "rms_norm_eps": 1e-6,
    },
    nullable=frozenset({"q_lora_rank"}),
    written={
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "num_key_value_heads": lambda config: config.num_attention_heads,
        "head_dim": lambda config: config.qk_rope_head_dim,
        "qk_head_dim": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    },
    agreeing={
        "rope_interleave": True,
        "num_shared_experts": lambda config: config.n_shared_experts,
    },
    aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
)
