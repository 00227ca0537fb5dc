"""`lather generate RUN --prompt TEXT`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from lather.commands.asking import ask, chat_template_of
from lather.commands.parsing import parse_arguments
from lather.data.documents import load_tokenizer
from lather.errors import UserError, require
from lather.models.decoder import Decoder
from lather.models.generate import generate
from lather.train.checkpoint import list_checkpoints, load_checkpoint
from lather.train.config import Config
from lather.train.config_file import load_config
from lather.train.loop import build_model, sample_text
from lather.train.state import TrainingState
from lather.train.step import pick_device


@dataclass(frozen=True)
class GenerateArguments:
    """Continue a text with the newest checkpoint of a run."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run directory."""
    prompt: str
    """Text to continue."""
    chat: bool = False
    """The prompt is a question to a model of conversations: its chat template is put around it, and the answer alone is printed."""
    tokens: int = 200
    """Most tokens to add."""
    temperature: float = 0.7
    """Spread of the choice; 0 always takes the most likely token."""
    top_k: int = 50
    """Choose among this many most likely tokens; 0: among all."""
    context: int = 0
    """Tokens that the model reads, the last ones; 0: `train.sequence_length`, at most `model.max_position_embeddings`."""
    seed: int = 0
    """Fixes the choice."""


def generate_command(arguments: list[str]) -> int:
    """Print the prompt and what the model makes of it."""
    parsed = parse_arguments(GenerateArguments, "lather generate", arguments)
    require(parsed.tokens >= 1, "--tokens", parsed.tokens, "at least 1")
    require(parsed.temperature == 0 or parsed.temperature >= 1e-3, "--temperature", parsed.temperature, "0 or at least 0.001")
    require(0 <= parsed.seed < 2**64, "--seed", parsed.seed, "at least 0 and below 2**64")
    require(parsed.top_k >= 0, "--top-k", parsed.top_k, "at least 0")
    require(parsed.context >= 0, "--context", parsed.context, "at least 0 tokens")
    config_file = parsed.run / "config.toml"
    if not config_file.exists():
        raise UserError(f"{parsed.run}: not a run (it has no config.toml): give the run_dir of a training run")
    config = load_config(config_file)
    longest = config.model.max_position_embeddings
    require(parsed.context <= longest, "--context", parsed.context, f"at most model.max_position_embeddings ({longest})")
    if parsed.context:
        config = replace(config, train=replace(config.train, sequence_length=parsed.context))

    checkpoints = list_checkpoints(parsed.run / "checkpoints")
    if not checkpoints:
        raise UserError(f"{parsed.run / 'checkpoints'}: no checkpoint yet: let the run train first")
    model = build_model(config, pick_device("auto"))
    load_checkpoint(checkpoints[-1], TrainingState.of_model(model))
    if parsed.chat:
        print(_answer(model, config, parsed))
        return 0
    text = sample_text(
        model,
        config,
        parsed.run,
        parsed.prompt,
        parsed.tokens,
        seed=parsed.seed,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
    )
    print(text)
    return 0


def _answer(model: Decoder, config: Config, parsed: GenerateArguments) -> str:
    tokens, stop_token = ask(chat_template_of(config, parsed.run), parsed.run, parsed.prompt)
    tokenizer = load_tokenizer(parsed.run / "tokenizer.json", "`lather train` with the run's configuration puts it back")
    more = generate(
        model,
        tokens,
        parsed.tokens,
        context=config.train.sequence_length,
        temperature=parsed.temperature,
        top_k=parsed.top_k,
        generator=torch.Generator().manual_seed(parsed.seed),
        stop_token=tokenizer.token_to_id(config.data.end_of_text) if stop_token is None else stop_token,
    )
    return str(tokenizer.decode(more)).strip()
