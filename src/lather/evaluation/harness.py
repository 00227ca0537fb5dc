"""Runs tasks of lm-evaluation-harness (extra `lm-eval`) on models trained with Lather; registers
the model type "lather" with `lm_eval`.

The log-likelihood of a continuation is computed from the last `context` tokens of the request's
context and continuation. Rows of a batch are padded on the right, which causal attention does not
see. Texts are generated with a key-value cache. Everything runs in one process.

Letters: B requests per batch, S positions.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tokenizers import Tokenizer
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lather.data.batches import Batch
from lather.data.sequences import IGNORE_INDEX
from lather.errors import UserError
from lather.evaluation.scoring import score_labels
from lather.generation.prompts import ConversationFormat
from lather.generation.text import Ending, continue_texts
from lather.models.decoder import Decoder
from lather.models.generate import Sampling
from lather.train.trained_model import TrainedModel

ANY = 1.0, 50
"""Temperature and top-k for tasks that ask for sampling without values; these are the defaults of
transformers."""


@register_model("lather")
class HarnessModel(TemplateLM):
    """Adapts a checkpoint of a run to the model interface of lm-evaluation-harness."""

    def __init__(
        self,
        run: str | TrainedModel,
        *,
        batch_size: int | str = 8,
        device: str | None = None,
        context: int = 0,
        max_gen_toks: int = 256,
        max_batch_size: int | None = None,
        decoder: Decoder | None = None,
    ) -> None:
        """`run`: RUN, RUN@STEP or RUN@best; `context`: tokens that the model reads, 0 for the
        length of a training sequence; `max_gen_toks`: generated tokens for tasks that give no
        number; `max_batch_size`: passed by the harness and ignored.

        Raises UserError if the checkpoint does not exist, or if the tokenizer has no token that
        ends a text.
        """
        super().__init__()
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise UserError(f"batch_size = {batch_size!r} is not valid: give a number, at least 1")
        self._trained = run if isinstance(run, TrainedModel) else TrainedModel.find(run)
        self._context, self._batch_size, self._max_gen_toks = (
            self._trained.context(context),
            int(batch_size),
            max_gen_toks,
        )
        self._text_tokenizer: Tokenizer = self._trained.tokenizer()
        self._text_tokenizer.encode_special_tokens = (
            False  # chat templates write special tokens by name
        )
        self._ends = self._trained.stop_tokens(self._text_tokenizer)
        if not self._ends:
            raise UserError(
                f"{self._trained.run}: its tokenizer has no end-of-text token, which tasks need: "
                "set data.end_of_text"
            )
        self._decoder = decoder or self._trained.decoder(device or "auto")
        self._device = next(self._decoder.parameters()).device
        self._in_conversation = False

    # --- tokens -----------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document."""
        names = (
            self._trained.config.data.end_of_text,
            self._trained.chat_template().special_tokens.get("eos_token", ""),
        )
        known = [
            token
            for name in names
            if name and (token := self._text_tokenizer.token_to_id(name)) is not None
        ]
        return known[0] if known else min(self._ends)

    @cached_property
    def prefix_token_id(self) -> int:
        """The first token of a text without a context."""
        name = self._trained.chat_template().special_tokens.get("bos_token", "")
        token: int | None = self._text_tokenizer.token_to_id(name) if name else None
        return self.eot_token_id if token is None else token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Encode a text; a text that already begins with the prefix token does not get it twice."""
        tokens: list[int] = self._text_tokenizer.encode(
            string, add_special_tokens=add_special_tokens is not False
        ).ids
        twice = add_special_tokens is None and tokens[:2] == [self.prefix_token_id] * 2
        return tokens[1:] if twice else tokens

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches encoded requests."""
        texts = self._text_tokenizer.to_str() + self._conversation.template.source
        return f"lather-{hashlib.sha256(texts.encode()).hexdigest()[:16]}"

    # --- conversations ----------------------------------------------------------------------------

    @cached_property
    def _conversation(self) -> ConversationFormat:
        return ConversationFormat(self._text_tokenizer, self._trained.chat_template())

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template's source, which the harness records."""
        return self._conversation.template.source if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format a conversation with the tokenizer's template; later answers also end where the
        template ends them."""
        self._in_conversation = True
        text = self._conversation.text(list(chat_history), asking=add_generation_prompt)
        last = chat_history[-1] if chat_history else {}
        if add_generation_prompt or last.get("role") != "assistant":
            return text
        before, content, _ = text.rpartition(
            last["content"]
        )  # the model continues a started answer: leave out its end
        return before + content

    # --- log-likelihoods --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        answers = self._score(pairs, disable_tqdm)
        for (texts, _before, _after), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log-likelihoods of whole texts. Each text is cut into windows of the context's
        length that predict every token once."""
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            own = map(
                make_disjoint_window,
                get_rolling_token_windows(tokens, self.prefix_token_id, self._context, 1),
            )
            windows += [(list(before), list(after)) for before, after in own]
            owners += [owner] * (len(windows) - len(owners))
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._score(windows, disable_tqdm), strict=True):
            sums[owner] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _score(
        self, pairs: Sequence[tuple[list[int], list[int]]], silent: bool
    ) -> list[tuple[float, bool]]:
        """Return, for each pair, the log-likelihood of the second tokens after the first, and
        whether all of them were the most likely ones. Pairs of similar length share a batch."""
        for _, after in pairs:
            if len(after) > self._context:
                raise UserError(
                    f"a continuation has {len(after)} tokens, but the model reads {self._context}: "
                    "give more (--sequence-length)"
                )
        order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        answers: dict[int, tuple[float, bool]] = {}
        for numbers in tqdm(
            list(_in_batches(order, self._batch_size)), desc="batches scored", disable=silent
        ):
            batch = _batch([pairs[number] for number in numbers], self._context)
            with self._trained.precision(self._device):
                nats_N, hits_N = score_labels(self._decoder, batch)
            counts = [len(pairs[number][1]) for number in numbers]
            for number, nats, hits in zip(
                numbers,
                nats_N.double().cpu().split(counts),
                hits_N.cpu().split(counts),
                strict=True,
            ):
                answers[number] = -nats.sum().item(), bool(hits.all())
        return [answers[number] for number in range(len(pairs))]

    # --- generation -------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context up to one of the request's stop texts or a token that ends a
        text."""
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True, default=str)].append(number)
        texts: dict[int, str] = {}
        with tqdm(total=len(requests), desc="texts generated", disable=disable_tqdm) as bar:
            for numbers in groups.values():
                wishes = requests[numbers[0]].args[1]
                for some in _in_batches(
                    sorted(numbers, key=lambda number: -len(requests[number].args[0])),
                    self._batch_size,
                ):
                    texts |= zip(
                        some,
                        self._generate([requests[number].args[0] for number in some], wishes, some),
                        strict=True,
                    )
                    bar.update(len(some))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, texts[number])
        return [texts[number] for number in range(len(requests))]

    def _generate(
        self, contexts: Sequence[str], wishes: dict[str, Any], seeds: Sequence[int]
    ) -> list[str]:
        until = wishes.get("until") or ()
        lengths = [
            wishes[name]
            for name in ("max_gen_toks", "max_new_tokens", "max_tokens")
            if wishes.get(name) is not None
        ]
        num_tokens = int(lengths[0]) if lengths else self._max_gen_toks
        room = max(
            1, self._context - num_tokens, self._context // 2
        )  # the context slides when more tokens are generated
        prompts = [self.tok_encode(text)[-room:] or [self.prefix_token_id] for text in contexts]
        stop_texts = (until,) if isinstance(until, str) else tuple(until)
        stop_tokens = self._ends | {
            token
            for text in stop_texts
            if (token := self._text_tokenizer.token_to_id(text)) is not None
        }
        if self._in_conversation:
            stop_tokens, stop_texts = (
                stop_tokens | self._conversation.stop_tokens,
                stop_texts + self._conversation.stop_texts,
            )
        ending, sampling = Ending(num_tokens, stop_tokens, stop_texts), _sampling(wishes)
        with self._trained.precision(self._device):
            continued = continue_texts(
                self._decoder,
                self._text_tokenizer,
                prompts,
                ending,
                context=self._context,
                sampling=sampling,
                seeds=seeds,
            )
        return [one.text for one in continued]


def _sampling(wishes: dict[str, Any]) -> Sampling:
    """Read how a task samples. Without `do_sample` or a temperature, decoding is greedy."""
    given = {
        name: float(wishes[name])
        for name in ("temperature", "top_k", "top_p")
        if wishes.get(name) is not None
    }
    sampled = wishes.get("do_sample")
    temperature = 0.0 if sampled is False else given.get("temperature", ANY[0] if sampled else 0.0)
    return Sampling(temperature, int(given.get("top_k", ANY[1])), given.get("top_p", 1.0))


def _in_batches(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[first : first + size] for first in range(0, len(numbers), size))


def _batch(pairs: Sequence[tuple[list[int], list[int]]], context: int) -> Batch:
    """Make a batch with one row per pair: the pair's last `context` inputs; the labels are its
    second tokens. Shorter rows are padded at their end."""
    inputs = [[*before, *after][:-1][-context:] for before, after in pairs]
    labels = [
        [IGNORE_INDEX] * (len(tokens) - len(after)) + after
        for tokens, (_, after) in zip(inputs, pairs, strict=True)
    ]
    inputs_BS = pad_sequence([torch.tensor(row) for row in inputs], batch_first=True)
    lengths_B = torch.tensor([len(row) for row in inputs])
    padding_BS = torch.arange(inputs_BS.shape[1]) >= lengths_B[:, None]
    labels_BS = pad_sequence(
        [torch.tensor(row) for row in labels], batch_first=True, padding_value=IGNORE_INDEX
    )
    return Batch(inputs_BS, labels_BS, padding_BS=padding_BS)


def run_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    manager: TaskManager,
    *,
    limit: int = 0,
    shots: int = -1,
    chat: bool = False,
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task. `manager`: from `find_tasks`; `limit`: documents per task, 0
    for all; `shots`: examples before each document, negative for the task's own number; `chat`:
    format documents with the chat template.

    Raises UserError if the tasks' data is missing and cannot be downloaded.
    """
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            num_fewshot=None if shots < 0 else shots,
            limit=limit or None,
            apply_chat_template=chat,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except OSError as error:
        if error.errno is not None:
            raise
        raise UserError(
            f"--tasks {','.join(tasks)}: their data cannot be downloaded ({error}): connect, or "
            "download it before"
        ) from None
    return {
        task: {name: value for name, value in row.items() if isinstance(value, float)}
        for task, row in found["results"].items()
    }


def find_tasks(tasks: Iterable[str], folder: Path | None = None) -> tuple[TaskManager, list[str]]:
    """Return a manager of the harness's tasks and those of `folder`, and the names of the tasks
    that `tasks` (with wildcards) match.

    Raises UserError if one of `tasks` matches none.
    """
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-folder {folder}: not a folder: give one with YAML files of tasks")
    manager = TaskManager(include_path=None if folder is None else str(folder))
    found: dict[str, None] = {}
    for task in tasks:
        matched = manager.match_tasks([task])
        found |= dict.fromkeys(matched)
        if not matched:
            raise UserError(
                f"--tasks {task}: no such task: `python -m lm_eval ls tasks` lists them, and "
                "--task-folder adds your own"
            )
    return manager, list(found)
