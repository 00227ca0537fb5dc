"""Measures the batched refresh of a transformer's 96 factors against `torch.linalg.qr` matrix by
matrix, and against the device's fp32 products.

Twelve layers of four matrices (attention in and out, MLP in and out) have 96 factors: 72 of the
hidden size and 24 of the MLP size. Both contestants do one step of orthogonal iteration, Q = qr(K
Q) with columns in descending order, from bases a few percent off. Before it is timed, both results
have to be orthonormal and to diagonalize the factors equally well. Shapes: K and Q (B, n, n).

Nearly all flops of the refresh are products, most of them in bf16, three for each of fp32
(`lather.optim.linalg.split_products`), the others in fp32. If it did all of them at the rates of
one large batched product in each, it would take its floor: counted flops / measured rate. The goal
is a share of these rates, not a number of times that `torch.linalg.qr` takes, which depends on how
slow that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import CheckError
from benchmarks.gpu.clock import milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.measure import peak_temporary_bytes
from benchmarks.report import Row
from lather.optim.functional import get_eigenbasis_qr
from lather.shapes import Float
from lather.standin.operations import flops, name_of
from lather.torch_private import TorchDispatchMode

GOAL = 0.55
"""Least share of the products' rates, so that the refresh takes at most 1.8 times its floor. On
an H100 (53 Tflop/s in fp32, 690 in bf16) 1,024 / 4,096 has a floor of 107 ms and a prediction of
179 (60 %): 36 are passes over the matrices, most of which split them, 24 solves and factorizations,
and 8 products of few rows, which bytes limit. The rest is for whatever the model leaves out."""
NUM_LAYERS = 12
HIDDEN_AND_MLP = ((1024, 4096), (2048, 4096))
ORTHONORMAL = 1e-5
"""The most that an element of Q^T Q may differ from the identity's."""
AS_DIAGONAL = 1.02
"""The most off-diagonal mass that ours may leave, relative to the baseline's."""


@dataclass(frozen=True)
class Factors:
    """Factors of equal size, and the bases of their last refresh."""

    k: Float[Tensor, "b n n"]
    q: Float[Tensor, "b n n"]


def transformer_factors(
    hidden: int, mlp: int, device: torch.device, num_layers: int = NUM_LAYERS
) -> list[Factors]:
    """Make eight factors for each layer, six of size `hidden` and two of size `mlp`."""
    return [_factors(6 * num_layers, hidden, device), _factors(2 * num_layers, mlp, device)]


def _factors(b: int, n: int, device: torch.device) -> Factors:
    """Make K = A diag(1 / i^2) A^T plus 5 % of a new gradient's factor, and Q = A."""
    generator = torch.Generator(device).manual_seed(n)
    q = torch.linalg.qr(torch.randn(n, n, generator=generator, device=device)).Q
    scale = 1 / torch.arange(1, n + 1, device=device)
    k = torch.empty(b, n, n, device=device)
    for factor in k:
        g = (q * scale) @ torch.randn(n, n, generator=generator, device=device) / n**0.5
        factor.copy_(0.95 * (q * scale.square()) @ q.mT + 0.05 * g @ g.mT)
    return Factors(k, q.expand(b, n, n).contiguous())


def refresh_batched_by_lather(factors: Sequence[Factors]) -> list[Tensor]:
    """Refresh as Lather does: a batched call for each size."""
    return [get_eigenbasis_qr(f.k, f.q)[0] for f in factors]


def refresh_one_by_one(factors: Sequence[Factors]) -> list[Tensor]:
    """Refresh as the baseline does: a Householder QR for each factor."""
    refreshed = []
    for f in factors:
        q_new = torch.empty_like(f.q)
        for k, q, out in zip(f.k, f.q, q_new, strict=True):
            kq = k @ q
            out.copy_(torch.linalg.qr(kq[:, (q * kq).sum(0).argsort(descending=True)]).Q)
        refreshed.append(q_new)
    return refreshed


REFRESHES = {"lather": refresh_batched_by_lather, "one_by_one": refresh_one_by_one}


