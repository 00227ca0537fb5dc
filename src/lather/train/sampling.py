"""Generates the sample text at the end of a run."""

from __future__ import annotations

from pathlib import Path

import torch

from lather.config.config import Config
from lather.data.documents import load_tokenizer
from lather.generation.text import encode_prompt
from lather.models.decoder import Decoder
from lather.models.generate import generate

SAMPLE = "sample.txt"
"""Name of the file in the run directory."""


def sample_text(model: Decoder, config: Config, run_dir: Path, prompt: str, num_tokens: int, *, seed: int) -> str:
    """Return `prompt` and its continuation by the model, which reads the last `train.sequence_length` tokens.

    Raises DataError if the prompt has no tokens.
    """
    tokenizer = load_tokenizer(run_dir / "tokenizer.json", "`lather train` with the run's configuration puts it back")
    tokens = encode_prompt(tokenizer, prompt)
    more = generate(
        model,
        tokens,
        num_tokens,
        context=config.train.sequence_length,
        generator=torch.Generator().manual_seed(seed),
        stop_token=tokenizer.token_to_id(config.data.end_of_text),
    )
    return str(tokenizer.decode([*tokens, *more]))
