"""DeepSeek-V2 (arXiv:2405.04434): multi-head latent attention, leading dense layers, then mixture-of-experts layers with shared experts.

Field names and defaults of meaning are those of the published Hugging Face `config.json`. Two of its fields the authors' own code heeds,
and so does this, while transformers 5 ignores them: `norm_topk_prob` and `seq_aux`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lather.models.assembly import assemble
from lather.models.attention import MultiHeadLatentAttention
from lather.models.decoder import Block, Decoder
from lather.models.experts import Experts
from lather.models.hf.config_fields import CheckedFields, PublishedConfig
from lather.models.layers import GatedMLP
from lather.models.moe import MoE
from lather.models.rotary import Rotary, YarnConfig
from lather.models.routing import LoadBalance, Router


@dataclass(frozen=True)
class DeepseekV2Config(CheckedFields):
    """Sizes of a DeepSeek-V2 style model."""

    model_type: str = "deepseek_v2"
    """The family, by its Hugging Face name."""
    vocab_size: int = 4096
    """Tokens in the vocabulary."""
    hidden_size: int = 192
    """Width of the residual stream."""
    intermediate_size: int = 512
    """Width of the dense layers' feed-forward."""
    moe_intermediate_size: int = 128
    """Width of one expert's feed-forward."""
    num_hidden_layers: int = 6
    """Blocks, dense ones included."""
    first_k_dense_replace: int = 1
    """Leading blocks that are dense."""
    num_attention_heads: int = 6
    """Attention heads."""
    q_lora_rank: int | None = None
    """Rank of the query latent; none: the query is projected directly."""
    kv_lora_rank: int = 64
    """Rank of the latent that keys and values come from."""
    qk_nope_head_dim: int = 32
    """Width of a head's query and key without position."""
    qk_rope_head_dim: int = 16
    """Width of a head's rotary query and key, even."""
    v_head_dim: int = 32
    """Width of a head's value."""
    n_routed_experts: int = 8
    """Routed experts per MoE block."""
    n_shared_experts: int = 1
    """Shared experts per MoE block, as one feed-forward of that many times `moe_intermediate_size`; 0: none."""
    num_experts_per_tok: int = 2
    """Routed experts per token (top-k)."""
    topk_method: str = "greedy"
    """greedy: the best of all experts. group_limited_greedy: the best of `topk_group` groups, those with the best single experts."""
    n_group: int = 1
    """Groups of neighbouring experts, for group_limited_greedy."""
    topk_group: int = 1
    """Groups that a token's experts may come from."""
    norm_topk_prob: bool = False
    """Scale the chosen experts' weights to sum 1 instead of by `routed_scaling_factor`, if there are several."""
    routed_scaling_factor: float = 1.0
    """Factor on the chosen experts' weights."""
    aux_loss_alpha: float = 0.001
    """Coefficient of each block's load-balancing loss; 0: none."""
    seq_aux: bool = False
    """Take that loss of each sequence alone instead of the micro-batch."""
    max_position_embeddings: int = 2048
    """Longest sequence, tokens."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: YarnConfig | None = None
    """Stretching of the positions by YaRN; left out: none."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    tie_word_embeddings: bool = False
    """The head is the embedding."""

    def __post_init__(self) -> None:
        self._require_family_and_ranges(may_be_zero=("first_k_dense_replace", "n_shared_experts", "aux_loss_alpha"))
        self._require_rotary("qk_rope_head_dim", self.rope_scaling)
        self._require_at_most("first_k_dense_replace", "num_hidden_layers")
        self._require_at_most("num_experts_per_tok", "n_routed_experts")
        methods = ("greedy", "group_limited_greedy")
        self._require("topk_method", self.topk_method in methods, f"one of {', '.join(map(repr, methods))}")
        self._require_divides("n_group", "n_routed_experts")
        self._require_at_most("topk_group", "n_group")
        if self.topk_method == "group_limited_greedy":
            reach = self.n_routed_experts // self.n_group * self.topk_group
            self._require("num_experts_per_tok", self.num_experts_per_tok <= reach, f"at most the {reach} experts of topk_group groups")

    @property
    def normalizes(self) -> bool:
        """Whether the chosen experts' weights sum to 1; a lone weight of 1 would teach the router nothing."""
        return self.norm_topk_prob and self.num_experts_per_tok > 1

    @property
    def balance_loss_coef(self) -> float:
        """Coefficient of each block's load-balancing loss."""
        return self.aux_loss_alpha


PUBLISHED = PublishedConfig(
    architecture="DeepseekV2ForCausalLM",
    defaults={
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "aux_loss_alpha": 0.001,
        "seq_aux": True,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "attention_dropout": (0.0,),
        "mlp_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
    },
    derived={
        "num_key_value_heads": lambda config: config.num_attention_heads,
        "head_dim": lambda config: config.qk_rope_head_dim,
        "qk_head_dim": lambda config: config.qk_nope_head_dim + config.qk_rope_head_dim,
    },
    aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
    ignored=frozenset({"ep_size"}),
    nullable=frozenset({"q_lora_rank"}),
)


def build_deepseek_v2(config: DeepseekV2Config, generator: torch.Generator | None = None, device: torch.device | None = None) -> Decoder:
    """The model with fresh weights drawn from `generator`, on `device`; the draw is made on CPU, so that it is the same everywhere."""
    return assemble(config, lambda index: _block(config, is_dense=index < config.first_k_dense_replace), generator, device)


def _block(config: DeepseekV2Config, *, is_dense: bool) -> Block:
    attention = MultiHeadLatentAttention(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        rotary=Rotary(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling),
        v_head_dim=config.v_head_dim,
    )
    mlp = GatedMLP(config.hidden_size, config.intermediate_size) if is_dense else _moe(config)
    return Block(attention, mlp, config.hidden_size, config.rms_norm_eps)


def _moe(config: DeepseekV2Config) -> MoE:
    grouped = config.topk_method == "group_limited_greedy"
    router = Router(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalize=config.normalizes,
        scale=1.0 if config.normalizes else config.routed_scaling_factor,
        groups=(config.n_group, config.topk_group) if grouped else (1, 1),
    )
    router.balance = LoadBalance("sequence" if config.seq_aux else "micro_batch")
    experts = Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    width = config.n_shared_experts * config.moe_intermediate_size
    return MoE(router, experts, GatedMLP(config.hidden_size, width) if width else None)
