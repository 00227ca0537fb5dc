"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention, dense blocks first, then
mixture-of-experts blocks with shared experts.

Fields have the names and meanings of the published Hugging Face `config.json`. As in the authors'
code, `norm_topk_prob` and `seq_aux` take effect; transformers 5 ignores both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from lather.models.attention import MultiHeadLatentAttention
from lather.models.balance import LoadBalance
from lather.models.decoder import Block
from lather.models.experts import Experts
from lather.models.family import Family
from lather.models.layers import GatedMLP
from lather.models.moe import MoE
from lather.models.rotary import Rotary
from lather.models.routing import Choice, Router
from lather.models.shared_fields import RoutedFields

NORMALIZED = """\
transformers ignores norm_topk_prob = true of deepseek_v2: it computes other logits than Lather \
and DeepSeek's code"""


@dataclass(frozen=True)
class DeepseekV2Config(RoutedFields):
    """Sizes and options of a DeepSeek-V2 model."""

    model_type: str = "deepseek_v2"
    """Hugging Face name of the model family."""
    intermediate_size: int = 512
    """Width of the feed-forward layer of dense blocks."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward layer."""
    first_k_dense_replace: int = 1
    """Number of dense blocks at the start."""
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
    n_routed_experts: int = 8
    """Number of routed experts per MoE block."""
    n_shared_experts: int = 1
    """Number of shared experts per MoE block, merged into one feed-forward layer of this multiple
    of `moe_intermediate_size`; 0: none."""
    topk_method: str = "greedy"
    """greedy: a token goes to the best of all experts. group_limited_greedy: to the best experts in
    the `topk_group` groups that have the best single experts."""
    n_group: int = 1
    """Number of groups of neighboring experts, for group_limited_greedy."""
    topk_group: int = 1
    """Number of groups that a token's experts may come from, for group_limited_greedy."""
    norm_topk_prob: bool = False
    """Normalize the weights of a token's experts to a sum of 1, instead of multiplying them by
    `routed_scaling_factor`; without effect if `num_experts_per_tok` is 1."""
    routed_scaling_factor: float = 1.0
    """Factor on the weights of a token's experts."""
    aux_loss_alpha: float = 0.01
    """Coefficient of each block's load-balancing loss; 0: no such loss. Published models, which are
    large, have 0.001; small models collapse with it."""
    seq_aux: bool = False
    """Compute the load-balancing loss for each sequence, not for the micro-batch."""

    topk_methods: ClassVar[tuple[str, ...]] = ("greedy", "group_limited_greedy")
    rotates_neighbors = True
    """Whether pairs of neighboring coordinates are rotated; otherwise pairs across halves."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(
            may_be_zero=("first_k_dense_replace", "n_shared_experts", "aux_loss_alpha")
        )
        self._require_rotary("qk_rope_head_dim")
        self._require_at_most("first_k_dense_replace", "num_hidden_layers")
        self._require_at_most("num_experts_per_tok", "n_routed_experts")
        methods = self.topk_methods
        self._require(
            "topk_method", self.topk_method in methods, f"one of {', '.join(map(repr, methods))}"
        )
        self._require_divides("n_group", "n_routed_experts")
        self._require_at_most("topk_group", "n_group")
        if self.topk_method != "greedy":
            reach = self.n_routed_experts // self.n_group * self.topk_group
            self._require(
                "num_experts_per_tok",
                self.num_experts_per_tok <= reach,
                f"at most the {reach} experts of topk_group groups",
            )

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

    def is_dense(self, index: int) -> bool:
        return index < self.first_k_dense_replace


def latent_block(
    config: DeepseekV2Config, index: int, make_router: Callable[[Any], Router]
) -> Block:
    """Build the block with this index, whose router `make_router` builds if it has experts."""
    attention = MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        rotary=Rotary(
            config.qk_rope_head_dim,
            config.rope_theta,
            config.rope_scaling,
            interleaved=config.rotates_neighbors,
        ),
        v_head_dim=config.v_head_dim,
    )
    if config.is_dense(index):
        mlp: MoE | GatedMLP = GatedMLP(config.hidden_size, config.intermediate_size)
    else:
        router = make_router(config)
        router.balance = LoadBalance("sequence" if config.seq_aux else "micro_batch")
        experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
        width = config.n_shared_experts * config.moe_intermediate_size
        mlp = MoE(router, experts, GatedMLP(config.hidden_size, width) if width else None)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _router(config: DeepseekV2Config) -> Router:
    sizes = config.hidden_size, config.n_routed_experts, config.num_experts_per_tok
    scale = 1.0 if config.normalizes else config.routed_scaling_factor
    groups = (
        (config.n_group, config.topk_group)
        if config.topk_method == "group_limited_greedy"
        else (1, 1)
    )
    return Router(*sizes, normalize=config.normalizes, scale=scale, choice=Choice(*groups))


FAMILY = Family(
    DeepseekV2Config,
    partial(latent_block, make_router=_router),
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
