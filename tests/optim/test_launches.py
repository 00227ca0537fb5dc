"""Kernel launches of an update's chunk on a GPU, counted on a stand-in: a hundred matrices take as
many as two. Also bytes and flops of Muon's."""

import json
from typing import Any

import pytest

from scripts import printed_by

COUNT = """
import json, sys, warnings
import torch
from benchmarks.launches.counter import Counter
from lather import optim

warnings.simplefilter("ignore")


def count(name, shapes, dtype, options):
    factor = options.pop("gradient_factor", 1.0)
    frequency = {} if name in ("Muon", "AdamW") else {"precondition_frequency": 100}
    with Counter() as counter:
        options_of = {"dtype": getattr(torch, dtype), "device": counter.device}
        params = [torch.nn.Parameter(torch.empty(shape, **options_of)) for shape in shapes]
        optimizer = getattr(optim, name)(params, lr=1e-3, **frequency, **options)
        for _ in range(4):
            for p in params:
                p.grad = torch.empty_like(p)
            counter.restart()
            optimizer.step(gradient_factor=factor)
        found = {}
        for phase, counts in counter.phases.items():
            nbytes = counts.bytes_read + counts.bytes_written
            numbers = (counts.launches, counts.host_waits, nbytes, counts.flops)
            found[phase.rpartition(".")[2]] = numbers
        return found


print(json.dumps([count(*case) for case in json.loads(sys.argv[1])]))
"""

MATRICES, EXPERTS = [[1024, 512]], [[16, 1024, 512]]
PER_EXPERT = {"matrix_layout": "per_expert"}
CLIPPED = {"gradient_factor": 0.5}
NEWTON_SCHULZ = 15
"""Products of Newton-Schulz's five steps."""

CASES: dict[str, tuple[str, list[list[int]], str, dict[str, Any], int]] = {
    "soap": ("SOAP", MATRICES * 2, "float32", {}, 22),
    "soap, 20 matrices": ("SOAP", MATRICES * 20, "float32", {}, 22),
    "soap, bf16 weights": ("SOAP", MATRICES * 2, "bfloat16", {}, 25),
    "soap, experts": ("SOAP", EXPERTS, "float32", PER_EXPERT, 21),
    "klsoap": ("KLSOAP", MATRICES * 20, "float32", {}, 31),
    "klsoap, experts": ("KLSOAP", EXPERTS, "float32", PER_EXPERT, 29),
    "muon": ("Muon", MATRICES * 20, "float32", {}, 6 + NEWTON_SCHULZ),
    "muon, bf16 weights": ("Muon", MATRICES * 20, "bfloat16", {}, 9 + NEWTON_SCHULZ),
    "soap_muon": ("SOAPMuon", MATRICES * 20, "float32", {}, 23 + NEWTON_SCHULZ),
    "soap_muon, experts": ("SOAPMuon", EXPERTS, "float32", PER_EXPERT, 22 + NEWTON_SCHULZ),
    "soap_muon, both": (
        "SOAPMuon",
        MATRICES * 20,
        "float32",
        {"sides": "both"},
        31 + NEWTON_SCHULZ,
    ),
    "soap_muon, clipped": ("SOAPMuon", MATRICES * 20, "float32", CLIPPED, 23 + NEWTON_SCHULZ),
    "muon, clipped": ("Muon", MATRICES * 20, "float32", CLIPPED, 6 + NEWTON_SCHULZ),
    "adamw, clipped": ("AdamW", MATRICES * 20, "float32", CLIPPED, 2),
    "adamw": ("AdamW", MATRICES * 20, "float32", {}, 2),
    "adamw, bf16 weights": ("AdamW", MATRICES * 20, "bfloat16", {}, 6),
}
"""Cases by name: class, shapes, dtype, options, and the most launches of statistics and update, all
of which fit one chunk."""


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, list[int]]]:
    """The counts, from a process of its own: a process cannot undo that torch knows the
    stand-in."""
    cases = json.dumps([case[:-1] for case in CASES.values()])
    # kernels are counted, not interpreted
    printed = printed_by(COUNT, cases, variables={"TRITON_INTERPRET": ""}, timeout=240)
    return dict(zip(CASES, json.loads(printed), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_chunk_is_few_launches_whatever_the_number_of_matrices(
    counts: dict[str, dict[str, list[int]]], case: str
) -> None:
    phases = [counts[case][phase] for phase in ("statistics", "update") if phase in counts[case]]
    assert 1 < sum(launches for launches, *_ in phases) <= CASES[case][-1]
    assert not any(waits for _, waits, *_ in phases)


def test_newton_schulz_has_the_flops_of_tiles_up_to_the_diagonal(
    counts: dict[str, dict[str, list[int]]],
) -> None:
    """For matrices of 1024 x 512, X X^T and A A^T are 4 x 4 tiles, of which 10 are computed."""
    n, k = MATRICES[0]
    halves, whole = 2 * k * k * n + 2 * k**3, 2 * k * k * n
    assert counts["muon"]["update"][-1] == 20 * 5 * (halves * 10 // 16 + whole)


def test_muon_moves_few_bytes(counts: dict[str, dict[str, list[int]]]) -> None:
    """Beside Newton-Schulz an element takes 8 bytes to join a batch, 16 for momentum, 10 to get a
    norm of 1, 6 to become fp32, and 12 for its weight."""
    n, k = MATRICES[0]
    newton_schulz = 2 * 5 * (n * k + k * k + 2 * k * k + k * k + 3 * n * k)
    assert counts["muon"]["update"][-2] <= 1.001 * 20 * (52 * n * k + newton_schulz)


@pytest.mark.parametrize(("rule", "bytes_"), [("muon", 0), ("soap_muon", 0), ("adamw", 8)])
def test_clipping_moves_no_bytes_where_a_kernel_multiplies_the_gradients(
    counts: dict[str, dict[str, list[int]]], rule: str, bytes_: int
) -> None:
    """Elsewhere a step that clips reads and writes each gradient once more, in one launch."""
    n, k = MATRICES[0]
    launches, moved = (
        sum(phase[at] for phase in counts[f"{rule}, clipped"].values())
        - sum(phase[at] for phase in counts[rule].values())
        for at in (0, 2)
    )
    assert launches == (bytes_ > 0)
    assert moved == bytes_ * 20 * n * k


def test_gradients_are_looked_at_with_one_wait(counts: dict[str, dict[str, list[int]]]) -> None:
    for case, found in counts.items():
        launches, waits, *_ = found["collect"]
        assert waits == 1, case
        assert launches <= 5, case
