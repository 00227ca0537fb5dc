"""A trained model, for evaluation and generation: a checkpoint's weights, the tokenizer, the chat
template and the stop tokens.

It also generates the sample text at the end of a run.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from tokenizers import Tokenizer

from lather.checkpoint.chosen_weights import chosen_weights
from lather.checkpoint.folder import find_checkpoint, step_of
from lather.checkpoint.held import held_checkpoint
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.data.batches import HeldOut
from lather.data.chat import ChatTemplate
from lather.data.documents import load_tokenizer
from lather.engine.engine import build_model
from lather.engine.step import pick_device
from lather.errors import require
from lather.generation.prompts import ConversationFormat, encode_text
from lather.hub import TOKENIZER_FILE
from lather.memory_limits import free_memory
from lather.models.adapted import MergedTensors
from lather.models.decoder import Decoder
from lather.models.generate import generate
from lather.models.hf.model_export import MAX_SHARD_BYTES, save_hugging_face, write_companions
from lather.models.streamed import StreamedDecoder
from lather.pipeline.model_part import allocate
from lather.safetensors_file import TensorSource
from lather.train.companions import (
    COMPANION_FOLDER,
    SETTINGS_FILE,
    companion_folders,
    generation_ends,
    has_template,
    manifests,
    same_tokenizer,
)
from lather.train.initial_weights import checked_pieces, copy_weights
from lather.train.run_config import current_config

SAMPLE = "sample.txt"
"""Name of the file with the sample in the run directory."""
PROMPT_TOKENS = 24
"""Tokens of a prompt that is taken from held-out text."""
FILLED = 0.9
"""Fraction of a device's free memory that weights may take; the rest is for activations."""
GIB = 2**30


