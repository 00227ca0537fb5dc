"""`lather bench memory`: measures the bytes that the MoE layer keeps for backward and that the loss
needs, and what saving them costs in time.

    kept    bytes per token that router and experts keep for backward, counted
            (`benchmarks.live_bytes`), so exact on any machine: the three memory modes, and
            "early_free": segment-wise early freeing alone, as the pipelines of other trainers have
            it, which drops dispatched copies and the combined output but keeps each product's input
            and the experts' outputs (K D + 3 K F + K D)
    loss    the most bytes alive at a time in forward and backward of `linear_cross_entropy`,
            besides inputs and gradients, against the logits tensor; counted on the meta device
    time    milliseconds of forward and backward of the layer, medians over interleaved rounds,
            ratios to plain autograd

Sizes are DeepSeek-V2-Lite's (D 2048, E 64, K 6, F 1408), and for `time` smaller ones, too; T is
small for `kept`, whose bytes are proportional to it. Every case is checked first: all modes give
the output and gradients of plain autograd.

Letters: T tokens, D hidden size, E experts, K experts per token, F expert intermediate size, V
vocabulary.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.check import CheckError
from benchmarks.live_bytes import PeakBytes
from benchmarks.measure import percentiles
from benchmarks.memory_report import print_table, summary
from benchmarks.report import Row, RowFile, environment, gather
from lather.console import command_console
from lather.device import gpu_module, is_gpu
from lather.errors import UserError, require
from lather.kernels.gather import padded_index_gather
from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.kernels.route import plan_route
from lather.kernels.swiglu import swiglu
from lather.models.experts import Experts
from lather.models.gated_mlp import MEMORY_MODES
from lather.models.routing import Router

HIDDEN, LOSS_TOKENS, VOCABULARY = 2048, 4096, 102400
KEPT_TOKENS, CHECK_TOKENS = 32, 32
MIN_ROUNDS = 5
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""The largest difference of an output or gradient from plain autograd's, relative in the Frobenius
norm."""
CONTESTANTS = ("reference", "early_free", "saved", "recompute")
"""The memory modes of the layer, and early freeing alone."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of a layer."""

    hidden: int
    experts: int
    experts_per_token: int
    intermediate: int


PUBLISHED = LayerSizes(HIDDEN, 64, 6, 1408)
TIMED = {
    "DeepSeek-V2-Lite, 256 tokens": (PUBLISHED, 256),
    "D 512, E 16, K 4, F 384, 2048 tokens": (LayerSizes(512, 16, 4, 384), 2048),
}
"""The timed cases: few rows per expert, so that weights and their gradients are most of the work;
and many rows."""


@dataclass(frozen=True)
class MemoryBenchmark:
    """Measures bytes and time of the MoE layer and of the loss, against plain autograd."""

    parts: tuple[Literal["kept", "loss", "time"], ...] = ("kept", "loss", "time")
    """Parts to measure."""
    rounds: int = 7
    """Timed rounds, each of a forward and backward per contestant."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to run on; products are timed in fp32 on CPU, in bf16 on CUDA."""
    out: Path = Path("benchmarks/results")
    """Folder for memory-DEVICE.jsonl; a run replaces that of the same device."""

    def __post_init__(self) -> None:
        require(self.rounds >= MIN_ROUNDS, "--rounds", self.rounds, f"at least {MIN_ROUNDS}")
        require(bool(self.parts), "--parts", self.parts, "some of kept, loss, time")


class Layer(nn.Module):
    """Router and experts of an MoE layer, on the meta device."""

    def __init__(self, contestant: str, sizes: LayerSizes) -> None:
        super().__init__()
        with torch.device("meta"):
            self.router = Router(sizes.hidden, sizes.experts, sizes.experts_per_token)
            kind = EarlyFree if contestant == "early_free" else Experts
            self.experts = kind(sizes.experts, sizes.hidden, sizes.intermediate)
        if contestant in MEMORY_MODES:
            self.experts.memory = contestant

    def forward(self, x_TD: Tensor) -> Tensor:
        routing = self.router(x_TD)
        y_TD: Tensor = self.experts(x_TD, routing.experts_TK, routing.weights_TK)
        return y_TD


def make_layers(sizes: LayerSizes, dtype: torch.dtype, device: torch.device) -> dict[str, Layer]:
    """Make a layer for each contestant, all with the same random parameters."""
    layers = {contestant: Layer(contestant, sizes) for contestant in CONTESTANTS}
    generator = torch.Generator(device).manual_seed(0)
    shared = {
        name: torch.empty(p.shape, device=device)
        .uniform_(-0.03, 0.03, generator=generator)
        .to(dtype)
        for name, p in layers["reference"].named_parameters()
    }
    for layer in layers.values():
        layer.load_state_dict(shared, assign=True)
    return layers


