"""Generates the sample text at the end of a run."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lather.config.config import Config
from lather.data.batches import HeldOut
from lather.data.documents import load_tokenizer
from lather.generation.text import encode_prompt
from lather.models.decoder import Decoder
from lather.models.generate import generate

SAMPLE = "sample.txt"
"""Name of the file in the run directory."""
PROMPT_TOKENS = 24
"""Tokens of a prompt that is taken from held-out text."""


def sample_text(model: Decoder, config: Config, run_dir: Path, held_out: HeldOut | None, *, seed: int) -> str:
    """Return `log.sample_prompt`, or else the first words of the held-out text, and the model's continuation, which reads the last
    `train.sequence_length` tokens. Empty if there is no prompt.

    Raises DataError if the prompt has no tokens.
    """
    tokenizer = load_tokenizer(run_dir / "tokenizer.json", "`lather train` with the run's configuration puts it back")
    prompt = config.log.sample_prompt or ("" if held_out is None else first_words(held_out, tokenizer, config.data.end_of_text))
    if not prompt:
        return ""
    tokens = encode_prompt(tokenizer, prompt)
    more = generate(
        model,
        tokens,
        config.log.sample_tokens,
        context=config.train.sequence_length,
        generator=torch.Generator().manual_seed(seed),
        stop_token=tokenizer.token_to_id(config.data.end_of_text),
    )
    return str(tokenizer.decode([*tokens, *more]))


def first_words(held_out: HeldOut, tokenizer: Tokenizer, end_of_text: str) -> str:
    """The beginning of the first document that is not empty."""
    tokens, end = held_out.first_tokens(), tokenizer.token_to_id(end_of_text)
    document = itertools.takewhile(lambda token: token != end, itertools.dropwhile(lambda token: token == end, tokens))
    words = tokenizer.decode(list(itertools.islice(document, PROMPT_TOKENS)))
    return str(words).rstrip("\N{REPLACEMENT CHARACTER}")  # half a letter
