"""Runs every command of README and docs/, page by page, as a reader would, with small
configurations and data: the whole grid's test beside test_blocks, which only parses most of them.

What differs from the page is in `CHANGED` and `LEFT_OUT`. A command that is the same on every
machine, or names its machine, runs once for each machine; SLURM is a stand-in (`slurm`).
test_adding_a_family runs the commands of adding-a-family.md.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard

from lather.data.documents import train_tokenizer
from page_blocks import ROOT, blocks_of
from tiny_run import write_config

pytestmark = [pytest.mark.grid, pytest.mark.timeout(900)]

SECONDS = 300
"""Seconds after which a command and its processes are killed."""
LEFT_OUT = re.compile(
    r"(PIP_\w+=\S+ )?(make|pip|python3 -m venv|tensorboard)\b|lather train .*--log.wandb-project"
)
"""Matches what installs (`.ci/run` does that, and `make train` with it), what needs GPUs, what
serves pages, what needs an account."""
CHANGED = {
    "/shared/lather": ".",
    "/shared/runs": "runs",
    "/data/runs": "runs",
    "node01": "127.0.0.1",
    "HOST": "127.0.0.1",
    "29500": "{port}",
    "--nnodes 4": "--nnodes 2",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--nproc 8": "--nproc 2",
    "--ntasks 32": "--ntasks 4",
    "--ntasks-per-node 8": "--ntasks-per-node 2",
    "--ntasks-per-node=8": "--ntasks-per-node=2",
    "--parallel.pp 8": "--parallel.pp 2",
    "--parallel.ep 8": "--parallel.ep 2",
    "--parallel.ep 4": "--parallel.ep 2",
    "--train.steps 500": "--train.steps 4",
    "--train.sequence-length 2048": "--train.sequence-length 64",
    "runs/first@2000": "runs/first@200",
    "hellaswag,arc_easy": "questions --task-folder tasks",
    "--sequence-length 1024": "--sequence-length 64",
    "import FOLDER": "import models/base",
    "runs/imported/config.toml": (
        "runs/imported/config.toml --train.steps 4 --train.sequence-length 64"
    ),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "steps": 4,
    "batch_size": 32,
    "micro_batch_size": 1,
    "sequence_length": 64,
}
"""Values of the configurations in configs/, where they have these keys."""
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if page.name != "adding-a-family.md"
    and any(block.language == "bash" for block in blocks_of(page))
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what the pages take for granted: a checkout with data, a model in Hugging Face's format
    with a chat template, and runs."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("benchmarks", "docs", "examples", "src", "tests", "pyproject.toml", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "configs").mkdir()
    for path in (ROOT / "configs").iterdir():
        (folder / "configs" / path.name).write_text(smaller(path.read_text()))
    stand_ins(folder)
    make_texts(folder)
    my = write_config(folder, steps=300, checkpoint_every=100).rename(folder / "my.toml")
    fast = my.read_text().replace('"soap"\nprecondition_frequency = 3', '"adamw"')
    fast = fast.replace(
        "batch_size = 4\nmicro_batch_size = 2", "batch_size = 8\nmicro_batch_size = 1"
    )
    fast = fast.replace("num_hidden_layers = 2", "num_hidden_layers = 4")
    my.write_text(fast)
    short = "--train.steps 4 --train.sequence-length 64"
    for line in (
        "data make data/web texts --tokenizer models/base",
        "data make data/chat chats.jsonl --chat --tokenizer models/base",
        "train configs/quickstart.toml",
        "train my.toml --run-dir runs/first",
        f"train --init-from models/base --data.path data/chat --run-dir runs/mine {short} "
        "--checkpoint.keep-best",
        f"train --init-from models/base --data.path data/chat --run-dir runs/tuned {short} "
        "--lora.rank 4",
    ):
        run_all([f"lather {line}"], folder)
    return folder


def smaller(toml: str) -> str:
    for key, value in SIZES.items():
        toml = re.sub(rf"^{key} = [\d_]+", f"{key} = {value}", toml, flags=re.MULTILINE)
    return toml


def stand_ins(folder: Path) -> None:
    """Make an environment whose activation changes nothing, and SLURM's programs."""
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("")
    (folder / "bin").mkdir()
    for name in ("srun", "sbatch", "scontrol"):
        (folder / "bin" / name).write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/tests/slurm.py" {name} "$@"\n'
        )
        (folder / "bin" / name).chmod(0o755)


