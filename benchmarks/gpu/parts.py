"""Lists the parts of `make gpu`: what each runs, the seconds it may take, and the wheels it needs
beside torch.

They stand in the order of their worth, because the time on a GPU may end before they do. The
limits add up to less than 27 minutes, and fit into three calls of nine, whatever hangs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.needs import MEASURING, TRAINER

ROOT = Path(__file__).resolve().parents[2]
"""The repository, which has the tests and the configurations of sizes that the package lacks."""
PEERS = ("heavyball", "pytorch_optimizer")
FILES = {
    "attention": "test_attention_cuda.py",
    "cache": "test_cache_cuda.py",
    "engine": "test_engine_cuda.py",
    "kernels": "test_moe_kernels.py",
    "loss": "test_loss_kernels.py",
    "moe": "test_moe_block.py",
    "optim": "test_optim_cuda.py",
}
"""The files of tests/gpu, by a short name."""
TOUCH = """
import torch

x = torch.ones(512, 512, device={device!r}, dtype=torch.bfloat16)
(x @ x).sum().item()
torch.linalg.cholesky(torch.eye(64, device={device!r}))
"""
"""Loads torch and, on a GPU, the libraries that most parts use."""


@dataclass(frozen=True)
class MeasuredPart:
    """A part, which is a process."""

    name: str
    title: str
    arguments: tuple[str, ...]
    """Arguments of the Python interpreter."""
    seconds: float
    """Seconds after which the process is ended."""
    needs: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """A remark that is printed before the part starts."""


def first_use(device: str) -> MeasuredPart:
    """Make the part that precedes those of every call: on a machine
    that has just started, the first use of torch and of the device takes much longer than later
    ones."""
    code = ("-c", TOUCH.format(device=device))
    return MeasuredPart("start", "the first use of torch and of the device", code, 60)


def all_parts(device: str, folder: Path, *, small: bool) -> list[MeasuredPart]:
    """List the parts in the order in which they are done; they write rows to `folder`.
    Small parts are for a rehearsal."""
    options = ("--device", device, "--out", str(folder), *(["--small"] if small else []))

    def work(
        name: str, title: str, seconds: float, needs: Mapping[str, str] = MEASURING, note: str = ""
    ) -> MeasuredPart:
        # starting and what cannot be cut short take the rest
        enough = (
            "--seconds",
            str(0.7 * seconds),
        )
        return MeasuredPart(
            name,
            title,
            ("-m", "benchmarks.gpu.work", name, *options, *enough),
            seconds,
            needs,
            note,
        )

    def training(optimizer: str, title: str, seconds: float) -> MeasuredPart:
        title = f"50 steps of a 1.7 B MoE with {title}"
        return work(f"training-{optimizer}", title, seconds, TRAINER)

    kernels = "every kernel against its reference, and against a device copy or a matrix product"
    peers = "optimizer steps against heavyball and pytorch_optimizer"
    absent = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    note = f"without {' and '.join(absent)}, not installed here" if absent else ""
    return [
        work("kernels", kernels, 60),
        _tests("engine", 160),
        training("adamw", "AdamW", 75),
        training("soap_muon", "SOAP-Muon", 90),
        work("refresh", "the batched refresh of 96 factors against one by one", 90),
        _tests("moe", 70),
        _tests("attention", 100),
        _tests("optim", 100),
        _tests("kernels", 140),
        _tests("loss", 90),
        work("block", "a decoder block against plain PyTorch", 50, TRAINER),
        training("muon", "Muon", 75),
        work("optimizer", peers, 90, note=note),
        _tests("cache", 60),
    ]


def _tests(name: str, seconds: float) -> MeasuredPart:
    """Make the part that runs a file of tests/gpu. It leaves out the suite's conftest, which checks
    shapes and needs packages for developers."""
    options = ("-c", str(ROOT / "tests/gpu/alone.ini"), "--rootdir", str(ROOT), "--noconftest")
    arguments = ("-m", "pytest", *options, str(ROOT / "tests/gpu" / FILES[name]))
    return MeasuredPart(
        f"tests-{name}",
        f"tests/gpu/{FILES[name]}",
        arguments,
        seconds,
        {**TRAINER, "pytest": "8.0"},
    )
