"""Lists the parts of `make gpu`: what each runs, the seconds it may take, and the wheels it needs
beside torch.

They stand in the order of their worth, because the time on a GPU may end before they do. The
limits, of about twice the time that an H100 needed, add up to less than 12 minutes, and fit into
two calls of nine, whatever hangs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.needs import MEASURING, TRAINER

ROOT = Path(__file__).resolve().parents[2]
"""The repository, which has the tests and the configurations of sizes that the package lacks."""
PEERS = ("heavyball", "pytorch_optimizer")
TESTS = {**TRAINER, "pytest": "8.0"}
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
    in_fp8 = "experts' products in FP8 against torch's in bf16 and in FP8, and DeepGEMM's"
    tests = ("-m", "benchmarks.gpu.tests", "--seconds", "165")
    return [
        work("kernels", kernels, 45),
        MeasuredPart("tests", "tests/gpu, all files at the same time", tests, 180, TESTS),
        training("adamw", "AdamW", 56),
        training("adamw-graph", "AdamW, its passes a CUDA graph", 34),
        training("soap_muon", "SOAP-Muon", 75),
        work("refresh", "the batched refresh of 96 factors against one by one", 60),
        work("block", "a decoder block against plain PyTorch", 40, TRAINER),
        training("muon", "Muon", 60),
        work("optimizer", peers, 80, note=_without(PEERS)),
        work("fp8", in_fp8, 30, note=_without(("deep_gemm",))),
    ]


def _without(peers: Sequence[str]) -> str:
    absent = [peer for peer in peers if importlib.util.find_spec(peer) is None]
    return f"without {' and '.join(absent)}, not installed here" if absent else ""