def make_texts(folder: Path) -> None:
    """Make the model, and every file that a page names as the reader's own."""
    example = runpy.run_path(str(ROOT / "examples/finetune_chat.py"))
    example["make_model"](folder / "models")
    (folder / "models/mine").symlink_to("base")
    example["make_conversations"](folder / "chats.jsonl")
    texts = [path.read_text() for path in sorted((folder / "models/texts").iterdir())]
    for name in ("text", "texts", "my-text", "text/web"):
        shutil.copytree(folder / "models/texts", folder / name)
    shutil.copytree(
        ROOT / "src/lather/data", folder / "my-code", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "my").mkdir()
    train_tokenizer(iter(texts), 400, "</s>").save(str(folder / "my/tokenizer.json"))
    (folder / "notes.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in texts))
    make_packed_files(folder, texts)
    rows = [{"question": text, "choices": [" red", " green"], "answer": 0} for text in texts[:4]]
    (folder / "tasks").mkdir()
    (folder / "tasks/rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (
        "dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: "
        f"{folder / 'tasks/rows.jsonl'}\ntest_split: test\n"
    )
    form = (
        "output_type: multiple_choice\ndoc_to_text: "
        '"{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
    )
    (folder / "tasks/questions.yaml").write_text(f"task: questions\n{data}{form}")


def make_packed_files(folder: Path, texts: list[str]) -> None:
    (folder / "web").mkdir()
    for part in range(2):
        lines = "\n".join(json.dumps({"text": text}) for text in texts[part::2])
        (folder / f"web/{part}.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    tokens = np.random.default_rng(0).integers(0, 50256, 4000)
    tokens[99::100] = 50256
    header = np.zeros(256, np.int32)  # of llm.c
    header[:3] = 20240520, 1, len(tokens)
    (folder / "corpus.bin").write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())


# --- running --------------------------------------------------------------------------------------


def launches(script: str) -> Iterator[list[str]]:
    """Yield the commands of a page's scripts in order: those that run at the same time, one on each
    machine, as one list."""
    waiting = ""
    for line in re.sub(r"\\\n\s*", "", script).splitlines():
        command = re.sub(r"\s+#\s.*$", "", line).strip()
        if not command or LEFT_OUT.match(command):
            continue
        if "--node-rank 0" in command:
            waiting = command
        elif "--node-rank" in command:
            yield [waiting, command]
        else:
            nodes = re.search(r"--nnodes (\d+)", command)
            yield [command] * (int(nodes[1]) if nodes else 1)


def run_all(commands: list[str], folder: Path) -> None:
    """Run commands beside each other; an AssertionError has the output of one that fails."""
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    streams = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    options = {"cwd": folder, "env": environment, "start_new_session": True, **streams}
    processes = [
        subprocess.Popen(["bash", "-euo", "pipefail", "-c", line], **options) for line in commands
    ]
    try:
        for command, process in zip(commands, processes, strict=True):
            output, _ = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, (
                f"{command}\nended with status {process.returncode}:\n{output}"
            )
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def changed(script: str, port: int) -> str:
    for before, after in CHANGED.items():
        script = script.replace(before, after.format(port=port))
    return script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_to_their_end(page: Path, world: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "world", page.read_text()
    shutil.copytree(world, folder, symlinks=True)
    if page.name == "writing-a-rule.md":
        for file in (ROOT / "examples" / "rules").glob("*.py"):
            (folder / file.name).write_text(file.read_text())
    for made in re.findall(
        r"(?:--run-dir|lather import \S+) (runs/[\w-]+)|lather data make (data/\w+)", text
    ):
        shutil.rmtree(folder / "".join(made), ignore_errors=True)  # the page makes it
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scripts = [changed(block.text, port) for block in blocks_of(page) if block.language == "bash"]
    for batch in [script for script in scripts if script.startswith("#!")]:
        (folder / "train.slurm").write_text(batch)
        scripts.remove(batch)
    for commands in launches("".join(scripts)):
        run_all(commands, folder)