class EarlyFree(Experts):
    """A layer with early freeing alone: dead tensors are dropped and gate/up is saved once, but
    products keep their inputs and outputs."""

    def forward(
        self,
        x_RD: Tensor,
        experts_RK: Tensor,
        weights_RK: Tensor,
        num_pairs: int | None = None,
        received: object = None,  # only with FP8
    ) -> Tensor:
        routed = plan_route(experts_RK, len(self.down_proj), num_pairs=num_pairs)
        rows_GD = padded_index_gather(x_RD, routed.token_G, 1)
        out = []
        runs = itertools.pairwise([0, *routed.end_E.tolist()])
        for (start, end), gate_up_HD, down_DF in zip(
            runs, self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True
        ):
            out.append(swiglu(rows_GD[start:end] @ gate_up_HD.T) @ down_DF.T)
        weight_G = weights_RK.new_zeros(len(routed.token_G)).scatter(
            0, routed.row_TK.flatten(), weights_RK.flatten()
        )
        weighted_GD = (torch.cat(out) * weight_G[:, None]).to(x_RD.dtype)
        token_GD = routed.token_G[:, None].expand_as(weighted_GD)
        return torch.zeros_like(x_RD).scatter_add(0, token_GD, weighted_GD)


def run(options: MemoryBenchmark) -> int:
    """Run the benchmark; returns the exit status, 1 if a case failed its check."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no CUDA device: use --device cpu")
    device, console = torch.device(options.device), command_console()
    common = environment(device, ())
    file = RowFile(options.out / f"memory-{device.type}.jsonl")
    rows = gather(_rows(options, device), common, file, console)
    if not rows:
        return 1
    print_table(rows, console)
    for line in summary(rows):
        console.print(line, highlight=False)
    console.print(f"rows {file.path}", highlight=False)
    return 0


def _rows(options: MemoryBenchmark, device: torch.device) -> Iterator[Row]:
    if "kept" in options.parts:
        yield from measure_kept(device)
    if "loss" in options.parts:
        yield from measure_loss()
    if "time" in options.parts:
        yield from measure_time(options, device)


# --- kept bytes -----------------------------------------------------------------------------------


def measure_kept(device: torch.device) -> Iterator[Row]:
    """Count the bytes of every contestant in bf16; yields a row for each. Raises CheckError."""
    layers = make_layers(PUBLISHED, torch.bfloat16, device)
    checked = check_layers(layers)
    for contestant, layer in layers.items():
        with PeakBytes() as alive:
            out_TD = layer(_input(KEPT_TOKENS, layers["saved"]))
        bytes_per_token = (alive.now - out_TD.nbytes) / KEPT_TOKENS
        del out_TD
        yield {
            "benchmark": "kept",
            "config": {
                **asdict(PUBLISHED),
                "contestant": contestant,
                "tokens": KEPT_TOKENS,
                "dtype": "bfloat16",
            },
            "baseline": "reference",
            "check": checked,
            "bytes_per_token": bytes_per_token,
            "bound_elements_per_token": _bound(contestant),
        }


def _bound(contestant: str) -> int | None:
    """Elements per token that the contestant should keep by formula, besides routing metadata."""
    k_d, k_f = (
        PUBLISHED.experts_per_token * HIDDEN,
        PUBLISHED.experts_per_token * PUBLISHED.intermediate,
    )
    return {"saved": HIDDEN + 2 * k_f, "recompute": HIDDEN, "early_free": 2 * k_d + 3 * k_f}.get(
        contestant
    )


# --- the loss -------------------------------------------------------------------------------------


def measure_loss() -> Iterator[Row]:
    """Count the bytes of our loss and of the plain formula in each dtype; yields a row for each."""
    checked = check_loss()
    for dtype in (torch.bfloat16, torch.float32):
        logits_bytes = LOSS_TOKENS * VOCABULARY * dtype.itemsize
        for contestant, loss in (
            ("linear_cross_entropy", linear_cross_entropy),
            ("plain", plain_loss),
        ):
            extra = loss_extra_bytes(loss, dtype)
            yield {
                "benchmark": "loss",
                "config": {
                    "contestant": contestant,
                    "tokens": LOSS_TOKENS,
                    "vocabulary": VOCABULARY,
                    "hidden": HIDDEN,
                    "dtype": str(dtype)[6:],
                },
                "baseline": "plain",
                "check": checked,
                "extra_bytes": extra,
                "logits_bytes": logits_bytes,
                "share_of_logits": extra / logits_bytes,
            }


def plain_loss(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    return nn.functional.cross_entropy((x_TD @ weight_VD.T).float(), labels_T, reduction="sum")


def loss_extra_bytes(loss: Callable[..., Tensor], dtype: torch.dtype) -> int:
    """Count, on the meta device, the most bytes alive at a time in forward and backward, less the
    two gradients."""
    with torch.device("meta"):
        x_TD = torch.empty(LOSS_TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
        weight_VD = torch.empty(VOCABULARY, HIDDEN, dtype=dtype, requires_grad=True)
        labels_T = torch.empty(LOSS_TOKENS, dtype=torch.int64)
        with PeakBytes() as peak:
            loss(x_TD, weight_VD, labels_T).backward()
    extra: int = peak.bytes - (x_TD.numel() + weight_VD.numel()) * dtype.itemsize
    return extra


def check_loss() -> dict[str, float]:
    """Compare our loss with the plain formula at small sizes. Raises CheckError."""
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_VD = (
        torch.randn(rows, 64, generator=generator).requires_grad_() for rows in (100, 1000)
    )
    labels_T = torch.randint(1000, (100,), generator=generator)
    results = []
    for loss in (linear_cross_entropy, plain_loss):
        value = loss(x_TD, weight_VD, labels_T)
        results.append([value.detach(), *torch.autograd.grad(value, (x_TD, weight_VD))])
    return {
        "error_of_loss": _compare("linear_cross_entropy", results[0], results[1], torch.float32)
    }


# --- time -----------------------------------------------------------------------------------------


def measure_time(options: MemoryBenchmark, device: torch.device) -> Iterator[Row]:
    """Time every contestant in every case; yields a row for each. Raises CheckError."""
    dtype = torch.bfloat16 if is_gpu(device) else torch.float32
    for case, (sizes, tokens) in TIMED.items():
        layers = make_layers(sizes, dtype, device)
        checked = check_layers(layers)
        times = _time_rounds(layers, tokens, options.rounds)
        for contestant in CONTESTANTS:
            config = {
                "case": case,
                **asdict(sizes),
                "contestant": contestant,
                "tokens": tokens,
                "dtype": str(dtype)[6:],
                "rounds": options.rounds,
            }
            yield {
                "benchmark": "time",
                "config": config,
                "baseline": "reference",
                "check": checked,
                "step_ms": percentiles(times[contestant]),
                "round_ms": times[contestant],
                "times_of_plain": float(
                    np.median(np.divide(times[contestant], times["reference"]))
                ),
            }


def _time_rounds(layers: dict[str, Layer], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Time forward and backward of every contestant in each round, in an order that turns; returns
    milliseconds by contestant and round."""
    x_TD = _input(tokens, layers["saved"])
    times: dict[str, list[float]] = {contestant: [] for contestant in layers}
    order = list(layers)
    for index in range(rounds + 1):
        for contestant in order:
            milliseconds = _time_step(layers[contestant], x_TD)
            if index:  # the first round only warms up
                times[contestant].append(milliseconds)
        order.append(order.pop(0))
    return times


