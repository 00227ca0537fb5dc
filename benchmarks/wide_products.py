"""Runs `lather` with products of 16-bit matrices formed in fp32 and rounded once, as tensor cores
do, on CPUs that have no instructions for them, whose own products take ten times as long:

    python -m benchmarks.wide_products bench convergence run benchmarks/studies/fp8.toml

Products of two bf16 numbers are exact in fp32, so results differ from torch's own products by the
order of sums alone."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from lather.cli import main

OPERATIONS = ("mm", "addmm", "bmm", "baddbmm")
NARROW = (torch.bfloat16, torch.float16)


def widen_products() -> torch.library.Library:
    """Replace torch's products on CPUs; the result has to be kept as long as they are wanted."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in OPERATIONS:
            for overload in ("", ".out"):
                _widen(library, name + overload)
    return library


def _widen(library: torch.library.Library, name: str) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *operands: Any, out: Tensor | None = None, **factors: Any) -> Tensor:
        if operands[0].dtype not in NARROW:
            extra = {} if out is None else {"out": out}
            return kernel.call_boxed(keys, *operands, **factors, **extra)
        operation = getattr(torch.ops.aten, name.removesuffix(".out")).default
        wide = operation(*(operand.float() for operand in operands), **factors)
        return wide.to(operands[0].dtype) if out is None else out.copy_(wide)

    library.impl(name, product, "CPU", with_keyset=True, allow_override=True)


if __name__ == "__main__":
    kept = widen_products()
    sys.exit(main())
