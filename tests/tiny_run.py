"""Makes a run that starts, trains and ends in seconds, with files and command lines as a user
would."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors import deserialize

from forked import ForkedPython
from reaper import reaped

TIME_FIELDS = (
    "seconds",
    "step_seconds",
    "optimizer_seconds",
    "tokens_per_second",
    "seconds_left",
    "mfu",
    "peak_memory_bytes",
)
"""Fields of metrics.jsonl that differ between two runs of the same configuration."""

CONFIG = """\
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
moe_intermediate_size = 8
num_hidden_layers = 2
num_attention_heads = 2
kv_lora_rank = 8
qk_nope_head_dim = 4
qk_rope_head_dim = 4
v_head_dim = 6
n_routed_experts = 4
max_position_embeddings = 64

[data]
source = "{corpus}"
cache_dir = "{cache}"
holdout_every = 3

[optim]
name = "soap"
precondition_frequency = 3
warmup_steps = 2

[train]
steps = {steps}
batch_size = 4
micro_batch_size = 2
sequence_length = 16
validation_every = 5
validation_sequences = 4

[checkpoint]
every = {checkpoint_every}

[log]
sample_tokens = 4
picture = false
"""


def write_config(folder: Path, *, steps: int = 12, checkpoint_every: int = 4) -> Path:
    """Write a corpus of six files, and the configuration that trains on it, below `folder`."""
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for index in range(6):
        lines = [
            f"def f{n}_{index}(x):\n    return x + {n * index} if x else None\n" for n in range(20)
        ]
        (corpus / f"m{index}.py").write_text("\n".join(lines))
    config = folder / "tiny.toml"
    config.write_text(
        CONFIG.format(
            corpus=corpus, cache=folder / "data", steps=steps, checkpoint_every=checkpoint_every
        )
    )
    return config


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "lather", *map(str, arguments)]


def start(*arguments: object, cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start the command in a process of its own, on one thread."""
    return reaped(
        ForkedPython(
            command(*arguments)[1:],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    )


def run(*arguments: object, cwd: Path | None = None, timeout: float = 120) -> tuple[int, str, str]:
    """Run the command; returns exit status, output and errors."""
    process = start(*arguments, cwd=cwd)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def timeless_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run, without what differs from run to run."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIME_FIELDS} for row in rows]


def last_weights(run_dir: Path) -> dict[str, bytes]:
    """Read weights and optimizer state of the newest checkpoint from disk, without random states:
    torch seeds each process differently."""
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    found = {}
    for file in newest.glob("rank-*.safetensors"):
        for name, data in deserialize(file.read_bytes()):
            if not name.startswith("random/"):
                found[f"{file.name} {name}"] = bytes(data["data"])
    return found
