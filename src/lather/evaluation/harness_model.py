"""A trained model as lm-evaluation-harness (extra `lm-eval`) asks for one: the log-likelihoods of
texts, and texts up to one of several ends.

Texts become tokens, and are cut to the context, as by the harness's own model for Hugging Face
folders, `HFLM`, with the same tokenizer of transformers; results are equal up to rounding. Texts
with the same inputs, such as answers of one token to a question, are computed once.

Letters: B texts, S positions.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.errors import UserError
from lather.evaluation.scoring import score_head, states_of
from lather.models.decoder import Decoder
from lather.models.generate import Continuations, Sampling
from lather.train.trained_model import TrainedModel

MOST_TOKENS = 256
"""Tokens that are generated if a task does not say how many."""
REMEDY = "give more (--sequence-length)"


class TasksModel(TemplateLM):  # type: ignore[misc]
    """A trained model that the harness's tasks call."""

    def __init__(
        self, trained: TrainedModel, decoder: Decoder, *, context: int, batch_size: int
    ) -> None:
        """`context`: tokens that the model reads at most; `batch_size`: texts per batch."""
        super().__init__()
        self.max_length, self.batch_size, self._decoder = context, batch_size, decoder
        self._ends = trained.ends_of_answers(trained.tokenizer())
        self.tokenizer: Any = _tokenizer(trained)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """The name of a tokenizer in the harness's caches of prompts, which are not used."""
        return "lather"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Encode a text, by default with the special tokens that the tokenizer adds, unless it
        begins with them."""
        if add_special_tokens is None:
            prefix = self.tokenizer.decode(self.prefix_token_id)
            add_special_tokens = not string.startswith(prefix)
        tokens: list[int] = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation with the chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the context."""
        windows = [
            (number, ((), *make_disjoint_window(window)))
            for number, request in enumerate(requests)
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
        ]
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens([window for _, window in windows], disable_tqdm)
        for (number, _), (log_likelihood, _) in zip(windows, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        """Return for each context and continuation the log-likelihood of the continuation, and
        whether each of its tokens is the most likely one."""
        numbers_of: dict[tuple[int, ...], list[int]] = {}
        for number, (_, before, after) in enumerate(requests):
            if not 0 < len(after) <= self.max_length:
                raise UserError(
                    f"--tasks: the model reads {self.max_length} tokens, and a text to score has "
                    f"{len(after)}: {REMEDY}"
                )
            inputs = (*before, *after)[-self.max_length - 1 : -1]
            numbers_of.setdefault(inputs, []).append(number)
        longest_first = sorted(numbers_of, key=lambda inputs: (-len(inputs), inputs))
        batches = list(self._cut(longest_first))
        scores: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="texts scored", disable=disable_tqdm) as bar:
            states = states_of(self._decoder, map(_batch, batches))
            for texts, (_, x_BSD) in zip(batches, states, strict=True):
                rows = [
                    (number, x_SD[: len(inputs)], requests[number][2])
                    for inputs, x_SD in zip(texts, x_BSD, strict=True)
                    for number in numbers_of[inputs]
                ]
                x_ND = torch.cat([x_SD[-len(after) :] for _, x_SD, after in rows])
                labels_N = torch.tensor([token for _, _, after in rows for token in after])
                nats_N, hits_N = score_head(x_ND, labels_N, self._decoder.lm_head.weight)
                lengths = [len(after) for _, _, after in rows]
                for (number, _, _), nats, hits in zip(
                    rows, nats_N.split(lengths), hits_N.split(lengths), strict=True
                ):
                    scores[number] = -float(nats.sum()), bool(hits.all())
                bar.update(len(rows))
        return [scores[number] for number in range(len(requests))]

    def _cut(self, texts: Sequence[Any]) -> Iterator[Sequence[Any]]:
        for start in range(0, len(texts), self.batch_size):
            yield texts[start : start + self.batch_size]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each text up to one of its ends. Requests with the same settings are continued
        side by side."""
        numbers_of: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            numbers_of.setdefault(repr(request.args[1]), []).append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="texts generated", disable=disable_tqdm) as bar:
            for numbers in numbers_of.values():
                for batch in self._cut(numbers):
                    contexts = [requests[number].args[0] for number in batch]
                    continued = self._continued(contexts, requests[batch[0]].args[1])
                    texts |= zip(batch, continued, strict=True)
                    bar.update(len(batch))
        return [texts[number] for number in range(len(requests))]

    def _continued(self, contexts: Sequence[str], given: dict[str, Any]) -> list[str]:
        settings = normalize_gen_kwargs(given, MOST_TOKENS)
        end = self.tokenizer.decode(self.eot_token_id)
        until = [text for text in handle_stop_sequences(settings.pop("until", None), end) if text]
        most, sampling = settings.pop("max_gen_toks"), _sampling(settings)
        if most >= self.max_length:
            raise UserError(
                f"--tasks: the model reads {self.max_length} tokens, and a task asks for {most} "
                f"further ones: {REMEDY}"
            )
        prompts = [self._prompt(text, self.max_length - most) for text in contexts]
        rows = Continuations(
            self._decoder,
            prompts,
            context=self.max_length,
            sampling=sampling,
            stop_tokens=self._ends,
        )
        for _ in range(most):
            for row in list(rows.step()):
                text = self.tokenizer.decode(rows.tokens[row][len(prompts[row]) :])
                if any(stop in text for stop in until):
                    rows.end(row)
        return [
            postprocess_generated_text(
                self.tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True), until, None
            )
            for tokens, prompt in zip(rows.tokens, prompts, strict=True)
        ]

    def _prompt(self, text: str, most: int) -> list[int]:
        return self.tok_encode(text)[-most:] or [self.prefix_token_id]


def _batch(texts: Sequence[tuple[int, ...]]) -> Batch:
    """Return inputs as a batch, padded on the right."""
    rows = torch.full((len(texts), max(map(len, texts)) + 1), IGNORE_INDEX)
    for row, tokens in zip(rows, texts, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return Batch.of_tokens(rows)


def _sampling(settings: dict[str, Any]) -> Sampling:
    """Return how tokens are chosen. Raises UserError for a setting that Lather does not have."""
    is_drawn, temperature = settings.pop("do_sample"), settings.pop("temperature", None)
    top_k, top_p = settings.pop("top_k", 50), settings.pop("top_p", 1.0)
    if settings:
        name, value = next(iter(settings.items()))
        raise UserError(
            f"--tasks: a task generates texts with {name} = {value!r}, which Lather does not have: "
            "export the model (lather export) and run `lm_eval --model hf` on that folder"
        )
    if not is_drawn:
        return Sampling(temperature=0)
    return Sampling(1.0 if temperature is None else temperature, top_k or 0, top_p)


def _tokenizer(trained: TrainedModel) -> Any:
    """Return the tokenizer of transformers, with the end of documents and the chat template of the
    run."""
    with tempfile.TemporaryDirectory(prefix="lather-") as folder:
        trained.write_tokenizer(Path(folder))
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
            folder,
            model_max_length=sys.maxsize,  # texts are cut to the context
        )
    if tokenizer.eos_token is None:
        ends = trained.stop_tokens(trained.tokenizer())
        named = tokenizer.convert_tokens_to_ids(trained.config.data.end_of_text)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(named if named in ends else min(ends))
    if not tokenizer.chat_template:
        tokenizer.chat_template = trained.chat_template().source
    return tokenizer
