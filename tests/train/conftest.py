"""Makes a corpus of a few files, a configuration of a few thousand parameters, and what tests of
the trainer need of them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.config.config import Config
from lather.config.toml_file import config_from_mapping
from lather.data.making import make_dataset
from lather.data.recipe import DataRecipe
from lather.models.decoder import Decoder
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.train.metrics import StepRow
from tiny_model import TINY, VOCAB_SIZE

MODEL: dict[str, Any] = {
    **TINY,
    "num_hidden_layers": 2,
    "aux_loss_alpha": 0.01,
    "tie_word_embeddings": True,
}
WORDS = "the quick brown fox jumps over naïve café owners and 日本 \U0001f98a"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eight text files, one of them in a sub-folder."""
    folder = tmp_path / "corpus"
    (folder / "more").mkdir(parents=True)
    words = WORDS.split()
    draw = random.Random(0)
    for number in range(8):
        text = "\n".join(" ".join(draw.choices(words, k=9)) for _ in range(12 + number))
        (folder / ("more" if number == 5 else "") / f"{number}.txt").write_text(text, "utf-8")
    return folder


@pytest.fixture
def make_config(corpus: Path, tmp_path: Path) -> Callable[..., Config]:
    """Make the tiny configuration with sections, or keys of sections, replaced:
    `make_config(train={"steps": 5}, seed=1)`."""

    def make(**changes: Any) -> Config:
        mapping: dict[str, Any] = {
            "run_dir": str(tmp_path / "run"),
            "model": MODEL,
            "data": {
                "source": str(corpus),
                "pattern": "*.txt",
                "cache_dir": str(tmp_path / "cache"),
                "holdout_every": 4,
            },
            "optim": {"name": "soap", "lr": 1e-2, "precondition_frequency": 2, "warmup_steps": 2},
            "train": {
                "steps": 4,
                "batch_size": 4,
                "micro_batch_size": 2,
                "sequence_length": 16,
                "validation_every": 2,
                "validation_sequences": 4,
                "device": "cpu",
            },
            "checkpoint": {"every": 2},
            "log": {"every": 2, "sample_tokens": 2, "picture": False},
        }
        for key, value in changes.items():
            mapping[key] = {**mapping.get(key, {}), **value} if isinstance(value, dict) else value
        return config_from_mapping(mapping)

    return make


@pytest.fixture
def config(make_config: Callable[..., Config]) -> Config:
    return make_config()


@pytest.fixture
def sets(corpus: Path, tmp_path: Path) -> list[str]:
    """Make three data sets of one tokenizer."""
    folders = [tmp_path / f"set-{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        texts = tmp_path / f"texts-{number}"
        texts.mkdir()
        for name, file in enumerate(sorted(corpus.glob("*.txt"))):
            (texts / f"{name}.txt").write_text(
                f"set {number} " * 10 + file.read_text("utf-8"), "utf-8"
            )
        tokenizer = "" if number == 0 else str(folders[0] / "tokenizer.json")
        recipe = DataRecipe(
            (str(texts),), pattern="*.txt", vocab_size=264, holdout_every=4, tokenizer=tokenizer
        )
        make_dataset(folder, recipe, print)
    return [str(folder) for folder in folders]


@pytest.fixture(scope="session")
def model_config() -> DeepseekV2Config:
    return DeepseekV2Config(**MODEL)


@pytest.fixture(scope="session")
def make_model(model_config: DeepseekV2Config) -> Callable[..., Decoder]:
    """Make the tiny model with the weights of a seed."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
        return build_model(model_config, torch.Generator().manual_seed(seed)).to(dtype)

    return make


@pytest.fixture(scope="session")
def tokens() -> Callable[..., torch.Tensor]:
    """Draw random sequences, one token longer than those that are trained on."""

    def draw(seed: int, batch_size: int = 4, length: int = 17) -> torch.Tensor:
        return torch.randint(
            VOCAB_SIZE, (batch_size, length), generator=torch.Generator().manual_seed(seed)
        )

    return draw


@pytest.fixture(scope="session")
def step_row() -> Callable[..., StepRow]:
    """Make a plausible row of a step, with fields replaced."""

    def make(step: int, **changes: Any) -> StepRow:
        values: dict[str, Any] = {
            "step": step,
            "loss": 5.0 / step,
            "mtp_loss": 5.5,
            "balance_loss": 1.0,
            "lr": 1e-3,
            "grad_norm": 2.0,
            "tokens": 64,
            "tokens_per_second": 640.0,
            "total_tokens": 64 * step,
            "epoch": 0.25 * step,
            "mfu": 0.25,
            "seconds": 0.1 * step,
            "seconds_left": 60.0,
            "step_seconds": 0.1,
            "optimizer_seconds": 0.025,
            "peak_memory_bytes": 1000,
            "expert_load_min": 0.5,
            "expert_load_max": 1.5,
            "expert_load_entropy": 0.9,
            "max_attention_logit": 12.5,
            "refreshes_done": 3,
            "refreshes_skipped": 0,
            "skipped": False,
        }
        return StepRow(**{**values, **changes})

    return make
