"""The interpreter runs what a compiler may refuse: here the kernels are compiled, for a CUDA device that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lather.kernels.adam_in_basis import triton as adam
from lather.kernels.cross_entropy import triton as cross_entropy
from lather.kernels.linear_cross_entropy import triton as linear

POINTERS = {"logits", "losses", "largest", "total", "label_logit", "logsumexp", "g", "exp_avg", "exp_avg_sq", "u"}
INTEGERS = {"row_stride", "out_stride", "first", "num_columns", "vocabulary", "size"}


def type_of(name, kernel):
    if name in POINTERS or (name == "scale" and kernel is not adam._adam):
        return "*fp32"
    return "*i64" if name == "labels" else "i32" if name in INTEGERS else "fp32"


for kernel, changes, constants in [
    (linear._update_logsumexp, {}, {"BLOCK": 512}),
    (linear._softmax_gradient, {"out": "*bf16"}, {"BLOCK": 512}),
    (linear._softmax_gradient, {"out": "*fp32"}, {"BLOCK": 512}),
    (cross_entropy._cross_entropy, {"logits": "*bf16"}, {"BLOCK": 4096, "WITH_GRADIENT": True}),
    (cross_entropy._cross_entropy, {}, {"BLOCK": 1, "WITH_GRADIENT": False}),
    (adam._adam, {"exp_avg": "*bf16"}, {"BLOCK": 1024}),
]:
    types = {name: "constexpr" if name in constants else changes.get(name, type_of(name, kernel)) for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, types, fixed), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, len(compiled.asm["cubin"]))
"""


def test_the_kernels_compile(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    sizes = [int(line.split()[1]) for line in result.stdout.splitlines()]
    assert len(sizes) == 6
    assert min(sizes) > 0
