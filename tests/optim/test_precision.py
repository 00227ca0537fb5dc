"""The settings under which a phase runs are the optimizer's own inside, and the caller's own after it."""

import subprocess
import sys

import pytest
import torch
from optim_helpers import KINDS, all_same, clones, make, parameters, run

PROBE = """
import os, sys
import torch
from lather.optim import SOAP
from lather.optim.rules import bases, soap

backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
update, turn = soap.SOAPRule.update, bases.update_eigenbasis_and_momentum


def now():
    return [backend.fp32_precision for backend in backends]


def probe(setting):
    exec(setting)
    seen = []
    soap.SOAPRule.update = lambda *a: (seen.append(now()), update(*a))[1]
    bases.update_eigenbasis_and_momentum = lambda *a, **k: (seen.append(now()), turn(*a, **k))[1]
    before = now()
    p = torch.nn.Parameter(torch.randn(4, 4))
    p.grad = torch.randn(4, 4)
    SOAP([p], precondition_frequency=1, fp32_matmul_prec="highest", qr_fp32_matmul_prec="medium").step()
    assert seen == [["ieee", "ieee"], ["tf32", "bf16"], ["tf32", "bf16"]], (setting, seen)
    assert now() == before, (setting, now(), before)


torch.set_num_threads(1)
SOAP([torch.nn.Parameter(torch.zeros(1))])  # imports what torch imports late
for setting in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        probe(setting)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, setting
"""

SETTINGS = [
    "",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
]


def test_matmul_precision_is_as_asked_inside_and_the_callers_own_after() -> None:
    """Each in a process of its own: torch refuses to go back from one way of setting it to another."""
    result = subprocess.run([sys.executable, "-c", PROBE, *SETTINGS], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_reach_the_update(kind: str) -> None:
    inside = parameters([(4, 6), (3, 4, 5)])
    outside = clones(inside)
    a, b = make(kind, inside, precondition_frequency=1), make(kind, outside, precondition_frequency=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(a, inside, range(3))
    run(b, outside, range(3))
    assert all_same(inside, outside)
