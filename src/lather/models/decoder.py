"""A decoder-only transformer made of blocks (`lather.models.block`). `set_memory` chooses which
tensors the feed-forward layers save for backward; "reference" is plain autograd.

Letters: B sequences, S positions, T = B * S tokens, D hidden size, K experts per token, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.models.balance import LoadBalance
from lather.models.block import Block
from lather.models.context import Context
from lather.models.experts import Experts
from lather.models.family import FamilyConfig
from lather.models.gated_mlp import MEMORY_MODES, GatedMLP
from lather.models.key_value_cache import KeyValueCache
from lather.models.layers import Linear, RMSNorm
from lather.models.moe import LOCAL_EXCHANGE, Exchange, MoE
from lather.models.mtp import MultiTokenPrediction, look_ahead
from lather.models.routing import Router, Routing
from lather.models.token_positions import SequenceLayout
from lather.shapes import Bool, Float, Int


@dataclass
class DecoderOutput:
    """The result of a forward pass: logits, or with labels the loss instead."""

    logits_BSV: Float[Tensor, "b s v"] | None
    loss: Float[Tensor, ""] | None
    routings: list[Routing]
    """One per MoE block, in order."""
    mtp_losses: list[Float[Tensor, ""]] = field(default_factory=list)
    """The losses of multi-token prediction by depth, each the sum of the cross entropy over its
    labels divided by `normalizer`; only in training mode, with labels."""

    def balance_loss(self) -> Float[Tensor, ""]:
        """Sum the balance losses of the MoE blocks; 0 if there are none."""
        return _sum([routing.balance_loss for routing in self.routings])

    def z_loss(self) -> Float[Tensor, ""]:
        """Sum the z-losses of the MoE blocks whose routers compute it (`Router.takes_z_loss`); 0
        if there are none."""
        return _sum([routing.z_loss for routing in self.routings if routing.z_loss is not None])


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum() if losses else torch.zeros(())


class RoutedModel(nn.Module):
    """A module with blocks, with experts or dense; its methods set options of all blocks."""

    def routers(self) -> list[Router]:
        """Return the routers of the MoE blocks, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def set_memory(self, memory: str) -> None:
        """Choose the tensors that the feed-forward layers, and with "reference" also the linear
        layers, save for backward (see `lather.models.layers`).

        Raises ValueError for an unknown mode.
        """
        if memory not in MEMORY_MODES:
            raise ValueError(
                f"memory = {memory!r} is not valid: use one of {', '.join(map(repr, MEMORY_MODES))}"
            )
        for module in self.modules():
            if isinstance(module, GatedMLP | Experts | Linear | Block):
                module.memory = memory
        for module in self.modules():
            if isinstance(module, MoE):
                module.keep_little()

    def compile_parts(self, **options: Any) -> int:
        """Compile the parts that otherwise run as many small kernels, in place, each as a full
        graph; return the number of parts.

        These are norms and the preparation of queries, keys and values: a norm in fp32, the rotary
        embedding and the split into heads each read and write whole tensors several times;
        compiled, forward and backward read and write them once. Other parts are not compiled:
        linear layers, experts, router and loss have autograd functions that append weight gradients
        to a queue, a side effect that a compiled backward cannot have; and attention itself is
        already a fused kernel (on CUDA, flex attention is compiled where it is called). The small
        norms of attention's latents are not compiled, because torch limits the number of widths for
        which it compiles a function.

        `options` are those of `torch.compile`: backend, mode and so on. Names and values of
        parameters do not change. Results are equal up to rounding. A second batch size causes
        another compilation, which then serves all sizes. All compilation is in forward passes: what
        backward recomputes runs there once before (`Recomputation`).
        """
        options = {"fullgraph": True, "dynamic": None, **options}
        blocks = [module for module in self.modules() if isinstance(module, Block)]
        inside = {id(module) for block in blocks for module in block.self_attn.modules()}
        norms = [
            module
            for module in self.modules()
            if isinstance(module, RMSNorm) and id(module) not in inside
        ]
        for norm in norms:
            norm.compile(**options)
        for block in blocks:
            attention = block.self_attn
            for name in getattr(attention, "parts_to_compile", ()):
                setattr(attention, name, torch.compile(getattr(attention, name), **options))
            block.warmed_up = set()
            if block.mtp is not None:
                block.mtp.warmed_up = set()
        return len(blocks) + len(norms)

    def balance_load(
        self,
        level: str | None,
        group: dist.ProcessGroup | None = None,
        context: Context | None = None,
    ) -> None:
        """Set the level of the balance loss of all blocks (None: as it is), and the ranks over
        which it is taken; see `LoadBalance`."""
        for router in self.routers():
            router.balance = LoadBalance(level or router.balance.level, group, context)


