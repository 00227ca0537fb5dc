"""`lather generate RUN`: continues one or more texts, texts from a file, or answers a message or a
conversation."""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tokenizers import Tokenizer

from lather.argument import Argument
from lather.commands.parsing import parse_arguments
from lather.data.conversations import Messages
from lather.errors import DataError, UserError, require
from lather.generation.prompts import (
    Conversation,
    ConversationFormat,
    Prompt,
    encode_text,
    read_prompts,
)
from lather.generation.text import ContinuedText, Ending, continue_texts
from lather.lines import rule
from lather.models.decoder import Decoder
from lather.models.generate import Sampling
from lather.train.trained_model import TrainedModel

INPUTS = "--prompt TEXT, --prompts FILE, --message TEXT or --chat"
LARGEST_SEED = 2**64


@dataclass(frozen=True)
class GenerateArguments:
    """Continue texts, or answer messages, with a checkpoint of a run."""

    run: Annotated[str, Argument(positional=True, metavar="RUN")]
    """Run directory, of which the newest checkpoint is used; or RUN@STEP or RUN@best for another
    one."""
    prompt: Annotated[tuple[str, ...], Argument(repeated=True)] = ()
    """Text to continue; may be given several times."""
    prompts: Path | None = None
    """File of prompts: one text per line, or a .jsonl file of objects with "prompt" or "messages"
    (and "tools")."""
    message: str = ""
    """Message to answer, formatted with the tokenizer's chat template."""
    chat: bool = False
    """Conversation: each line typed at the terminal, or piped in, is a message to answer."""
    system: str = ""
    """System message, with --message or --chat."""
    tokens: int = 200
    """Maximal number of tokens to generate."""
    temperature: float = 0.7
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: int = 50
    """Sample from this many most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this."""
    num_samples: int = 1
    """Texts per prompt."""
    batch_size: int = 16
    """Texts that are generated at the same time."""
    context: int = 0
    """Number of last tokens that the model reads; 0: `train.sequence_length`, at most
    `model.max_position_embeddings`."""
    seed: int = 0
    """Random seed of the first text; each further text has the next one."""
    step: int = -1
    """Step of the checkpoint; negative: the newest."""
    json: bool = False
    """Print one JSON object per text, each on a line."""


def generate_command(arguments: list[str]) -> None:
    """Generate and print the texts; a single one is printed while it is generated."""
    parsed = parse_arguments(GenerateArguments, "lather generate", arguments)
    _check(parsed)
    trained = TrainedModel.find(parsed.run, parsed.step)
    writer = _Writer(parsed, trained)
    if parsed.chat:
        writer.talk(_lines_of_user())
    elif parsed.prompts is not None:
        writer.write_all(read_prompts(parsed.prompts))
    elif parsed.message:
        writer.write_all([[*_system(parsed), {"role": "user", "content": parsed.message}]])
    else:
        writer.write_all(list(parsed.prompt))


def _check(parsed: GenerateArguments) -> None:
    for name in ("tokens", "num_samples", "batch_size"):
        require(
            getattr(parsed, name) >= 1,
            f"--{name.replace('_', '-')}",
            getattr(parsed, name),
            "at least 1",
        )
    require(
        parsed.temperature == 0 or parsed.temperature >= 1e-3,
        "--temperature",
        parsed.temperature,
        "0 or at least 0.001",
    )
    require(0 <= parsed.seed < LARGEST_SEED, "--seed", parsed.seed, "at least 0 and below 2**64")
    require(parsed.top_k >= 0, "--top-k", parsed.top_k, "at least 0")
    require(0 < parsed.top_p <= 1, "--top-p", parsed.top_p, "above 0 and at most 1")
    require(
        not parsed.chat or parsed.num_samples == 1,
        "--num-samples",
        parsed.num_samples,
        "1 with --chat",
    )
    inputs = {
        "--prompt": bool(parsed.prompt),
        "--prompts": bool(parsed.prompts),
        "--message": bool(parsed.message),
        "--chat": parsed.chat,
    }
    given = [name for name, is_given in inputs.items() if is_given]
    if not given:
        raise UserError(f"nothing to continue: give {INPUTS}")
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} were given: use one of {INPUTS}")
    if parsed.system and given[0] not in ("--message", "--chat"):
        raise UserError(
            f"--system precedes a message, but {given[0]} was given: use --message or --chat"
        )


def _system(parsed: GenerateArguments) -> Messages:
    return [{"role": "system", "content": parsed.system}] if parsed.system else []


def _lines_of_user() -> Iterator[str]:
    """Yield the user's messages until the input ends, without empty lines.

    Raises DataError if the input is not text.
    """
    for number in itertools.count():
        try:
            line = input("> ") if sys.stdin.isatty() else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except UnicodeError:
            place = f"standard input, after {number:,} lines"
            encoding = sys.stdin.encoding.upper()
            raise DataError(f"{place}: not {encoding}: give text in UTF-8") from None
        if number == 0:
            line = line.removeprefix("\ufeff")  # a byte-order mark
        if line.strip():
            yield line.strip()


