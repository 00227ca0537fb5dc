"""Muon against torch's Muon, the dtype of its iteration, and special cases of Muon and SOAP-Muon.
(Their numbers are compared with a reference in `test_reference.py`.)"""

from typing import Any

import pytest
import torch
from comparison import TOLERANCE
from optim_helpers import (
    clones,
    copy_gradients,
    give_gradients,
    largest_difference,
    parameters,
    run,
    run_both,
)

from lather.optim import Muon, SOAPMuon
from lather.optim.linalg import newton_schulz


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_but_for_the_dtype_of_the_iteration(
    adjust: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They coincide in the momentum, an average mu B + (1 - mu) G; in Nesterov's numerator; in the
    quintic iteration and its number of steps; in decoupled weight decay; and in both scales
    ("original" is our "spectral"). They differ in dtype, because torch iterates in bf16, which is
    switched off here; and for norms below 1e-7, which torch takes for 1e-7."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    ours = parameters([(6, 4), (4, 6), (5, 5)], torch.float64)
    theirs, wrong = clones(ours), clones(ours)
    common = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    a = Muon(
        ours,
        **common,
        scale={"original": "spectral"}.get(adjust, adjust),
        state_dtype=torch.float64,
    )
    b = torch.optim.Muon(theirs, **common, adjust_lr_fn=adjust)
    c = torch.optim.Muon(wrong, **{**common, "momentum": 0.909}, adjust_lr_fn=adjust)
    for step in range(14):
        give_gradients(ours, step)
        copy_gradients(ours, theirs)
        copy_gradients(ours, wrong)
        a.step()
        b.step()
        c.step()
    assert largest_difference(ours, theirs) <= TOLERANCE * 1e-2
    assert largest_difference(ours, wrong) > 1e-2 * 1e-2


def test_muon_with_bf16_iteration_is_torchs_to_the_rounding_of_bf16() -> None:
    """The measure is the share of torch's movement that ours covers; an error of 1 % in the rate
    changes it by 1 %."""
    for lr, is_right in ((1e-2, True), (1.01e-2, False)):
        ours = parameters([(48, 32), (32, 64)])
        theirs, start = clones(ours), clones(ours)
        a = Muon(ours, lr=lr, weight_decay=0.0, newton_schulz_dtype="bfloat16")
        b = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        run_both((a, ours), (b, theirs), range(14))
        for p, q, w in zip(ours, theirs, start, strict=True):
            x, y = ((moved - w).detach().flatten() for moved in (p, q))
            assert (abs(float(x @ y / (y @ y)) - 1) < 3e-3) == is_right
            assert (x - y).norm() < 0.03 * y.norm()


def test_dtype_of_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU "auto" is the dtype of the state's arithmetic; "bfloat16" is seen to round; the kind
    of CPU decides which of the two "fastest" is."""
    ends = {}
    for is_fast, dtype in (
        (True, "auto"),
        (True, "float32"),
        (True, "bfloat16"),
        (True, "fastest"),
        (False, "fastest"),
    ):
        monkeypatch.setattr(newton_schulz, "cpu_is_fast_in_bf16", lambda is_fast=is_fast: is_fast)
        params = parameters([(8, 6)])
        run(Muon(params, newton_schulz_dtype=dtype), params, range(3))
        ends[dtype, is_fast] = params
    exact = ends["float32", True]
    assert (
        largest_difference(ends["auto", True], exact)
        == largest_difference(ends["fastest", False], exact)
        == 0
    )
    assert 1e-5 < largest_difference(ends["bfloat16", True], exact) < 1e-2
    assert largest_difference(ends["bfloat16", True], ends["fastest", True]) == 0


def test_fastest_leaves_fp64_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "cpu_is_fast_in_bf16", lambda: True)
    x = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        newton_schulz.orthogonalize(x, dtype="fastest"), newton_schulz.orthogonalize(x)
    )


CPUS = {
    "Intel with AMX": ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", True),
    "Intel without AMX": ("GenuineIntel", "avx512f avx512_bf16", False),
    "AMD, fourth or fifth Zen": ("AuthenticAMD", "avx512f avx512_bf16", True),
    "AMD before": ("AuthenticAMD", "avx2", False),
    "ARM": ("ARM", "asimd bf16", False),
}


@pytest.mark.parametrize("cpu", CPUS)
def test_which_cpus_are_faster_in_bf16(cpu: str) -> None:
    vendor, flags, expected = CPUS[cpu]
    assert newton_schulz.is_fast_in_bf16(f"vendor_id\t: {vendor}\nflags\t\t: {flags}\n") == expected


@pytest.mark.parametrize("cls", [Muon, SOAPMuon])
def test_vectors_and_tensors_take_adamws_step(cls: Any) -> None:
    """Scalars, vectors and, under "tensor", parameters of more than two dims step at the
    optimizer's rate and decay."""
    ours = parameters([(5,), (), (3, 4, 5), (7,)], torch.float64)
    theirs = clones(ours)
    a = cls(ours, lr=2e-2, weight_decay=0.1, state_dtype=torch.float64)
    b = torch.optim.AdamW(theirs, lr=2e-2, weight_decay=0.1, betas=(0.9, 0.95))
    run_both((a, ours), (b, theirs), range(8))
    assert largest_difference(ours, theirs) <= 1e-14
    assert all(a.state[p].keys() == {"step", "exp_avg", "exp_avg_sq"} for p in ours)


def test_soap_muon_without_bases_is_muon() -> None:
    for options in ({"max_precond_dim": 0}, {"muon_warmup_steps": 100}):
        ours = parameters([(6, 4), (3, 4, 5), (5,)])
        theirs = clones(ours)
        groups = [
            [{"params": params[:2], "matrix_layout": "per_expert"}, {"params": params[2:]}]
            for params in (ours, theirs)
        ]
        a, b = SOAPMuon(groups[0], momentum=0.9, **options), Muon(groups[1], momentum=0.9)
        run_both((a, ours), (b, theirs), range(6))
        assert largest_difference(ours, theirs) == 0


def test_a_matrix_without_gradient_is_not_touched_and_one_of_zeros_does_not_move() -> None:
    for cls in (Muon, SOAPMuon):
        p, q = start = parameters([(6, 4), (6, 4)])
        before = clones(start)
        optimizer = cls([p, q], weight_decay=0.0)
        for _ in range(4):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        assert largest_difference([p, q], before) == 0
        assert not optimizer.state.get(q)
