"""Lists the parts of `make gpu`: what each runs, the seconds it may take, and the wheels it needs
beside torch.

The limits add up to 25 minutes, so that all of it is over by then, whatever hangs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.needs import MEASURING, TRAINER

ROOT = Path(__file__).parents[2]
"""The repository, which has the tests and the configurations of sizes that the package lacks."""
PEERS = ("heavyball", "pytorch_optimizer")
TESTS = {
    "attention": 250,
    "cache": 40,
    "engine": 200,
    "kernels": 90,
    "loss": 80,
    "moe": 60,
    "optim": 100,
}
"""Seconds for each file of tests/gpu, by a short name."""
FILES = {
    "attention": "test_attention_cuda.py",
    "cache": "test_cache_cuda.py",
    "engine": "test_engine_cuda.py",
    "kernels": "test_moe_kernels.py",
    "loss": "test_loss_kernels.py",
    "moe": "test_moe_block.py",
    "optim": "test_optim_cuda.py",
}


@dataclass(frozen=True)
class MeasuredPart:
    """A part, which is done in a process of its own."""

    name: str
    title: str
    arguments: tuple[str, ...]
    """Arguments of the Python interpreter."""
    seconds: float
    """Seconds after which the process is ended."""
    needs: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """A remark that is printed before the part starts."""


def all_parts(device: str, folder: Path, *, small: bool) -> list[MeasuredPart]:
    """List the parts in the order in which they are done; they write rows and pictures to `folder`.
    Small parts are for a rehearsal."""
    options = ("--device", device, "--out", str(folder), *(["--small"] if small else []))
    absent = [peer for peer in PEERS if importlib.util.find_spec(peer) is None]
    note = f"without {' and '.join(absent)}, not installed here" if absent else ""

    def work(
        name: str, title: str, seconds: float, needs: Mapping[str, str] = MEASURING, note: str = ""
    ) -> MeasuredPart:
        enough = (
            "--seconds",
            str(0.8 * seconds),
        )  # starting and what cannot be cut short take the rest
        return MeasuredPart(
            name,
            title,
            ("-m", "benchmarks.gpu.work", name, *options, *enough),
            seconds,
            needs,
            note,
        )

    return [
        work(
            "kernels",
            "every kernel against its reference, and against a device copy or a matrix product",
            70,
        ),
        work("training-adamw", "50 steps of a 1.7 B MoE with AdamW", 100, TRAINER),
        work("training-muon", "50 steps of a 1.7 B MoE with Muon", 100, TRAINER),
        work("training-soap_muon", "50 steps of a 1.7 B MoE with SOAP-Muon", 150, TRAINER),
        work("refresh", "the batched refresh of 96 factors against one by one", 100),
        work("block", "a decoder block against plain PyTorch", 50, TRAINER),
        work(
            "optimizer", "optimizer steps against heavyball and pytorch_optimizer", 110, note=note
        ),
        *(_tests(name, seconds) for name, seconds in TESTS.items()),
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