class Decoder(RoutedModel):
    """Embedding, blocks, final norm, head; with `tie_word_embeddings` the head is the embedding.

    The last blocks may be those of multi-token prediction, which come behind the final norm and use
    embedding and head, too.
    """

    def __init__(self, blocks: Sequence[Block], config: FamilyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, zero_centered=config.zero_centered_norms
        )
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return self.embed_tokens.weight.device

    def ready(self, module: nn.Module) -> AbstractContextManager[object]:
        """Inside this context, the weights of a module of this model are in memory; here they
        always are."""
        return nullcontext()

    def forward(
        self,
        tokens_BS: Int[Tensor, "b s"],
        labels_BS: Int[Tensor, "b s"] | None = None,
        *,
        cu_seqlens: Int[Tensor, " n"] | None = None,
        normalizer: float | Tensor = 1.0,
        exchange: Exchange = LOCAL_EXCHANGE,
        cache: KeyValueCache | None = None,
        padding_BS: Bool[Tensor, "b s"] | None = None,
    ) -> DecoderOutput:
        """Compute logits, or with labels the sum of the cross entropy over labels that are not
        -100, divided by `normalizer`. In training mode also those of multi-token prediction.

        The loss never holds the logits of all tokens at the same time. `labels_BS[b, s]` is the
        token after `tokens_BS[b, s]`. `cu_seqlens`: boundaries of the documents packed into the
        batch (see `SequenceLayout`). `exchange`: sends tokens to experts on other ranks. `cache`:
        holds the tokens before these, and is extended by these; only inside `torch.no_grad()`, and
        without `cu_seqlens`. `padding_BS`: True at positions that hold no token, which experts and
        their balance leave out (see `SequenceLayout.with_padding`).
        """
        batch, length = tokens_BS.shape
        layout = SequenceLayout(batch, length, tokens_BS.device, cu_seqlens, cache)
        layout = layout.with_padding(padding_BS)
        x_BSD, routings = self._hidden(tokens_BS, layout, exchange)
        if labels_BS is None:
            return DecoderOutput(self.lm_head(x_BSD), None, routings)
        head = partial(linear_cross_entropy, weight=self.lm_head.weight, normalizer=normalizer)
        output = DecoderOutput(None, head(x_BSD, labels=labels_BS), routings)
        depths = [block for block in self.layers if self.training and block.mtp is not None]
        for depth, block in enumerate(depths, start=1):
            mtp = block.mtp
            assert isinstance(mtp, MultiTokenPrediction)
            later_BS, later_labels_BS, missing_BS = look_ahead(
                tokens_BS, labels_BS, depth, layout.documents, padding_BS
            )
            x_BSD = mtp(self.embed_tokens(later_BS), x_BSD)
            x_BSD, routing = block(x_BSD, layout.with_padding(missing_BS), exchange)
            x_BSD = mtp.norm(x_BSD)
            output.mtp_losses.append(head(x_BSD, labels=later_labels_BS))
            if routing is not None:
                routings.append(routing)
        return output

    def hidden(
        self,
        tokens_BS: Int[Tensor, "b s"],
        *,
        cu_seqlens: Int[Tensor, " n"] | None = None,
        exchange: Exchange = LOCAL_EXCHANGE,
        cache: KeyValueCache | None = None,
        padding_BS: Bool[Tensor, "b s"] | None = None,
    ) -> tuple[Float[Tensor, "b s d"], list[Routing]]:
        """Return the last norm's output, which is the head's input, and the routings of the MoE
        blocks; see `forward`."""
        batch, length = tokens_BS.shape
        layout = SequenceLayout(batch, length, tokens_BS.device, cu_seqlens, cache)
        return self._hidden(tokens_BS, layout.with_padding(padding_BS), exchange)

    def batches_at_a_time(self, num_tokens: int) -> int:
        """Return how many batches of so many tokens `hidden_of` should be given."""
        return 1

    def hidden_of(
        self, batches: Sequence[tuple[Int[Tensor, "b s"], SequenceLayout]]
    ) -> list[Float[Tensor, "b s d"]]:
        """Return the last norm's output for each batch of tokens and their layout."""
        return [self._hidden(*batch, LOCAL_EXCHANGE)[0] for batch in batches]

    def _hidden(
        self, tokens_BS: Tensor, layout: SequenceLayout, exchange: Exchange
    ) -> tuple[Tensor, list[Routing]]:
        x_BSD = self.embed_tokens(tokens_BS)
        routings = []
        for block in [block for block in self.layers if block.mtp is None]:
            x_BSD, routing = block(x_BSD, layout, exchange)
            if routing is not None:
                routings.append(routing)
        return self.norm(x_BSD), routings

    def fresh_weights(
        self, std: float, generator: torch.Generator | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and a fresh value, on CPU, of each parameter: those of its module's
        `fresh_parameter` if it has this method (norms are 1, zero-centered ones 0), biases 0, all
        others drawn from a normal distribution with this standard deviation, in the order of
        `parameters()`. The model may be on the meta device."""
        owners: dict[int, Any] = {
            id(p): module
            for module in self.modules()
            if hasattr(module, "fresh_parameter")
            for p in module.parameters(recurse=False)
        }
        for name, p in self.named_parameters():
            # no name holds a value here, so that the caller can free each before the next
            if id(p) in owners:
                yield name, owners[id(p)].fresh_parameter(name.rpartition(".")[2], p, generator)
            elif name.endswith("bias"):
                yield name, torch.zeros_like(p, device="cpu")
            else:
                yield name, torch.empty_like(p, device="cpu").normal_(0, std, generator=generator)
