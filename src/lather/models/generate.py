"""Generates text with a decoder: continues prompts side by side, a token of each at a time.

With a key-value cache the model reads each token once, until a row is longer than the context. From
then on it reads the last `context` tokens of each row again for every new token, as if the text
began there. This is exact, but costs a whole forward pass over the context per token. Each row
draws from a separate generator, so that up to rounding its text does not depend on other rows.

Letters: B rows that have not ended, S tokens read now, V vocabulary, K tokens to choose from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.device import Read, read
from lather.errors import UserError
from lather.models.decoder import Decoder
from lather.models.key_value_cache import KeyValueCache
from lather.shapes import Float


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = 0.7
    """Divisor of the logits: higher values give more varied text; 0: always the most likely
    token."""
    top_k: int = 50
    """Choose from this number of most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Choose from the fewest most likely tokens whose probabilities add up to at least this
    (nucleus sampling, arXiv:1904.09751)."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # also refuses NaN
            raise ValueError(f"temperature = {self.temperature} is not valid: give at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k} is not valid: give at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} is not valid: give more than 0 and at most 1")

    def choose(
        self, logits_V: Float[Tensor, " v"], generator: torch.Generator | None = None
    ) -> int:
        """Choose a token; the logits and the generator are on CPU."""
        if not logits_V.max().isfinite():  # also refuses NaN
            raise UserError(
                "the model's logits are not finite: use an earlier checkpoint, RUN@STEP"
            )
        if self.temperature == 0:
            return int(logits_V.argmax())
        num_tokens = len(logits_V)
        logits_K, tokens_K = (logits_V / self.temperature).topk(
            min(self.top_k or num_tokens, num_tokens)
        )
        weights_K = logits_K.softmax(-1)
        if self.top_p < 1:
            # 0 for the most likely token, which always remains
            before_K = weights_K.cumsum(-1) - weights_K
            weights_K = weights_K.masked_fill(before_K >= self.top_p, 0)
        return int(tokens_K[torch.multinomial(weights_K, 1, generator=generator)])


class Continuations:
    """Continues prompts of any lengths side by side."""

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        context: int,
        sampling: Sampling = Sampling(),
        generators: Sequence[torch.Generator | None] | None = None,
        stop_tokens: Iterable[int] = (),
    ) -> None:
        """`context`: the model reads at most this number of tokens at the end of a row;
        `generators`: a generator for each row, on CPU; None: torch's default.

        Raises ValueError for an empty prompt or a context below 1, UserError for a token outside
        the vocabulary.
        """
        if not all(prompts):
            raise ValueError("prompt is empty: give at least one token")
        if context < 1:
            raise ValueError(f"context = {context} is not valid: give at least 1 token")
        highest, vocab_size = max(map(max, prompts), default=0), model.embed_tokens.num_embeddings
        if highest >= vocab_size:
            raise UserError(
                f"a prompt has token {highest}, but the model's vocabulary has {vocab_size}: give "
                "text without that token"
            )
        self.tokens = [list(prompt) for prompt in prompts]
        """The tokens of each row, including its prompt."""
        self.unfinished = list(range(len(prompts)))
        """Numbers of the rows that have not ended."""
        self._model, self._context, self._sampling = model, context, sampling
        self._generators = generators or [None] * len(prompts)
        self._stop_tokens = frozenset(stop_tokens)
        self._device = model.device
        self._cache: KeyValueCache | None = None
        self._cached_rows: list[int] = []

    @torch.no_grad()
    def step(self) -> dict[int, int]:
        """Append a token to each row that has not ended; return these tokens by row number. A stop
        token ends its row and is left out."""
        if not self.unfinished:
            return {}
        logits_BV = read(self._next_logits().float(), Read.LOGITS)
        next_tokens: dict[int, int] = {}
        for row, logits_V in zip(self.unfinished, logits_BV, strict=True):
            token = self._sampling.choose(logits_V, self._generators[row])
            if token not in self._stop_tokens:
                self.tokens[row].append(token)
                next_tokens[row] = token
        self.unfinished = list(next_tokens)
        return next_tokens

    def end(self, row: int) -> None:
        """End a row."""
        self.unfinished.remove(row)

    def _next_logits(self) -> Float[Tensor, "b v"]:
        rows = [self.tokens[row] for row in self.unfinished]
        if self._cache is None or max(map(len, rows)) > self._context:
            tokens_BS = self._restart([tokens[-self._context :] for tokens in rows])
        else:
            if self._cached_rows != self.unfinished:
                self._cache.keep_rows([self._cached_rows.index(row) for row in self.unfinished])
            tokens_BS = torch.tensor([tokens[-1:] for tokens in rows], device=self._device)
        self._cached_rows = list(self.unfinished)
        x_BSD, _ = self._model.hidden(tokens_BS, cache=self._cache)
        with self._model.ready(self._model.lm_head):
            return self._model.lm_head(x_BSD[:, -1])

    def _restart(self, windows: list[list[int]]) -> Tensor:
        """Start an empty cache, and return the windows as a batch, padded on the left."""
        padding = [max(map(len, windows)) - len(window) for window in windows]
        padding_B = torch.tensor(padding, device=self._device) if any(padding) else None
        self._cache = KeyValueCache(padding_B)
        padded = [[0] * more + window for more, window in zip(padding, windows, strict=True)]
        return torch.tensor(padded, device=self._device)


def generate(
    model: Decoder,
    prompt: list[int],
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    top_k: int = 50,
    generator: torch.Generator | None = None,
    stop_token: int | Collection[int] | None = None,
) -> list[int]:
    """Continue `prompt` (at least one token) with up to `num_tokens` tokens, ending before
    `stop_token` or any of several.

    The model reads the last `context` tokens. `generator` is on CPU. `Continuations` does the same
    for several prompts, token by token.

    Raises ValueError for an empty prompt, a context below 1, or values that `Sampling` refuses.
    """
    rows = Continuations(
        model,
        [prompt],
        context=context,
        sampling=Sampling(temperature, top_k),
        generators=[generator],
        stop_tokens=(stop_token,) if isinstance(stop_token, int) else stop_token or (),
    )
    for _ in range(num_tokens):
        if not rows.step():
            break
    return rows.tokens[0][len(prompt) :]
