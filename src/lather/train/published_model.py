"""A model in a Hugging Face folder, which commands evaluate and run as they do a run's, without a
copy of its weights; and the configuration of a run that is made of it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer

from lather.config.config import Config
from lather.config.context_length import reaching
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.config.run_folder import CONFIGURATION
from lather.data.config import DataConfig
from lather.data.documents import load_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.errors import ConfigError, ExchangeError, UserError
from lather.files import read_text
from lather.hub import CONFIG_FILE, TOKENIZER_FILE
from lather.models.families import ModelConfig
from lather.models.hf.model_export import token_ids
from lather.models.hf.model_folder import (
    notes_on_config,
    open_hugging_face,
    read_config,
)
from lather.safetensors_file import TensorSource
from lather.train.trained_model import TrainedModel

FURTHER_TRAINING = optim_config(lr=1e-4)
"""Optimizer of an imported run: the trainer's default rule, as with `lather train --init-from`. Its
rate is a hundredth of the default, which is meant for random weights and would undo what the model
has learned."""

LONGEST_CONTEXT = 4096
"""Tokens of a text that a published model reads at most if no option says how many: many models
have more positions than the memory of their device holds."""


class PublishedModel(TrainedModel):
    """The model of a Hugging Face folder. `run` and `checkpoint` are that folder, and `config` that
    of the run that `lather import` would make of it."""

    is_run: ClassVar[bool] = False

    @property
    def step(self) -> int:
        return 0

    @property
    def default_context(self) -> int:
        """The tokens of a text that the model reads: all its positions, at most
        LONGEST_CONTEXT."""
        return min(self.config.model.max_position_embeddings, LONGEST_CONTEXT)

    def tokenizer(self) -> Tokenizer:
        """Load the folder's tokenizer. Raises DataError if it has none."""
        return load_tokenizer(self.run / TOKENIZER_FILE, "put the model's own into the folder")

    @contextlib.contextmanager
    def _tensors(self) -> Iterator[TensorSource]:
        yield open_hugging_face(self.run)[0]

    def _exported_tokenizer(self) -> Path:
        return self.run


def find_model(name: str, step: int = -1, weights: str = "raw") -> TrainedModel:
    """Find the checkpoint that RUN, RUN@STEP or RUN@best names, as `TrainedModel.find`, or the
    model of a Hugging Face folder, and print what should be known of it.

    Raises UserError if there is none, or for a step or weights of a Hugging Face folder, which has
    one set of weights; ExchangeError if its model is not supported.
    """
    folder = Path(name)
    if not (folder / CONFIG_FILE).is_file() or (folder / CONFIGURATION).exists():
        trained = TrainedModel.find(name, step, weights)
        if (context_ranks := trained.config.parallel.cp) > 1:
            alone = f"this is one process, without the run's {context_ranks} context ranks"
            print(f"note: {alone}: it has whole sequences, not slices", file=sys.stderr)
        return trained
    if step >= 0 or weights != "raw":
        option = f"--step {step}" if step >= 0 else f"--weights {weights}"
        raise UserError(
            f"{option} applies to runs, and {name} is a Hugging Face folder: leave it out"
        )
    for note in notes_on_config(folder):
        print(f"note: {note}", file=sys.stderr)
    config = published_config(folder, folder, reaching(read_config(folder)))
    return PublishedModel(folder, folder, config)


def published_config(
    folder: Path, run: Path, model: ModelConfig, ignore_fields: tuple[str, ...] = ()
) -> Config:
    """Return the configuration of a run of a Hugging Face folder's model. Raises ExchangeError if
    it is not valid."""
    length = min(LoopConfig().sequence_length, model.max_position_embeddings)
    try:
        return Config(
            run_dir=str(run),
            ignore_fields=ignore_fields,
            model=model,
            data=_data(run, folder),
            optim=FURTHER_TRAINING,
            train=LoopConfig(sequence_length=length),
        )
    except ConfigError as error:
        raise ExchangeError(f"{folder / CONFIG_FILE}: {error}") from None


def _data(run: Path, folder: Path) -> DataConfig:
    """Return data settings for further training: the model's own tokenizer, found from any working
    directory, and the model's own end of text."""
    if not (folder / TOKENIZER_FILE).is_file():
        return DataConfig()
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE, "download it again, or remove it")
    ids = token_ids(json.loads(read_text(folder / CONFIG_FILE))).get("eos_token_id")
    last = ids[0] if isinstance(ids, list) and ids else ids
    end_of_text: str | None = END_OF_TEXT
    if tokenizer.token_to_id(END_OF_TEXT) is None and isinstance(last, int) and 0 <= last < 2**32:
        end_of_text = tokenizer.id_to_token(last)
    return DataConfig(
        tokenizer=str(run.resolve() / TOKENIZER_FILE), end_of_text=end_of_text or END_OF_TEXT
    )
