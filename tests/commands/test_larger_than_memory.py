"""`lather eval` and `lather generate` of a model of four times the memory that the process may
take, in processes with that limit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lather.checkpoint.save import write_first_checkpoint
from lather.cli import main
from lather.config.config import Config
from lather.config.loop import LoopConfig
from lather.config.toml_file import config_to_toml
from lather.models.entry_names import entry_shapes
from lather.models.families import FAMILIES, ModelConfig
from lather.models.hf.model_folder import weight_shapes
from lather.safetensors_file import TensorToWrite, write_safetensors

LIMIT = 100 * 2**20
"""Bytes that a process may allocate after its imports."""
SIZES = {
    "vocab_size": 400,
    "hidden_size": 256,
    "num_hidden_layers": 34,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
MODELS = {
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 250},
    "qwen3": {"hidden_size": 512, "intermediate_size": 1900, "tie_word_embeddings": True},
}
CHILD = """
import re, resource, sys
from pathlib import Path
import torch
from lather.cli import main
from lather.commands import eval, generate
torch.ones(64, 64) @ torch.ones(64, 64)
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_DATA")


def limited(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process with the limit."""
    command = [sys.executable, "-c", CHILD, str(LIMIT), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, check=False, env=environment, timeout=100, capture_output=True, text=True
    )


def unlimited(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a command in this process, with the whole model in memory; return what it prints."""
    capsys.readouterr()
    assert main([*map(str, arguments), "--layerwise", "never"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("\n".join(f"def f{n}(x): return x + {n}" for n in range(200)))
    options = ["--vocab-size", "300", "--holdout-every", "0", "--workers", "1"]
    assert main(["data", "make", str(folder / "set"), str(folder / "text.txt"), *options]) == 0
    return folder / "set"


@pytest.fixture(scope="module", params=MODELS)
def run(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of random weights, which are never all in memory here, either."""
    model: ModelConfig = FAMILIES[request.param].config(**(SIZES | MODELS[request.param]))
    folder = tmp_path_factory.mktemp("run")
    config = Config(run_dir=str(folder), model=model, train=LoopConfig(sequence_length=64))
    (folder / "config.toml").write_text(config_to_toml(config))
    shutil.copyfile(data / "tokenizer.json", folder / "tokenizer.json")
    write_first_checkpoint(folder / "checkpoints", lambda file: write_random(model, file))
    return folder


def write_random(model: ModelConfig, file: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        yield torch.empty(shape).normal_(0.5 * ("norm" in name), 0.03, generator=generator)

    shapes = entry_shapes(weight_shapes(model))
    assert sum(4 * torch.Size(shape).numel() for shape in shapes.values()) > 4 * LIMIT
    write_safetensors(
        file,
        [
            TensorToWrite(name, torch.float32, shape, drawn(name, shape))
            for name, shape in shapes.items()
        ],
    )


def test_evaluation_of_a_model_of_four_times_the_limit(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results are the same to the last bit."""
    words = ["eval", run, data, "--json", "--max-sequences", 4, "--batch-size", 2]
    done = limited(*words)
    assert done.returncode == 0, done.stderr
    assert "a block's are read when it runs" in done.stderr
    score = json.loads(done.stdout)["sets"]["set"]
    assert score == json.loads(unlimited(capsys, *words))["sets"]["set"]
    assert score["loss"] > 0
    if "qwen3_moe" in (run / "config.toml").read_text():
        assert "allocate memory" in limited(*words, "--layerwise", "never").stderr


@pytest.mark.parametrize("run", ["qwen3_moe"], indirect=True)
def test_generation_with_a_model_of_four_times_the_limit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", run, "--prompt", "def f", "--prompt", "x", "--tokens", 3, "--json"]
    done = limited(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == unlimited(capsys, *words)
    assert len(done.stdout.splitlines()) == 2
