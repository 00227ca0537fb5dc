"""Products of 16-bit matrices that are formed in fp32, for studies on CPUs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = """
import torch
import torch.nn.functional as F
from benchmarks.wide_products import widen_products

def products(dtype):
    torch.manual_seed(0)
    a_RI, w_EOI, sum_R = torch.randn(9, 8), torch.randn(3, 16, 8), torch.randn(9)
    a_RI, w_EOI, sum_R = a_RI.to(dtype), w_EOI.to(dtype), sum_R.to(dtype)
    ends_E = torch.tensor([4, 4, 9], dtype=torch.int32)
    return (
        a_RI @ a_RI.T,
        F.grouped_mm(a_RI, w_EOI.mT, offs=ends_E),
        torch.addmm(sum_R, a_RI, a_RI.T, beta=0.5, alpha=2.0),
        torch.baddbmm(w_EOI, w_EOI, a_RI[:8].expand(3, 8, 8)),
        torch.bmm(w_EOI, w_EOI.mT, out=torch.empty(3, 16, 16, dtype=dtype)),
    )

plain, plain_wide = products(torch.bfloat16), products(torch.float32)
kept = widen_products()
for before, after in zip(plain, products(torch.bfloat16), strict=True):
    assert after.dtype == torch.bfloat16
    torch.testing.assert_close(after, before, rtol=2**-7, atol=1e-3)
for before, after in zip(plain_wide, products(torch.float32), strict=True):
    assert torch.equal(before, after)

# a sum that is rounded after each term ends at 256
a, b = torch.tensor([[256.0, 1.0, 1.0]]), torch.ones(3, 1)
assert (a.bfloat16() @ b.bfloat16()).item() == 258
"""


def test_products_are_formed_in_fp32_and_those_in_fp32_stay_as_they_are() -> None:
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", CHECK], check=True, cwd=root, timeout=120)