class _Writer:
    """Generates and prints the texts of prompts. The model is loaded only after all prompts have
    been checked."""

    def __init__(self, parsed: GenerateArguments, trained: TrainedModel) -> None:
        self._parsed, self._trained = parsed, trained
        self._context = trained.context(parsed.context)
        self._sampling = Sampling(parsed.temperature, parsed.top_k, parsed.top_p)
        self._tokenizer: Tokenizer = trained.tokenizer()
        self._ends = trained.stop_tokens(self._tokenizer)
        self._texts_made = 0
        self._noted: set[str] = set()

    @functools.cached_property
    def _format(self) -> ConversationFormat:
        return ConversationFormat(self._tokenizer, self._trained.chat_template())

    def write_all(self, prompts: list[Prompt]) -> None:
        """Write the texts of all prompts, `num_samples` for each."""
        encoded = [self._encode(prompt) for prompt in prompts]
        decoder = self._trained.decoder()
        live = len(prompts) == self._parsed.num_samples == 1 and not self._parsed.json
        for batch in self._batches(prompts):
            if live:
                print(self._shown_before(prompts[0], encoded[0]), end="", flush=True)
            answers = not isinstance(prompts[batch[0][0]], str)
            continued = self._continue(
                decoder, [encoded[number] for number, _ in batch], answers=answers, live=live
            )
            for (number, sample), one in zip(batch, continued, strict=True):
                if self._parsed.json:
                    self._print_row(prompts[number], sample, one)
                elif live:
                    print()
                else:
                    print(rule(f"prompt {number + 1}, sample {sample + 1}"))
                    print(self._shown_before(prompts[number], encoded[number]) + one.text)

    def _batches(self, prompts: list[Prompt]) -> Iterator[list[tuple[int, int]]]:
        """Yield batches of (number of the prompt, number of the sample). A batch never mixes texts
        and conversations, which end differently."""
        jobs = (
            (number, sample)
            for number in range(len(prompts))
            for sample in range(self._parsed.num_samples)
        )
        for _, alike in itertools.groupby(jobs, key=lambda job: isinstance(prompts[job[0]], str)):
            while batch := list(itertools.islice(alike, self._parsed.batch_size)):
                yield batch

    def talk(self, lines: Iterator[str]) -> None:
        """Answer one message after the other, each with the whole conversation so far as its
        context."""
        decoder, messages = self._trained.decoder(), _system(self._parsed)
        for line in lines:
            messages.append({"role": "user", "content": line})
            prompt = self._encode(messages)
            if len(prompt) > self._context:
                print(
                    f"(the model reads the last {self._context} of the conversation's "
                    f"{len(prompt)} tokens)",
                    file=sys.stderr,
                )
            (answer,) = self._continue(decoder, [prompt], answers=True, live=not self._parsed.json)
            if self._parsed.json:
                self._print_row(messages, 0, answer)
            else:
                print(flush=True)
            messages.append({"role": "assistant", "content": answer.text})

    def _continue(
        self, decoder: Decoder, prompts: list[list[int]], *, answers: bool, live: bool
    ) -> list[ContinuedText]:
        """Continue the prompts. If they are conversations (`answers`), the chat template's end of
        an answer ends them too."""
        ending = Ending(self._parsed.tokens, self._ends)
        if answers:
            ending = Ending(
                self._parsed.tokens, self._ends | self._format.stop_tokens, self._format.stop_texts
            )
        seeds = [
            (self._parsed.seed + self._texts_made + number) % LARGEST_SEED
            for number in range(len(prompts))
        ]
        self._texts_made += len(prompts)

        def show(row: int, piece: str) -> None:
            if live:
                print(piece, end="", flush=True)

        return continue_texts(
            decoder,
            self._tokenizer,
            prompts,
            ending,
            context=self._context,
            sampling=self._sampling,
            seeds=seeds,
            show=show,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return encode_text(self._tokenizer, prompt)
        tokens = self._format.prompt(prompt)
        for kind, detail in self._format.notes(prompt):
            if kind not in self._noted:
                self._noted.add(kind)
                print(f"({kind}: {detail})", file=sys.stderr)
        return tokens

    def _shown_before(self, prompt: Prompt, encoded: list[int]) -> str:
        """Return the text to print before a continuation: the decoded prompt, or nothing for a
        conversation."""
        return str(self._tokenizer.decode(encoded)) if isinstance(prompt, str) else ""

    def _print_row(self, prompt: Prompt, sample: int, one: ContinuedText) -> None:
        kind = "prompt" if isinstance(prompt, str) else "messages"
        row = {
            kind: prompt,
            "sample": sample,
            "text": one.text,
            "tokens": one.num_tokens,
            "stopped": one.stopped,
        }
        if isinstance(prompt, Conversation) and prompt.tools:
            row["tools"] = prompt.tools
        print(json.dumps(row, ensure_ascii=False), flush=True)
