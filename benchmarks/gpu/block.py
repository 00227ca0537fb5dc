"""Measures a decoder block of DeepSeek-V2-Lite's sizes, forward and backward in bf16, against plain
autograd of the same formulas: the memory modes, experts in FP8, and weights in bf16.

Time is taken from the device's events; the most bytes beyond parameters and input come from its
allocator. Before that, all must give plain autograd's output and gradients, up to the rounding of
FP8 or bf16; they all use the router's choices of the first, so that a near-tie cannot turn into
another choice. FP8 is left out where the device does not multiply in it.

Letters: B sequences, S tokens of each, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.check import CheckError
from benchmarks.gpu.clock import milliseconds
from benchmarks.gpu.work import Settings
from benchmarks.measure import peak_temporary_bytes
from benchmarks.report import Row
from lather.kernels.block_scaled import multiplies_in_fp8
from lather.models.decoder import Decoder
from lather.models.experts import Experts
from lather.models.families import build_model
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.saving.rounded_weights import narrow_product_weights
from lather.models.token_positions import SequenceLayout

IN_FP8, IN_BF16 = "saved, experts in FP8", "saved, weights in bf16"
CONTESTANTS = ("reference", "saved", "recompute", IN_FP8, IN_BF16)
"""Memory modes of a block, and what else differs; the first is plain autograd."""
TOLERANCE, FP8_TOLERANCE = 5e-2, 1.5e-1
"""The largest difference from plain autograd in bf16, relative in the Frobenius norm, and that of
experts in FP8, whose every product rounds both operands by 3e-2."""


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block and of its input."""

    hidden: int = 2048
    intermediate: int = 1408
    experts: int = 64
    slots: int = 6
    heads: int = 16
    latent: int = 512
    head: int = 128
    rope: int = 64
    sequences: int = 2
    length: int = 4096


SMALL = BlockSizes(
    hidden=64,
    intermediate=32,
    experts=8,
    slots=2,
    heads=2,
    latent=16,
    head=16,
    rope=8,
    sequences=2,
    length=32,
)


def rows(settings: Settings, contestant: str) -> Iterator[Row]:
    """Measure every contestant; yields a row for each. Raises CheckError."""
    sizes = SMALL if settings.small else BlockSizes()
    model = block_model(sizes, settings.device)
    block: Any = model.layers[0]
    device = settings.device
    layout = SequenceLayout(sizes.sequences, sizes.length, device)
    x_BSD, cotangent_BSD = (_input(sizes, device, seed) for seed in (0, 1))
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        experts_TK = block.attend_and_route(x_BSD, layout).routing.experts_TK
    plain_ms, plain_peak = 0.0, 0
    expected: list[Tensor] = []

    def step() -> list[Tensor]:
        with block.mlp.gate.replay(experts_TK):
            return forward_and_backward(block, x_BSD, layout, cotangent_BSD)

    for name in CONTESTANTS:
        if name == IN_FP8 and not multiplies_in_fp8(device):
            continue
        prepare(model, name)
        results = step()
        expected = expected or results
        error = _largest_error(name, results, expected)
        del results
        ms, peak = (
            milliseconds(step, device, 3 if settings.small else 5, in_a_row=4),
            peak_temporary_bytes(step, device),
        )
        plain_ms, plain_peak = (plain_ms, plain_peak) if plain_ms else (ms["median"], peak)
        yield {
            "benchmark": "block",
            "config": {
                "contestant": name,
                "dtype": "bfloat16",
                "device": device.type,
                **asdict(sizes),
            },
            "baseline": CONTESTANTS[0],
            "check": {"error": error},
            "ms": ms,
            "times_of_plain": ms["median"] / plain_ms,
            "peak_temporary_bytes": peak,
            "peak_of_plain": peak / max(1, plain_peak),
        }


def prepare(model: Decoder, contestant: str) -> None:
    """Have a model compute as a contestant does. The last one rounds its weights."""
    model.set_memory(contestant.partition(",")[0])
    for module in model.modules():
        if isinstance(module, Experts):
            module.in_fp8 = contestant == IN_FP8
    if contestant == IN_BF16:
        narrow_product_weights(model, torch.bfloat16)


def forward_and_backward(
    block: Any, x_BSD: Tensor, layout: SequenceLayout, cotangent_BSD: Tensor
) -> list[Tensor]:
    """Return the output of a block and the gradients of its input and parameters."""
    with torch.autocast(x_BSD.device.type, dtype=torch.bfloat16):
        y_BSD, _ = block(x_BSD, layout)
    wanted = (x_BSD, *block.parameters())
    return [y_BSD.detach(), *torch.autograd.grad(y_BSD, wanted, cotangent_BSD)]


def block_config(sizes: BlockSizes) -> DeepseekV2Config:
    """Return the configuration of a model of a single MoE block."""
    return DeepseekV2Config(
        vocab_size=512,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        num_attention_heads=sizes.heads,
        kv_lora_rank=sizes.latent,
        qk_nope_head_dim=sizes.head,
        qk_rope_head_dim=sizes.rope,
        v_head_dim=sizes.head,
        n_routed_experts=sizes.experts,
        n_shared_experts=2,
        num_experts_per_tok=sizes.slots,
        max_position_embeddings=sizes.length,
    )


def block_model(sizes: BlockSizes, device: torch.device) -> Decoder:
    """Make the model of the block."""
    whole = build_model(block_config(sizes), device=torch.device("meta"))
    model = whole.to_empty(device=device)
    for parameter in model.parameters():  # on the device: the CPU would draw them for seconds
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        else:  # a norm's
            nn.init.ones_(parameter)
    return model


def _input(sizes: BlockSizes, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x_BSD = torch.randn(
        sizes.sequences, sizes.length, sizes.hidden, device=device, generator=generator
    )
    return x_BSD.requires_grad_() if seed == 0 else x_BSD


def _largest_error(name: str, results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    tolerance = FP8_TOLERANCE if name == IN_FP8 else TOLERANCE
    error = max(
        float(torch.dist(a.float(), b.float()) / b.float().norm().clamp(min=1e-20))
        for a, b in zip(results, expected, strict=True)
    )
    if not error <= tolerance:
        raise CheckError(
            f"{name}: differs from plain autograd by {error:.1e}, more than {tolerance:.0e}"
        )
    return error
