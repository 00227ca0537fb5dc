"""Measures the numbers of docs/optimizers-reference.md: what bf16 state costs in accuracy, and how
large the first updates are.

    python -m benchmarks.optimizer_numbers        (20 seconds on one CPU core)

The gradients of a matrix do not depend on it, so that every setting sees the same gradients.
"white" gradients have independent Gaussian entries: the hardest case for eigenvectors, as
eigenvalues lie close together. "falling" ones are A diag(1/i) X diag(1/i) B^T with fixed orthogonal
A, B and a new Gaussian X at each step. An update's change is |U - U_fp32| / |U_fp32| in the
Frobenius norm. The change of fp64 shows the rounding of fp32 itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import MatrixSet, gradient_pool
from lather.optim import KLSOAP, SOAP, MatrixOptimizer

N, STEPS = 256, 20
BF16 = torch.bfloat16
DTYPES: dict[str, Any] = {
    "fp64": torch.float64,
    "moments": {"moments": BF16},
    "bases": {"bases": BF16},
    "both": BF16,
}


def gradients(kind: str, shape: tuple[int, int], steps: int) -> list[Tensor]:
    """Draw `steps` gradients, the same numbers whenever it is called."""
    if kind == "white":
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator) for _ in range(steps)]
    return [
        g[0]
        for g in gradient_pool(MatrixSet("one", 1, shape), torch.device("cpu"), num_steps=steps)
    ]


def updates(
    rule: Callable[..., MatrixOptimizer], grads: list[Tensor], **options: Any
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Return the update U of every step, and the state after the last."""
    w = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = rule([w], lr=1.0, weight_decay=0.0, **options)
    for g in grads:
        with torch.no_grad():
            w.zero_()
        w.grad = g
        optimizer.step()
        yield -w.detach().clone(), optimizer.state[w]


def last(
    rule: type[MatrixOptimizer], grads: list[Tensor], **options: Any
) -> tuple[Tensor, dict[str, Any]]:
    return list(updates(rule, grads, **options))[-1]


def bf16_rows() -> None:
    print(
        f"update number {STEPS} of {N} x {N}, change against fp32, and the largest entry of |Q^T Q "
        "- I| of the kept basis"
    )
    settings: list[tuple[str, type[MatrixOptimizer], dict[str, Any]]] = [
        (
            "SOAP, refresh every step",
            SOAP,
            {"precondition_frequency": 1, "second_moment": "rotate"},
        ),
        ("SOAP, refresh every 10", SOAP, {"second_moment": "rotate"}),
        ("KLSOAP", KLSOAP, {}),
    ]
    for kind in ("white", "falling"):
        grads = gradients(kind, (N, N), STEPS)
        for name, rule, options in settings:
            reference, state = last(rule, grads, **options)
            cells = [f"fp32 Q {defect(state):.1e}"]
            for label, dtype in DTYPES.items():
                u, state = last(rule, grads, state_dtype=dtype, **options)
                change = (u - reference).norm() / reference.norm()
                cells.append(
                    f"{label} {change:.1e}" + (f" Q {defect(state):.1e}" if label == "both" else "")
                )
            print(f"{kind:8} {name:26}", "   ".join(cells))


def defect(state: dict[str, Any]) -> float:
    q = state["basis_0"].double()
    return float((q.T @ q - torch.eye(len(q))).abs().max())


def decay_rows() -> None:
    print("exp_avg_sq after a gradient of 1 and 1,000 of 0, betas[1] = 0.999")
    for dtype in (torch.float32, BF16):
        w = torch.nn.Parameter(torch.zeros(1))
        optimizer = SOAP([w], betas=(0.95, 0.999), state_dtype=dtype)
        for g in [1.0] + 1000 * [0.0]:
            w.grad = torch.full((1,), g)
            optimizer.step()
        print(f"{dtype!s:16} {optimizer.state[w]['exp_avg_sq'].item():.5f}")


def first_step_rows() -> None:
    print(
        f"largest rms of an update in the first {STEPS} steps, white gradients, refresh at every "
        "step"
    )
    for shape in ((64, 64), (64, 16), (256, 64)):
        grads = gradients("white", shape, STEPS)
        for name, rule, options in (
            ("SOAP permute", SOAP, {"precondition_frequency": 1}),
            ("SOAP rotate", SOAP, {"precondition_frequency": 1, "second_moment": "rotate"}),
            ("KLSOAP", KLSOAP, {}),
            ("KLSOAP permute", KLSOAP, {"second_moment": "permute"}),
            (
                "KLSOAP cold start",
                KLSOAP,
                {"second_moment": "permute", "adam_warmup_steps": 0, "initial_eigenvalue": 1e-8},
            ),
        ):
            rms = [float(u.square().mean().sqrt()) for u, _ in updates(rule, grads, **options)]
            print(
                f"{shape[0]:4} x {shape[1]:<4} {name:18} {max(rms):10.2f} at step "
                f"{rms.index(max(rms)) + 1}"
            )


if __name__ == "__main__":
    torch.set_num_threads(1)
    bf16_rows()
    decay_rows()
    first_step_rows()
