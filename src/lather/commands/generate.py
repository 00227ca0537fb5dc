"""`lather generate RUN`: continues texts, or answers a message or a conversation."""

from __future__ import annotations

import contextlib
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
from lather.commands.chosen_model import ChosenModel
from lather.commands.parsing import parse_arguments
from lather.config.records import Number
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
from lather.optim.options import Count, Range
from lather.train.published_model import find_model
from lather.train.trained_model import Running, TrainedModel

INPUTS = "--prompt TEXT, --prompts FILE, --message TEXT or --chat"
SEEDS = 2**64
Seed = Annotated[int, Range("an integer >= 0 and < 2**64", lambda seed: 0 <= seed < SEEDS)]
Temperature = Annotated[float, Range("0 or a number >= 0.001", lambda t: t == 0 or t >= 1e-3)]


@dataclass(frozen=True)
class GenerateArguments(ChosenModel):
    """Continue texts, or answer messages, with a checkpoint of a run."""

    run: Annotated[str, Argument(positional=True, metavar="RUN")]
    """Run directory, of which the newest checkpoint is used; or RUN@STEP or RUN@best for another
    one; or a Hugging Face folder."""
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
    tokens: Count = 200
    """Maximal number of tokens to generate."""
    temperature: Temperature = 0.7
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: Number = 50
    """Sample from this many most likely tokens; 0: from all."""
    top_p: Annotated[float, Range("in (0, 1]", lambda p: 0 < p <= 1)] = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this."""
    num_samples: Count = 1
    """Texts per prompt."""
    batch_size: Count = 16
    """Texts that are generated at the same time."""
    context: int = 0
    """Number of last tokens that the model reads, at most `model.max_position_embeddings`; 0:
    `train.sequence_length`, or for a Hugging Face folder the model's positions, at most 4,096."""
    seed: Seed = 0
    """Random seed of the first text; it grows by 1 with each further text."""
    json: bool = False
    """Print one JSON object per text, each on a line."""


def generate_command(arguments: list[str]) -> None:
    """Generate and print the texts; a single text is printed while it is generated."""
    parsed = parse_arguments(GenerateArguments, "lather generate", arguments)
    _check(parsed)
    trained = find_model(parsed.run, parsed.step, parsed.weights)
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
    inputs = {
        "--prompt": parsed.prompt,
        "--prompts": parsed.prompts,
        "--message": parsed.message,
        "--chat": parsed.chat,
    }
    names = [name for name, value in inputs.items() if value]
    if not names:
        raise UserError(f"nothing to continue: give {INPUTS}")
    if len(names) > 1:
        raise UserError(f"{' and '.join(names)} were given: use one of {INPUTS}")
    if parsed.system and names[0] not in ("--message", "--chat"):
        raise UserError(
            f"--system precedes a message, but {names[0]} was given: use --message or --chat"
        )
    # closed before this process started, as by `<&-`
    if parsed.chat and sys.stdin is None:
        raise UserError(
            "--chat reads standard input, which is closed: leave it open, or give --message TEXT"
        )
    number = parsed.num_samples
    require(number == 1 or not parsed.chat, "--num-samples", number, "1 with --chat")


def _system(parsed: GenerateArguments) -> Messages:
    return [{"role": "system", "content": parsed.system}] if parsed.system else []


def _lines_of_user() -> Iterator[str]:
    """Yield the user's messages until the input ends, without empty lines. Raises DataError if the
    input is not text."""
    for number in itertools.count():
        try:
            line = input("> ") if sys.stdin.isatty() else next(sys.stdin)
        except (EOFError, StopIteration):
            return
        except UnicodeError:
            encoding = sys.stdin.encoding.upper()
            place = f"standard input, after {number:,} lines"
            raise DataError(f"{place}: not {encoding}: give text in UTF-8") from None
        line = (line if number else line.removeprefix("\ufeff")).strip()  # a byte-order mark
        if line:
            yield line


class _Writer:
    """Generates and prints the texts of prompts. The model is loaded after all prompts have been
    checked."""

    def __init__(self, parsed: GenerateArguments, trained: TrainedModel) -> None:
        self._parsed, self._trained = parsed, trained
        self._context = trained.context(parsed.context)
        self._running = Running(parsed.dtype, parsed.layerwise)
        self._sampling = Sampling(parsed.temperature, parsed.top_k, parsed.top_p)
        self._tokenizer: Tokenizer = trained.tokenizer()
        self._ends = trained.stop_tokens(self._tokenizer)
        self._texts_made = 0
        self._noted: set[str] = set()

    @functools.cached_property
    def _format(self) -> ConversationFormat:
        return ConversationFormat(self._tokenizer, self._trained.chat_template())

    @contextlib.contextmanager
    def _decoder(self) -> Iterator[Decoder]:
        with (
            self._trained.running(self._running) as decoder,
            self._trained.precision(decoder.device, self._running.dtype),
        ):
            yield decoder

    def write_all(self, prompts: list[Prompt]) -> None:
        """Write the texts of all prompts, `num_samples` for each."""
        encoded = [self._encode(prompt) for prompt in prompts]
        with self._decoder() as decoder:
            self._write_all(decoder, prompts, encoded)

    def _write_all(self, decoder: Decoder, prompts: list[Prompt], encoded: list[list[int]]) -> None:
        live = len(prompts) == self._parsed.num_samples == 1 and not self._parsed.json
        numbers, samples = range(len(prompts)), range(self._parsed.num_samples)
        # texts and conversations end differently, so that no batch mixes them
        jobs = itertools.groupby(
            itertools.product(numbers, samples), lambda job: isinstance(prompts[job[0]], str)
        )
        for are_texts, same_kind in jobs:
            while batch := list(itertools.islice(same_kind, self._parsed.batch_size)):
                if live and are_texts:
                    print(self._tokenizer.decode(encoded[0]), end="", flush=True)
                tokens = [encoded[number] for number, _ in batch]
                texts = self._continue(decoder, tokens, answers=not are_texts, live=live)
                for (number, sample), text in zip(batch, texts, strict=True):
                    if self._parsed.json:
                        self._print_row(prompts[number], sample, text)
                    elif live:
                        print()
                    else:
                        print(rule(f"prompt {number + 1}, sample {sample + 1}"))
                        before = self._tokenizer.decode(encoded[number]) if are_texts else ""
                        print(before + text.text)

    def talk(self, lines: Iterator[str]) -> None:
        """Answer one message after the other, each with the whole conversation so far as its
        context."""
        with self._decoder() as decoder:
            self._talk(decoder, lines)

    def _talk(self, decoder: Decoder, lines: Iterator[str]) -> None:
        messages = _system(self._parsed)
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
            ends = self._ends | self._format.stop_tokens
            ending = Ending(self._parsed.tokens, ends, self._format.stop_texts)
        first = self._parsed.seed + self._texts_made
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
            seeds=[(first + number) % SEEDS for number in range(len(prompts))],
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

    def _print_row(self, prompt: Prompt, sample: int, text: ContinuedText) -> None:
        row = {
            "prompt" if isinstance(prompt, str) else "messages": prompt,
            "sample": sample,
            "text": text.text,
            "tokens": text.num_tokens,
            "stopped": text.stopped,
        }
        if isinstance(prompt, Conversation) and prompt.tools:
            row["tools"] = prompt.tools
        print(json.dumps(row, ensure_ascii=False), flush=True)