Layerwise = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Running:
    """How a model runs."""

    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of weights, activations and products; None: as the model was trained."""
    layerwise: Layerwise = "auto"
    """Whether weights are read from disk when a block runs; auto: if they do not fit in memory."""

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]


AS_TRAINED = Running()


@dataclass(frozen=True)
class TrainedModel:
    """A checkpoint of a run. Only `decoder` and `export` read the weights."""

    run: Path
    checkpoint: Path
    config: Config
    weights: str = "raw"
    """Which weights of it (`lather.checkpoint.chosen_weights`)."""
    is_run: ClassVar[bool] = True
    """Whether the folder is that of a run, which keeps records of evaluations."""

    @classmethod
    def find(cls, run_at_step: str, step: int = -1, weights: str = "raw") -> TrainedModel:
        """Find the checkpoint that RUN, RUN@STEP or RUN@best names, or that of `step` if it is not
        negative. Raises UserError if there is none."""
        run, checkpoint = find_checkpoint(run_at_step, step)
        return cls(run, checkpoint, current_config(run), weights)

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    @property
    def default_context(self) -> int:
        """The tokens of a text that the model reads: those of a training sequence."""
        return self.config.train.sequence_length

    def context(self, wanted: int, option: str = "--context") -> int:
        """Return how many tokens of a text the model reads at most: `wanted`, which is the value of
        `option`, or `default_context` if that is 0.

        Raises ConfigError if the model has fewer positions.
        """
        longest = self.config.model.max_position_embeddings
        limit = f"at most model.max_position_embeddings ({longest})"
        require(wanted >= 0, option, wanted, "at least 0 tokens")
        require(wanted <= longest, option, wanted, limit)
        return wanted or self.default_context

    def tokenizer(self) -> Tokenizer:
        """Load the run's tokenizer. Raises DataError if it has none."""
        return load_tokenizer(
            self.run / TOKENIZER_FILE, "`lather train` with the run's configuration puts it back"
        )

    def chat_template(self) -> ChatTemplate:
        """Return the template that belongs to the tokenizer, else that which formatted the run's
        conversations, else ChatML."""
        folders = list(companion_folders(self.run, self.config))
        named = [folder for folder in folders if has_template(folder)]
        named = named or [folder for folder in folders if (folder / SETTINGS_FILE).is_file()]
        data_templates = self._data_templates()
        if not named and data_templates:
            return ChatTemplate(data_templates[0], {})
        return ChatTemplate.beside([*named, self.run][0] / TOKENIZER_FILE)

    def has_conversations(self) -> bool:
        """Return whether a chat template came with the tokenizer or formatted the run's data."""
        folders = companion_folders(self.run, self.config)
        return bool(self._data_templates()) or any(map(has_template, folders))

    def _data_templates(self) -> list[str]:
        """Return the chat templates that formatted the run's data sets."""
        templates = [manifest.made_from["chat_template"] for manifest in manifests(self.config)]
        return [template for template in templates if template]

    def stop_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the tokens that end a text: the run's end of documents, the tokenizer's end, and
        those of the settings for generation of the model from which the run comes."""
        names = {
            self.config.data.end_of_text,
            self.chat_template().special_tokens.get("eos_token", ""),
            *(manifest.end_of_text for manifest in manifests(self.config)),
        }
        tokens = (tokenizer.token_to_id(name) for name in names if name)
        known = (token for token in tokens if token is not None)
        return frozenset((*known, *generation_ends(self.run, self.config)))

    def decoder(
        self, device: str | torch.device = "auto", dtype: torch.dtype | None = None
    ) -> Decoder:
        """Build the model with the chosen weights, in `dtype` (None: as it was trained). Raises
        CheckpointError if the checkpoint is damaged or has no such weights."""
        model = self._outline(dtype)
        allocate([model], pick_device(device) if isinstance(device, str) else device)
        with self._tensors() as tensors:
            copy_weights(tensors, TrainingState.of_model(model))
        return model.requires_grad_(False)

    @contextlib.contextmanager
    def running(self, where: Running, device: str = "auto") -> Iterator[Decoder]:
        """Yield the model with the chosen weights, for inference: in the device's memory, or with
        the weights of a block on disk until it runs. Raises CheckpointError as `decoder` does."""
        chosen, outline = pick_device(device), self._outline(where.torch_dtype)
        size, free = sum(p.nbytes for p in outline.parameters()), free_memory(chosen)
        fits = not free or size <= FILLED * free
        if where.layerwise == "never" or (where.layerwise == "auto" and fits):
            yield self.decoder(chosen, where.torch_dtype)
            return
        if where.layerwise == "auto":
            note = f"note: {size / GIB:.2f} GiB of weights, {free / GIB:.2f} GiB of memory free"
            print(f"{note}: a block's are read when it runs (--layerwise)", file=sys.stderr)
        with self._tensors() as tensors:
            checked_pieces(tensors, TrainingState.of_model(outline))
            yield StreamedDecoder(outline, tensors, chosen, free // 4)

    def _outline(self, dtype: torch.dtype | None) -> Decoder:
        """Return the model on the meta device, without weights."""
        model = build_model(self.config, torch.device("meta")).requires_grad_(False)
        return model if dtype is None else model.to(dtype)

    @contextlib.contextmanager
    def _tensors(self) -> Iterator[TensorSource]:
        """Yield the chosen weights, which stay where they are until the block ends."""
        with (
            held_checkpoint(self.run, lambda: self.checkpoint) as checkpoint,
            chosen_weights(self.run, checkpoint, self.weights) as tensors,
        ):
            yield tensors

    def export(
        self, folder: Path, dtype: torch.dtype, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        """Write the model in `dtype`, with its adapters merged, and its tokenizer, if any, as the
        Hugging Face folder `folder`, in files of at most `max_shard_bytes`.

        Raises ExchangeError if published models of the family cannot express the model, or if
        `folder` holds something; CheckpointError if the checkpoint is damaged or has no such
        weights.
        """
        with chosen_weights(self.run, self.checkpoint, self.weights) as tensors:
            save_hugging_face(
                MergedTensors(tensors, self.config.lora.scale),
                self.config.model,
                folder,
                max_shard_bytes=max_shard_bytes,
                dtype=dtype,
                tokenizer=self._exported_tokenizer(),
                ends=self._exported_ends(),
            )

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, as `export` does."""
        length = self.config.model.max_position_embeddings
        write_companions(folder, self._exported_tokenizer() or self.run / TOKENIZER_FILE, length)

    def _exported_tokenizer(self) -> Path | None:
        """Return the run's tokenizer, or the folder of its companion files if an import left
        these."""
        file = self.run / TOKENIZER_FILE
        parent = Path(self.config.data.tokenizer or file).parent
        imported = [folder / COMPANION_FOLDER for folder in (self.run, parent)]
        if not file.is_file():
            return imported[0] if imported[0].is_dir() else None
        same = (folder for folder in imported if same_tokenizer(folder / TOKENIZER_FILE, file))
        return next(same, file)

    def _exported_ends(self) -> list[int]:
        """Return the tokens with which the model ends texts and answers; none without a
        tokenizer."""
        if not (self.run / TOKENIZER_FILE).is_file():
            return []
        tokenizer = self.tokenizer()
        return sorted(self.ends_of_answers(tokenizer))

    def ends_of_answers(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the tokens that end a text and, if there is a chat template, an answer."""
        ends = self.stop_tokens(tokenizer)
        if self.has_conversations():
            ends |= ConversationFormat(tokenizer, self.chat_template()).stop_tokens
        return ends

    def precision(
        self, device: torch.device, dtype: str | None = None
    ) -> AbstractContextManager[Any]:
        """Return an autocast block for bfloat16 if the run was trained with it and no `dtype` is
        given."""
        is_mixed = dtype is None and self.config.train.precision == "bf16"
        return torch.autocast(device.type, torch.bfloat16, enabled=is_mixed)

    def sample(self, held_out: HeldOut | None, device: torch.device) -> str:
        """Return `log.sample_prompt`, or else the first words of the held-out text, and the model's
        continuation, which reads the last `train.sequence_length` tokens. Empty if there is no
        prompt.

        Raises DataError if the prompt has no tokens.
        """
        config, tokenizer = self.config, self.tokenizer()
        prompt = config.log.sample_prompt
        if not prompt and held_out is not None:
            prompt = first_words(held_out, tokenizer, config.data.end_of_text)
        if not prompt:
            return ""
        tokens = encode_text(tokenizer, prompt)
        continuation = generate(
            self.decoder(device),
            tokens,
            config.log.sample_tokens,
            context=config.train.sequence_length,
            generator=torch.Generator().manual_seed(config.seed),
            stop_token=self.stop_tokens(tokenizer),
        )
        return str(tokenizer.decode([*tokens, *continuation]))


def first_words(held_out: HeldOut, tokenizer: Tokenizer, end_of_text: str) -> str:
    """Return the beginning of the first document that is not empty."""
    tokens, end = held_out.first_tokens(), tokenizer.token_to_id(end_of_text)
    document = itertools.takewhile(
        lambda token: token != end, itertools.dropwhile(lambda token: token == end, tokens)
    )
    words = tokenizer.decode(list(itertools.islice(document, PROMPT_TOKENS)))
    return str(words).rstrip("\N{REPLACEMENT CHARACTER}")  # half a letter
