"""Optimizers that are saved, loaded and stepped, and a digest of all bits at the end, for
`test_golden_bits`. The digests of the machine that last made them are in golden.json:

    MKL_CBWR=AUTO OMP_NUM_THREADS=1 PYTHONPATH=src:tests python tests/optim/golden.py
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from optim_helpers import run
from torch import Tensor, nn

from lather.optim import (
    KLSOAP,
    REKLS,
    SOAP,
    AdamW,
    MatrixOptimizer,
    Muon,
    SOAPMuon,
    StackedSOAP,
    parameter_groups,
)
from machine import machine

FILE = Path(__file__).with_name("golden.json")
SHAPES = ((6, 4), (3, 4, 5), (6, 4), (5,))

Parameters = list[nn.Parameter]


class TinyModel(nn.Module):
    """A model with all groups of `parameter_groups`: a matrix, stacked experts, and for the rest an
    embedding and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.empty(3, 4, 5))


def vectors_apart(params: Parameters) -> list[dict[str, Any]]:
    """Put vectors into a group of their own, because they have no other layout than "tensor"."""
    return [{"params": params[:-1]}, {"params": params[-1:], "matrix_layout": "tensor"}]


PER_EXPERT = {"matrix_layout": "per_expert", "second_moment": "rotate"}

OPTIMIZERS: dict[str, Callable[[Parameters], MatrixOptimizer]] = {
    "soap": lambda params: SOAP(params, lr=1e-2, precondition_frequency=2, second_moment="permute"),
    "soap_per_expert": lambda params: SOAP(
        vectors_apart(params),
        lr=1e-2,
        precondition_frequency=2,
        state_dtype=torch.bfloat16,
        **PER_EXPERT,
    ),
    "soap_stacked": lambda params: SOAP(
        vectors_apart(params), lr=1e-2, precondition_frequency=2, matrix_layout="stacked"
    ),
    "kl_soap": lambda params: KLSOAP(params, lr=1e-2, precondition_frequency=3),
    "rekls": lambda params: REKLS(params, lr=1e-2),
    "muon": lambda params: Muon(params, lr=1e-2, weight_decay=0.1),
    "soap_muon": lambda params: SOAPMuon(params, lr=1e-2, precondition_frequency=2),
    "adamw": lambda params: AdamW(params, lr=1e-2),
    "stacked_soap": lambda params: StackedSOAP(vectors_apart(params), lr=1e-2, adam_warmup_steps=3),
}
CASES = (*OPTIMIZERS, "soap_parameter_groups")


@torch.no_grad()
def make(name: str) -> tuple[MatrixOptimizer, Parameters]:
    """Make an optimizer before its first step, and its parameters: small ones, in which the last
    bits of an update show."""
    if name == "soap_parameter_groups":
        model = TinyModel()
        params = list(model.parameters())
        optimizer: MatrixOptimizer = SOAP(
            parameter_groups(model), lr=1e-2, precondition_frequency=2
        )
    else:
        params = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
        optimizer = OPTIMIZERS[name](params)
    generator = torch.Generator().manual_seed(0)
    for p in params:
        p.copy_(0.01 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return optimizer, params


def digest_of(tensors: dict[str, Tensor]) -> str:
    """Digest names, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_case(name: str) -> str:
    """Digest parameters and state after five steps, a save and a load, and five more steps."""
    optimizer, params = make(name)
    run(optimizer, params, range(1, 6))
    saved, (optimizer, others) = optimizer.state_dict(), make(name)
    with torch.no_grad():
        for p, other in zip(params, others, strict=True):
            other.copy_(p)
    optimizer.load_state_dict(saved)
    run(optimizer, others, range(6, 11))
    state = optimizer.state_dict()["state"]
    entries = {f"{i}/{key}": x for i, of in state.items() for key, x in of.items()}
    return digest_of({**{str(i): p for i, p in enumerate(others)}, **entries})


def main() -> None:
    assert machine()["mkl_cbwr"] == "AUTO"
    torch.set_num_threads(1)
    digests = {name: digest_of_case(name) for name in CASES}
    FILE.write_text(json.dumps({"machine": machine(), "digests": digests}, indent=1) + "\n")


if __name__ == "__main__":
    main()