def _time_step(layer: Layer, x_TD: Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    x_TD.grad = None
    _synchronize(x_TD)
    start = time.perf_counter()
    layer(x_TD).sum().backward()
    _synchronize(x_TD)
    return 1e3 * (time.perf_counter() - start)


def _synchronize(x: Tensor) -> None:
    if is_gpu(x):
        gpu_module(x.device).synchronize(x.device)


# --- shared ---------------------------------------------------------------------------------------


def check_layers(layers: dict[str, Layer]) -> dict[str, float]:
    """Compare every contestant's output and gradients with plain autograd's. Raises CheckError."""
    x_TD, cotangent_TD = (_input(CHECK_TOKENS, layers["reference"], seed=seed) for seed in (0, 1))
    expected: list[Tensor] = []
    errors = {}
    for contestant, layer in layers.items():
        y_TD = layer(x_TD)
        results = [
            y_TD.detach(),
            *torch.autograd.grad((y_TD * cotangent_TD.detach()).sum(), (x_TD, *layer.parameters())),
        ]
        expected = expected or results
        errors[f"error_of_{contestant}"] = _compare(contestant, results, expected, x_TD.dtype)
    return errors


def _compare(name: str, results: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    errors = [float(torch.dist(a, b) / b.norm()) for a, b in zip(results, expected, strict=True)]
    if not max(errors) <= TOLERANCE[dtype]:
        raise CheckError(
            f"{name}: differs from plain autograd by {max(errors):.1e}, more than "
            f"{TOLERANCE[dtype]:.0e}"
        )
    return max(errors)


def _input(tokens: int, layer: Layer, seed: int = 0) -> Tensor:
    weight_ED = layer.router.weight
    generator = torch.Generator(weight_ED.device).manual_seed(seed)
    x_TD = torch.randn(tokens, weight_ED.shape[1], device=weight_ED.device, generator=generator)
    return x_TD.to(weight_ED.dtype).requires_grad_()
