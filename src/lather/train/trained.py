"""A run's product, to be read with: a checkpoint's model, the tokenizer, the chat template, and the tokens that end a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lather.data.chat import ChatTemplate
from lather.data.dataset import MANIFEST, read_manifest
from lather.data.documents import load_tokenizer
from lather.errors import DataError, require
from lather.models.decoder import Decoder
from lather.train.checkpoint import load_checkpoint, step_of
from lather.train.config import Config
from lather.train.config_file import load_config
from lather.train.find import find_checkpoint
from lather.train.held import held_checkpoint
from lather.train.loop import build_model
from lather.train.state import TrainingState
from lather.train.step import pick_device

COMPANION_FOLDER = "huggingface"
"""Folder of an imported run with what came beside the weights."""
TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of a run. Its weights are read by `decoder`, into one process; all else is light."""

    run: Path
    checkpoint: Path
    config: Config

    @classmethod
    def find(cls, run_at_step: str, step: int = -1) -> TrainedModel:
        """The checkpoint that RUN, RUN@STEP or RUN@best means, or `step` if it is not negative. Raises UserError if there is none."""
        run, checkpoint = find_checkpoint(run_at_step, step)
        return cls(run, checkpoint, load_config(run / "config.toml"))

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    def context(self, asked: int, option: str = "--context") -> int:
        """Tokens that the model reads at most: what `option` asks for, or with 0 those of a training sequence.

        Raises ConfigError if the model has fewer positions.
        """
        require(asked >= 0, option, asked, "at least 0 tokens")
        longest = self.config.model.max_position_embeddings
        require(asked <= longest, option, asked, f"at most model.max_position_embeddings ({longest})")
        return asked or self.config.train.sequence_length

    def tokenizer(self) -> Tokenizer:
        """The run's. Raises DataError if it has none."""
        return load_tokenizer(self.run / "tokenizer.json", "`lather train` with the run's configuration puts it back")

    def chat_template(self) -> ChatTemplate:
        """The one that came with the tokenizer, here or where the run's data had it from; ChatML if none did."""
        folders = list(self._tokenizer_folders())
        described = [folder for folder in folders if (folder / SETTINGS_FILE).is_file()]
        return ChatTemplate.beside(next(iter([*filter(_has_template, folders), *described, self.run])) / "tokenizer.json")

    def stop_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens that end a text."""
        names = {self.config.data.end_of_text, self.chat_template().special_tokens.get("eos_token", "")}
        names |= {manifest.end_of_text for manifest in self._manifests()}
        tokens = (tokenizer.token_to_id(name) for name in names if name)
        return frozenset(token for token in tokens if token is not None)

    def decoder(self, device: str = "auto") -> Decoder:
        """The model with the checkpoint's weights. Raises CheckpointError if it is damaged."""
        model = build_model(self.config, pick_device(device))
        with held_checkpoint(self.run, lambda: self.checkpoint) as checkpoint:
            load_checkpoint(checkpoint, TrainingState.of_model(model))
        return model.requires_grad_(False)

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Products in bfloat16 inside the block, if the run was trained so."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16")

    def _tokenizer_folders(self) -> Iterator[Path]:
        folders = [self.run, Path(self.config.data.tokenizer).parent] if self.config.data.tokenizer else [self.run]
        if self.config.init_from:
            folders.append(Path(self.config.init_from))
        for manifest in self._manifests():
            path = Path(manifest.made_from.get("recipe", {}).get("tokenizer") or "")
            folders.append(path if path.is_dir() else path.parent)
        for folder in folders:
            yield from (folder, folder / COMPANION_FOLDER)

    def _manifests(self) -> list[Any]:
        """The manifests of the data sets that the run names, as far as they are still there."""
        folders = [Path(folder) for folder in (*self.config.data.path, *self.config.data.validation.values())]
        return [read_manifest(folder) for folder in folders if (folder / MANIFEST).is_file()]


def _has_template(folder: Path) -> bool:
    if (folder / TEMPLATE_FILE).is_file():
        return True
    settings = folder / SETTINGS_FILE
    if not settings.is_file():
        return False
    try:
        return bool(json.loads(settings.read_text("utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{settings}: not readable ({error}): restore it") from None