class CountedFlops(TorchDispatchMode):
    """Counts the flops of products and factorizations inside the block, on any device; `bf16_flops`
    are those of bf16 operands, `flops` all others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.bf16_flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flops(func, name_of(func), args, kwargs or {}, out)
        if count and args[1:] and getattr(args[1], "dtype", None) == torch.bfloat16:
            self.bf16_flops += count
        else:
            self.flops += count
        return out


def check_refreshes(factors: Sequence[Factors]) -> dict[str, Any]:
    """Check both contestants' results. Raises CheckError."""
    off_diagonal = {}
    for name, refresh in REFRESHES.items():
        worst = 0.0
        for f, q in zip(factors, refresh(factors), strict=True):
            eye = torch.eye(q.shape[-1], device=q.device)
            if (
                error := max((basis.mT @ basis - eye).abs().max().item() for basis in q)
            ) > ORTHONORMAL:
                raise CheckError(
                    f"bases of {name} are off orthonormal by {error:.1e} at {tuple(q.shape)}; "
                    f"{ORTHONORMAL:.0e} is allowed"
                )
            worst = max([worst, *(_off_diagonal(*pair) for pair in zip(f.k, q, strict=True))])
        off_diagonal[name] = worst
    if off_diagonal["lather"] > AS_DIAGONAL * off_diagonal["one_by_one"]:
        raise CheckError(
            f"off-diagonal share after the refresh: {off_diagonal}; ours may be {AS_DIAGONAL} "
            "times the baseline's"
        )
    return {"off_diagonal_share": off_diagonal}


def _off_diagonal(k: Tensor, q: Tensor) -> float:
    rotated = q.mT @ k @ q
    return float((rotated - rotated.diagonal().diag()).norm() / rotated.norm())


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure each size; yields a row with both contestants' times, our share of the rates of
    products, and how many times as fast ours is. Raises CheckError."""
    for hidden, mlp in ((16, 24),) if settings.small else HIDDEN_AND_MLP:
        factors = transformer_factors(hidden, mlp, settings.device)
        checked = check_refreshes(factors)
        ms, peaks = {}, {}
        for name, refresh in REFRESHES.items():
            work = partial(refresh, factors)
            peaks[name] = peak_temporary_bytes(work, settings.device)
            # the check and the measurement of the peak have warmed up
            ms[name] = milliseconds(work, settings.device, 3, warm_up=0)
        with CountedFlops() as counted:
            REFRESHES["lather"](factors)
        rate = product_rate(factors[-1])
        bf16_rate = product_rate(factors[-1], torch.bfloat16) if counted.bf16_flops else None
        floor_ms = 1e3 * counted.flops / rate
        if bf16_rate:
            floor_ms += 1e3 * counted.bf16_flops / bf16_rate
        yield {
            "benchmark": "refresh",
            "config": {
                "hidden": hidden,
                "mlp": mlp,
                "factors": {str(f.k.shape[-1]): len(f.k) for f in factors},
            },
            "baseline": "one_by_one",
            "check": checked,
            "ms": ms,
            "peak_temporary_bytes": peaks,
            "times_as_fast": ms["one_by_one"]["median"] / ms["lather"]["median"],
            "flops": counted.flops,
            "bf16_flops": counted.bf16_flops,
            "product_flops_per_second": rate,
            "bf16_product_flops_per_second": bf16_rate,
            "floor_ms": floor_ms,
            "share": floor_ms / ms["lather"]["median"],
            "goal": GOAL,
        }


def product_rate(factors: Factors, dtype: torch.dtype = torch.float32) -> float:
    """Measure the flops per second of the products K Q of all factors of a size, in fp32, or in
    bf16 with results in fp32."""
    k, q = factors.k.to(dtype), factors.q.to(dtype)

    def multiply() -> Tensor:
        return k @ q if dtype == torch.float32 else torch.bmm(k, q, out_dtype=torch.float32)

    ms = milliseconds(multiply, k.device, 3)
    return 2e3 * k.numel() * k.shape[-1] / ms["median"]
