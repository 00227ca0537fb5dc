"""Optimizers that are saved, loaded and stepped end with the bits that they had when golden.json
was made, on the machine that is named there:

    MKL_CBWR=AUTO OMP_NUM_THREADS=1 PYTHONPATH=src:tests python tests/optim/test_golden_bits.py
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from optim_helpers import run
from torch import Tensor, nn

from lather.optim import KLSOAP, REKLS, SOAP, AdamW, Muon, SOAPMuon, StackedSOAP, parameter_groups
from machine import machine

FILE = Path(__file__).with_name("golden.json")
SHAPES = ((6, 4), (3, 4, 5), (6, 4), (5,))


class TinyModel(nn.Module):
    """A model with all groups of `parameter_groups`: a matrix, stacked experts, and for the rest an
    embedding and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.empty(3, 4, 5))


EVERY_SECOND: dict[str, Any] = {"precondition_frequency": 2}
NARROW: dict[str, Any] = {"second_moment": "rotate", "state_dtype": torch.bfloat16}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "soap": (SOAP, {**EVERY_SECOND, "second_moment": "permute"}),
    "soap_per_expert": (SOAP, {**EVERY_SECOND, **NARROW, "matrix_layout": "per_expert"}),
    "soap_stacked": (SOAP, {**EVERY_SECOND, "matrix_layout": "stacked"}),
    "kl_soap": (KLSOAP, {"precondition_frequency": 3}),
    "rekls": (REKLS, {}),
    "muon": (Muon, {"weight_decay": 0.1}),
    "soap_muon": (SOAPMuon, EVERY_SECOND),
    "adamw": (AdamW, {}),
    "stacked_soap": (StackedSOAP, {"adam_warmup_steps": 3}),
    "soap_parameter_groups": (SOAP, EVERY_SECOND),
}


@torch.no_grad()
def make(name: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Make an optimizer before its first step, and its parameters: small ones, in which the last
    bits of an update show. Vectors, which have no layout but "tensor", are in a group of their own
    if the others have another one."""
    cls, options = OPTIMIZERS[name]
    params = [nn.Parameter(torch.empty(shape)) for shape in SHAPES]
    groups: Any = params
    if "matrix_layout" in options or cls is StackedSOAP:
        groups = [{"params": params[:-1]}, {"params": params[-1:], "matrix_layout": "tensor"}]
    if name == "soap_parameter_groups":
        model = TinyModel()
        params, groups = list(model.parameters()), parameter_groups(model)
    optimizer = cls(groups, lr=1e-2, **options)
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
    for p, other in zip(params, others, strict=True):
        other.data.copy_(p.data)
    optimizer.load_state_dict(saved)
    run(optimizer, others, range(6, 11))
    state = optimizer.state_dict()["state"]
    entries = {f"{i}/{key}": x for i, of in state.items() for key, x in of.items()}
    return digest_of({**{str(i): p for i, p in enumerate(others)}, **entries})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_have_their_bits(name: str) -> None:
    golden = json.loads(FILE.read_text())
    if machine() != golden["machine"]:
        pytest.skip("another machine made the digests, and rounds products differently")
    assert digest_of_case(name) == golden["digests"][name]


def main() -> None:
    assert machine()["mkl_cbwr"] == "AUTO"
    torch.set_num_threads(1)
    digests = {name: digest_of_case(name) for name in OPTIMIZERS}
    FILE.write_text(json.dumps({"machine": machine(), "digests": digests}, indent=1) + "\n")


if __name__ == "__main__":
    main()
