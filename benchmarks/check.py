"""Checks a case before it is timed, on a small copy of it (same options, same layout, matrices
shrunk to at most 24).

Our optimizer: after the steps of at least two intervals every parameter has moved as in the plain
program of the rule, which runs in fp64 matrix by matrix (`lather.optim.reference`), to `TOLERANCE`
relative to the movement. For this comparison alone SOAP's warm-up with Adam lasts six steps instead
of one, until the factors have full rank (the eigenvectors of a singular factor are not unique, and
any two programs choose differently), Muon iterates in fp32, and products are fp32 on a GPU, too.

Peers do not have to give the same numbers, as their rules differ in small points
(`benchmarks.contestants`), but the updates of their last `COMPARED` steps have to point the same
way as ours: cosine above `MIN_COSINE` over all parameters. For all contestants: after the first
step SOAP changes its bases in exactly one step of every f, and gradients stay as they are. Not
compared: speed of learning, and precision at full size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import (
    OPTIONS,
    OURS,
    Contestant,
    MatrixSet,
    OptimizerCase,
    gradient_pool,
)
from benchmarks.measure import reachable_tensors
from lather.optim import reference
from lather.shapes import Float

WARMUP = 6
"""Steps of Adam before SOAP's first bases: enough for the factors of a small matrix to have full
rank."""
TOLERANCE = 1e-3
MIN_COSINE = {"soap": 0.95, "muon": 0.99, "adamw": 0.9999}
"""The least cosine between our updates and a peer's. Measured: 0.984 and more between the three
SOAPs, 0.80 to 0.86 between SOAP and plain Adam; 0.9998 between Muon in fp32 and in bf16."""
FP32 = {"fp32_matmul_prec": "highest"}
FOR_THE_CHECK: dict[str, dict[str, Any]] = {
    "soap": {"adam_warmup_steps": WARMUP, **FP32},
    "muon": {"newton_schulz_dtype": "float32", **FP32},
    "adamw": {},
}
"""Options that our optimizer gets while it is compared with the reference."""
COMPARED = 4
LARGEST = 24
BASIS = re.compile(r"\.basis_\d+$|\.Q$|_Q_\d+$")
"""Matches the names that the three libraries give to a basis in their state."""


class CheckError(RuntimeError):
    """Raised when a contestant does not do what the benchmark says that it does."""


def check_case(case: OptimizerCase, peers: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Compare the contestants of a case; returns what was compared, for the case's rows. Raises
    CheckError."""
    small = replace(case, matrices=shrunk(case.matrices))
    error = error_of_ours(small, device)
    if not error < TOLERANCE:
        raise CheckError(
            f"{OURS} differs from the plain fp64 {case.rule} by {error:.1e} of the movement; "
            f"{TOLERANCE:.0e} is allowed"
        )
    pool = gradient_pool(
        small.matrices, device, num_steps=4 * max(case.frequency, 10), decay=_well_separated
    )
    updates = {name: _last_updates(small.contestant(name, pool), small) for name in (OURS, *peers)}
    cosines = {peer: _cosine(updates[OURS], updates[peer]) for peer in peers}
    for peer, cosine in cosines.items():
        if not cosine > MIN_COSINE[case.rule]:
            raise CheckError(
                f"{peer}'s updates have cosine {cosine:.3f} with ours; above "
                f"{MIN_COSINE[case.rule]} is needed"
            )
    return {"error_of_lather": error, "cosine": cosines}


def shrunk(matrices: MatrixSet) -> MatrixSet:
    """At most eight matrices of the same proportions and layout, shrunk to at most LARGEST on the
    longer side."""
    m, n = matrices.shape
    scale = min(1.0, LARGEST / max(m, n))
    experts = min(matrices.experts, 4)
    return replace(
        matrices,
        num_matrices=2 * experts,
        shape=(round(scale * m), round(scale * n)),
        experts=experts,
    )


def _well_separated(i: Tensor) -> Tensor:
    return 0.9**i


def error_of_ours(small: OptimizerCase, device: torch.device) -> float:
    """The largest error of a matrix's movement in our optimizer, relative to that movement."""
    pool = gradient_pool(
        small.matrices, device, num_steps=2 * small.frequency + WARMUP + 6, decay=_well_separated
    )
    ours = small.contestant(OURS, pool, **FOR_THE_CHECK[small.rule])
    start = _stacked(ours.params)
    for _ in pool:
        ours.set_gradients()
        ours.step()
    moved = _stacked(ours.params).double() - start.double()
    options = OPTIONS[small.rule]
    if small.rule == "soap":
        options = options | {
            "precondition_frequency": small.frequency,
            "adam_warmup_steps": WARMUP,
        }
    run = getattr(reference, small.rule)
    errors: list[float] = []
    for index, w in enumerate(start.double().cpu()):
        expected = run(w, [g[index].double().cpu() for g in pool], **options) - w
        errors.append(float((moved[index].cpu() - expected).norm() / expected.norm()))
    return max(errors)


def _last_updates(contestant: Contestant, case: OptimizerCase) -> Tensor:
    """Return the last COMPARED updates of all parameters, after checking SOAP's refreshes, and
    that gradients stay as they are."""
    gradients = [[g.clone() for g in step] for step in contestant.gradients]
    refreshes, updates, before = [], [], _bases(contestant, case)
    for step in range(1, len(gradients) + 1):
        start = _stacked(contestant.params)
        contestant.set_gradients()
        contestant.step()
        updates.append(_stacked(contestant.params) - start)
        after = _bases(contestant, case)
        if step > 1 and not all(
            torch.equal(old, new) for old, new in zip(before, after, strict=True)
        ):
            refreshes.append(step)
        before = after
    if case.rule == "soap":
        _check_refreshes(contestant.name, refreshes, case.frequency, len(gradients))
    if not all(
        torch.equal(g, old)
        for now, then in zip(contestant.gradients, gradients, strict=True)
        for g, old in zip(now, then, strict=True)
    ):
        raise CheckError(f"{contestant.name} changes the gradients that it is given")
    return torch.stack(updates[-COMPARED:])


def _check_refreshes(name: str, refreshes: Sequence[int], frequency: int, num_steps: int) -> None:
    for start in range(2, num_steps - frequency + 2, frequency):
        due = [step for step in refreshes if start <= step < start + frequency]
        if len(due) != 1:
            raise CheckError(
                f"{name} refreshes at steps {list(refreshes)}: not once in steps {start} to "
                f"{start + frequency - 1}"
            )


def _bases(contestant: Contestant, case: OptimizerCase) -> list[Tensor]:
    if case.rule != "soap":
        return []
    bases = [
        tensor.clone()
        for path, tensor in reachable_tensors(dict(contestant.optimizer.state))
        if BASIS.search(path)
    ]
    if contestant.num_steps and not bases:
        raise CheckError(f"no bases found in the state of {contestant.name}")
    return bases


def _stacked(params: Sequence[Tensor]) -> Float[Tensor, "num_matrices m n"]:
    """Stack all matrices of 2-D or 3-D parameters."""
    return torch.cat(list(_as_3d(params))).detach().clone()


def _as_3d(params: Sequence[Tensor]) -> Iterator[Tensor]:
    for p in params:
        yield p if p.dim() == 3 else p[None]


def _cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(
        x.double().flatten(), y.double().flatten(), dim=0
    ).item()
