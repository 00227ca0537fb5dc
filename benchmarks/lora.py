"""Compares adapters on routed experts in two forms, products beside the frozen ones and weights W +
s B A made anew, with full training.

    python -m benchmarks.lora [--out FILE]        (seconds; one thread)

Prints, for forward and backward of a layer of experts, the median time and the bytes that autograd
keeps besides parameters and inputs; with --out also writes a JSON row for each. Before anything is
timed, both forms must give the same gradients of A and B.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from lather.models.experts import Experts
from lather.models.lora import Adapter, merged
from lather.train.run_dir import provenance

HIDDEN, WIDTH, EXPERTS, TOP_K, RANK = 512, 384, 16, 4, 16
ROUNDS = 9


class MadeAnew(nn.Module):
    """The same layer with W + s B A as its weights: autograd keeps those, and computes their whole
    gradient."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        own, adapters = self.experts, (self.experts.gate_up_lora, self.experts.down_lora)
        stacks = ("gate_up_proj", "down_proj")
        made = {
            name: merged(getattr(own, name), adapter)
            for name, adapter in zip(stacks, adapters, strict=True)
        }
        own.gate_up_lora = own.down_lora = None
        try:
            y: Tensor = torch.func.functional_call(own, made, (x, experts, weights))
        finally:
            own.gate_up_lora, own.down_lora = adapters
        return y


def make_layer(*, adapted: bool) -> Experts:
    torch.manual_seed(0)
    layer = Experts(EXPERTS, HIDDEN, WIDTH)
    if adapted:
        layer.requires_grad_(False)
        layer.gate_up_lora, layer.down_lora = (
            Adapter(weight, RANK, 1.0) for weight in (layer.gate_up_proj, layer.down_proj)
        )
        for adapter in (layer.gate_up_lora, layer.down_lora):
            for factor in adapter.parameters():
                nn.init.normal_(factor, std=0.02)
    return layer


def measure(layer: nn.Module, num_tokens: int) -> tuple[float, int, dict[str, Tensor]]:
    """Measure a forward and backward pass; returns its seconds, the bytes kept between the two, and
    the gradients."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).requires_grad_()
    experts = torch.rand(num_tokens, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(num_tokens, TOP_K, generator=generator).requires_grad_()
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x, weights, experts)}
    kept: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = layer(x, experts, weights)
    y.square().sum().backward()
    seconds = time.perf_counter() - start
    gradients = {
        name.removeprefix("experts."): p.grad
        for name, p in layer.named_parameters()
        if p.grad is not None
    }
    layer.zero_grad(set_to_none=True)
    return seconds, sum(kept.values()), gradients


def check(layers: dict[str, nn.Module]) -> None:
    """Raise AssertionError unless both forms compute the same function."""
    beside, anew = (measure(layers[name], 64)[2] for name in ("beside", "made anew"))
    for name, expected in anew.items():
        torch.testing.assert_close(
            beside[name], expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item()
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    layers = {
        "full training": make_layer(adapted=False),
        "beside": make_layer(adapted=True),
        "made anew": MadeAnew(make_layer(adapted=True)),
    }
    check(layers)
    rows = []
    for num_tokens in (512, 2048):
        rounds = [
            {name: measure(layer, num_tokens)[:2] for name, layer in layers.items()}
            for _ in range(ROUNDS)
        ][1:]
        times = {name: [each[name][0] for each in rounds] for name in layers}
        full = statistics.median(times["full training"])
        for name, seconds in times.items():
            median, kept = statistics.median(seconds), rounds[-1][name][1]
            print(
                f"{num_tokens:5} tokens  {name:14} {1e3 * median:6.0f} ms  {median / full:.2f} of "
                f"full  {kept / 1e6:6.1f} MB kept"
            )
            sizes = {
                "hidden": HIDDEN,
                "width": WIDTH,
                "experts": EXPERTS,
                "top_k": TOP_K,
                "rank": RANK,
                "tokens": num_tokens,
            }
            rows.append(
                {
                    "contestant": name,
                    **sizes,
                    "seconds": seconds,
                    "kept_bytes": kept,
                    "environment": provenance(),
                }
            )
    if out is not None:
        out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
