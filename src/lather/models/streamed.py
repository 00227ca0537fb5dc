"""A decoder whose weights stay on disk: those of a block are read when it runs, and freed after it.

So a model may be several times larger than the memory of its device, which has to hold one block,
or the head, and the states of the tokens. Several batches go through a block while it is in memory
(`hidden_of`), so that the model is read once for all of them, and not once for each. For a single
batch only those experts are read that its tokens have chosen: for the next token of a text a small
part of the model. Of the embedding only the rows of the tokens are read. The results have the bits
of those of a model in memory.

Letters: B sequences, S positions, D hidden size, N different tokens, R tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lather.device import Read, read
from lather.models.decoder import Decoder, RoutedModel
from lather.models.entry_names import entry_name, is_stack
from lather.models.experts import Experts
from lather.models.moe import LOCAL_EXCHANGE, Exchange
from lather.models.routing import Routing
from lather.models.token_positions import SequenceLayout
from lather.safetensors_file import TensorSource


class StreamedDecoder(Decoder):
    """A decoder for inference, whose weights are read from a source when they are needed. `hidden`
    and `hidden_of` read them, and for the head `ready(lm_head)`."""

    def __init__(
        self, outline: Decoder, source: TensorSource, device: torch.device, state_bytes: int = 0
    ) -> None:
        """`outline`: the model on the meta device, in the dtype in which it computes; its modules
        are taken over. `source`: has its weights, in any dtype; those that it lacks are 0.
        `state_bytes`: the most bytes for the states of the batches that go through the blocks
        together; a single batch always does."""
        RoutedModel.__init__(self)
        self.embed_tokens, self.layers = outline.embed_tokens, outline.layers
        self.norm, self.lm_head = outline.norm, outline.lm_head
        self._source, self._device, self._state_bytes = source, device, state_bytes
        self._name_of: dict[Tensor, str] = {
            x: name for name, x in (*self.named_parameters(), *self.named_buffers())
        }
        """The names of the tensors of the outline; a tied head has that of the embedding."""
        self._stored = frozenset(source.tensors)
        self._reads_all_experts = False
        for module in self.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(self._read_chosen)

    @property
    def device(self) -> torch.device:
        return self._device

    def batches_at_a_time(self, num_tokens: int) -> int:
        weight_VD = self.embed_tokens.weight
        return max(1, self._state_bytes // max(1, num_tokens * weight_VD[0].nbytes))

    def hidden_of(self, batches: Sequence[tuple[Tensor, SequenceLayout]]) -> list[Tensor]:
        return self._run(batches, LOCAL_EXCHANGE)[0]

    def _hidden(
        self, tokens_BS: Tensor, layout: SequenceLayout, exchange: Exchange
    ) -> tuple[Tensor, list[Routing]]:
        (x_BSD,), routings = self._run([(tokens_BS, layout)], exchange)
        return x_BSD, routings

    @torch.no_grad()
    def _run(
        self, batches: Sequence[tuple[Tensor, SequenceLayout]], exchange: Exchange
    ) -> tuple[list[Tensor], list[Routing]]:
        states, routings = [self._embedded(tokens_BS) for tokens_BS, _ in batches], list[Routing]()
        self._reads_all_experts = len(batches) > 1
        for block in [block for block in self.layers if block.mtp is None]:
            with self.ready(block):
                for number, (_, layout) in enumerate(batches):
                    states[number], routing = block(states[number], layout, exchange)
                    routings += [] if routing is None else [routing]
        with self.ready(self.norm):
            return [self.norm(x_BSD) for x_BSD in states], routings

    @contextmanager
    def ready(self, module: nn.Module) -> Iterator[None]:
        """Read the weights of a module, and free them after the block. Experts are read when they
        run, if a single batch needs them."""
        outlines = list(self._outlines(module))
        try:
            for tensors, key, outline in outlines:
                if self._reads_all_experts or not is_stack(self._name_of[outline]):
                    tensors[key] = self._read(outline)
            yield
        finally:
            for tensors, key, outline in outlines:
                tensors[key] = outline

    def _read_chosen(self, experts: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Read the experts that the tokens have chosen, before these run, and number them anew."""
        if self._reads_all_experts:
            return None
        x_RD, experts_RK, *rest = inputs
        chosen, places_RK = torch.unique(experts_RK.clamp(min=0), return_inverse=True)
        numbers = read(chosen, Read.CHOSEN).tolist()
        for tensors, key, outline in self._outlines(experts):
            tensors[key] = self._read(outline, numbers)
        return x_RD, places_RK.masked_fill(experts_RK < 0, -1), *rest

    def _outlines(self, module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Yield the tensors of a module that have not been read, each with the dictionary that has
        it and its key there."""
        for inner in module.modules():
            for tensors in (inner._parameters, inner._buffers):
                for key, outline in list(tensors.items()):
                    if outline is not None and outline in self._name_of:
                        yield tensors, key, outline

    def _read(self, outline: Tensor, experts: Sequence[int] | None = None) -> Tensor:
        """Read a tensor; of a stack the given experts, or all."""
        name = self._name_of[outline]
        if not is_stack(name):
            x = self._read_entry(name, outline)
        else:
            numbers = range(len(outline)) if experts is None else experts
            shape = (len(numbers), *outline.shape[1:])
            x = torch.empty(shape, dtype=outline.dtype, device=self._device)
            for place, expert in enumerate(numbers):
                x[place].copy_(self._read_entry(entry_name(name, expert), outline[0]))
        return nn.Parameter(x, requires_grad=False) if isinstance(outline, nn.Parameter) else x

    def _read_entry(self, name: str, outline: Tensor) -> Tensor:
        if name not in self._stored:
            return torch.zeros_like(outline, device=self._device)
        return self._source.read(name).to(self._device, outline.dtype)

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        """Return the embeddings (B, S, D) of tokens, of which consecutive ones are read at once."""
        weight_VD = self.embed_tokens.weight
        tokens_N, places_BS = torch.unique(tokens_BS, return_inverse=True)
        x_ND = torch.empty(
            (len(tokens_N), weight_VD.shape[1]), dtype=weight_VD.dtype, device=self._device
        )
        tokens, start = read(tokens_N, Read.CHOSEN).tolist(), 0
        for end in range(1, len(tokens) + 1):
            if end == len(tokens) or tokens[end] != tokens[end - 1] + 1:
                rows = slice(tokens[start], tokens[end - 1] + 1)
                x_ND[start:end] = self._source.read(self._name_of[weight_VD], (rows,))
                start = end
        return x_ND[places_BS]
