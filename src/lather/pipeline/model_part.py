"""One rank's part of a model: the layers of its stages and, under expert parallelism, its share of
their experts.

A `ModelPart` is built from a whole model on the meta device; it keeps only what belongs to the
rank, and only that gets memory. Parameters have the same names as in the whole model
(`layers.17.mlp.experts.down_proj`); dim 0 of expert parameters holds the rank's experts. In
DualPipeV the first and the last stage are on the same rank, and with them embedding, final norm and
head, so tied embeddings are one parameter.

Random weights equal those of one process bit for bit: every rank draws all of them in the same
order, one at a time, and keeps its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lather.models.adapted import add_adapters
from lather.models.attention_logits import measured_layers
from lather.models.block import Block
from lather.models.decoder import Decoder, RoutedModel
from lather.models.entry_names import is_stack
from lather.models.experts import Experts
from lather.models.families import ModelConfig, build_model
from lather.models.lora import LoraConfig, fresh_adapters
from lather.models.moe import MoE


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of the model; refers to the modules of a part."""

    index: int
    blocks: tuple[Block, ...]
    """Without those of multi-token prediction."""
    embed_tokens: nn.Embedding | None = None
    """In the first stage only."""
    norm: nn.Module | None = None
    lm_head: nn.Linear | None = None
    """In the last stage only, with the final norm."""
    mtp_blocks: tuple[Block, ...] = ()
    mtp_embed_tokens: nn.Embedding | None = None
    """In the last stage only, with the embedding again; which exists if the model has any."""


@dataclass(frozen=True)
class PartLayers:
    """The layers and experts of a model that one rank has."""

    layers_of_stage: tuple[Sequence[int], ...]
    """Layers of each stage of the model, in order. Those of multi-token prediction, which are
    always in the last stage, may be left out."""
    stages_of_rank: tuple[int, ...] = (0,)
    expert_rank: int = 0
    expert_ranks: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.expert_rank < self.expert_ranks

    def of_parameter(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of a parameter of the whole model."""
        return value[self.experts(len(value))] if is_stack(name) else value

    def experts(self, num_experts: int) -> slice:
        """Return this rank's experts, which are consecutive."""
        each, rest = divmod(num_experts, self.expert_ranks)
        assert rest == 0, (num_experts, self.expert_ranks)
        return slice(self.expert_rank * each, (self.expert_rank + 1) * each)


class ModelPart(RoutedModel):
    """One rank's part of a model, as the module docstring describes. `stages` are this rank's,
    first to last."""

    embed_tokens: nn.Embedding | None
    norm: nn.Module | None
    lm_head: nn.Linear | None

    def __init__(self, whole: Decoder, share: PartLayers) -> None:
        """Take over the modules of `whole`, without copying them."""
        super().__init__()
        self.mtp_layers = tuple(
            layer for layer, block in enumerate(whole.layers) if block.mtp is not None
        )
        """Layers of multi-token prediction of the whole model, by depth."""
        *outer, last = share.layers_of_stage
        self.share = share = replace(share, layers_of_stage=(*outer, (*last, *self.mtp_layers)))
        self.hidden_size = whole.embed_tokens.embedding_dim
        self.moe_layers = tuple(
            layer for layer, block in enumerate(whole.layers) if isinstance(block.mlp, MoE)
        )
        """MoE layers of the whole model."""
        routers = whole.routers()
        self.num_experts = len(routers[0].weight) if routers else 0
        """Experts of each MoE layer, on all ranks."""
        self.num_experts_per_tok = routers[0].num_experts_per_tok if routers else 0
        self.measured = {name: layer.num_heads for name, layer in measured_layers(whole).items()}
        """Number of heads of each attention layer of the whole model whose logits can be measured,
        by name."""
        has_first = 0 in share.stages_of_rank
        has_last = len(share.layers_of_stage) - 1 in share.stages_of_rank
        self.embed_tokens = whole.embed_tokens if has_first else None
        self.layers = nn.ModuleDict(
            {
                str(layer): whole.layers[layer]
                for stage in sorted(share.stages_of_rank)
                for layer in share.layers_of_stage[stage]
            }
        )
        self.norm = whole.norm if has_last else None
        self.lm_head = whole.lm_head if has_last else None
        self.stages = tuple(self._stage(index) for index in share.stages_of_rank)

    def _stage(self, index: int) -> Stage:
        blocks = [self.block(layer) for layer in self.share.layers_of_stage[index]]
        mtp_blocks = tuple(block for block in blocks if block.mtp is not None)
        blocks = blocks[: len(blocks) - len(mtp_blocks)]
        embed_tokens = self.embed_tokens if index == 0 else None
        head = (
            (self.norm, self.lm_head, mtp_blocks, self.embed_tokens)
            if index == len(self.share.layers_of_stage) - 1
            else ()
        )
        return Stage(index, tuple(blocks), embed_tokens, *head)

    def block(self, layer: int) -> Block:
        block = self.layers[str(layer)]
        assert isinstance(block, Block)
        return block

    def local_moe_layers(self) -> list[int]:
        """Return this rank's MoE layers, in the order of `routers()`."""
        return [layer for layer in self.moe_layers if str(layer) in self.layers]


def meta_part(whole: Decoder, share: PartLayers, dtype: torch.dtype = torch.float32) -> ModelPart:
    """Return the part without memory, on the meta device as `whole`, whose modules it takes
    over."""
    part = ModelPart(whole, share).to(dtype)
    if share.expert_ranks > 1:
        for experts in [module for module in part.modules() if isinstance(module, Experts)]:
            local_experts = share.experts(len(experts.down_proj))
            for module in experts.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(p.detach()[local_experts].clone()))
    return part


def allocate(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give the parameters of modules on the meta device uninitialized memory on `device`, and their
    buffers zeros; a parameter that two modules have stays one. Others are left as they are."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in [inner for outer in modules for inner in outer.modules()]:
        for name, p in module.named_parameters(recurse=False):
            if p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                    if p.requires_grad and p.grad_dtype != p.dtype:
                        made[p].grad_dtype = p.grad_dtype
                setattr(module, name, made[p])
        for name, bias in module.named_buffers(recurse=False):
            if bias.is_meta:  # a router's correction bias, which no one draws
                setattr(module, name, torch.zeros_like(bias, device=device))


def empty_part(
    whole: Decoder, share: PartLayers, device: torch.device, dtype: torch.dtype = torch.float32
) -> ModelPart:
    """Return the part with uninitialized memory on `device`. `whole` is on the meta device; the
    part takes over its modules."""
    part = meta_part(whole, share, dtype)
    allocate([part], device)
    return part


@torch.no_grad()
def fill(part: ModelPart, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy into the part those of the named whole parameters that it has."""
    local = dict(part.named_parameters())
    for name, value in weights:
        if name in local:
            local[name].copy_(part.share.of_parameter(name, value))
        del value  # before the next one is allocated


def fresh_weights(
    config: ModelConfig, generator: torch.Generator, lora: LoraConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the random weights that one process would draw from `generator`, which has the same
    seed on every rank. Adapters are drawn last, so that they do not change the other weights."""
    whole = build_model(config, None, torch.device("meta"))
    yield from whole.fresh_weights(config.initializer_range, generator)
    add_adapters(whole, lora)
    yield from fresh_adapters(whole, generator)


def outlined_part(
    config: ModelConfig, share: PartLayers, dtype: torch.dtype, lora: LoraConfig
) -> ModelPart:
    """Return the part with its adapters, without memory."""
    whole = build_model(config, None, torch.device("meta"))
    add_adapters(whole, lora)
    return meta_part(whole, share, dtype)
