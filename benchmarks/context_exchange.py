"""Counts what the exchange of context ranks takes of a step, and what ring attention could save.

    python -m benchmarks.context_exchange [--out benchmarks/results/context-exchange.jsonl]

Nothing is measured: bytes and flops are counted for one sequence on one rank, forward and backward,
and divided by the assumed rates below. Source of the ring: Liu et al., arXiv:2310.01889.

The gather: before attention a rank receives the keys and values (latent attention: latents and
rotary keys) of all other ranks, waits for them, and attends once; backward gathers them again and
exchanges their gradients in bf16. The ring: C steps of attention to the keys of one rank each,
while those of the next arrive; backward passes keys on in bf16 and their gradients in fp32, which
at the end go one step further. Each step's output is merged with those before by log-sum-exp, in
fp32.
With a window, no ring is needed: a slice's neighbor has all its keys. The groups: keys and values
are gathered in groups of heads, of which one is attended while the next arrives; nothing is merged,
and every number stays what it is. A latent belongs to all heads, so it has no groups.

What favors the ring in these counts: its smaller kernels and its C launches cost nothing, links
carry nothing else, and a step has neither exchanges of experts, gathers of parameters nor an
optimizer. So its savings are upper bounds.

Letters: C context ranks, E numbers that a token sends.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lather.config.toml_file import load_config
from lather.engine.trained_parameters import active_parameters
from lather.models.families.deepseek_v2 import DeepseekV2Config

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks/results/context-exchange.jsonl"
MODELS = ("qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "llama-3.2-1b")
LENGTHS, RANKS = (32_768, 65_536, 131_072), (2, 4, 8, 16)
FLOPS = 400e12
"""Assumed flops per second of a device."""
LINKS = {"NVLink": 300e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9}
"""Bytes per second that a rank receives, while it sends as many."""
MACHINE = 8
"""Ranks that NVLink joins."""
HBM = 2.5e12
"""Bytes per second of a GPU's memory."""
LATENCY = 20e-6
"""Seconds of a transfer or collective besides its bytes."""
GROUPS = 4
"""Groups of key-value heads."""
MERGED_BYTES = 2 + 4 + 4
"""Bytes for each number of a partial result that is added to a sum: read in bf16, sum in fp32."""


@dataclass(frozen=True)
class Counts:
    """A model's numbers for the exchange."""

    exchanged: int
    """Numbers of a token that a layer's ranks exchange, E."""
    pair_flops: int
    """Flops of a layer's two products for a query and a key, all heads, forward."""
    outputs: int
    """Numbers of attention's output for a token, before its projection."""
    queries: int
    """Numbers of a token's queries."""
    windows: tuple[int, ...]
    """Tokens of each layer's window, 0: none."""
    products: float
    """Flops per token of all other products, forward and backward, divided among the ranks."""
    has_groups: bool
    """Whether keys and values belong to heads, so that they can be gathered in groups."""
    whole_products: float
    """The same of those that every rank computes for all tokens: the expansion of latents."""


@functools.cache
def counts_of(name: str) -> Counts:
    """Return the numbers of a configuration in configs/."""
    config = load_config(ROOT / f"configs/{name}.toml")
    model = config.model
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    products = 6.0 * (active_parameters(config) - embedding)
    heads, layers = model.num_attention_heads, model.num_hidden_layers
    if isinstance(model, DeepseekV2Config):
        wide, narrow = model.qk_nope_head_dim + model.qk_rope_head_dim, model.v_head_dim
        exchanged = model.kv_lora_rank + model.qk_rope_head_dim
        expansion = model.kv_lora_rank * heads * (model.qk_nope_head_dim + narrow) * layers
        products, whole = products - 6.0 * expansion, 8.0 * expansion  # expanded again in backward
    else:
        sizes = model.head_sizes  # type: ignore[attr-defined]
        wide = narrow = sizes.head_dim
        exchanged, whole = 2 * sizes.num_kv_heads * wide, 0.0
    is_windowed = [kind == "sliding_attention" for kind in model.attention_types]
    windows = tuple(getattr(model, "sliding_window", 0) * each for each in is_windowed)
    flops = 2 * heads * (wide + narrow)
    widths = heads * narrow, heads * wide
    return Counts(exchanged, flops, *widths, windows, products, whole == 0, whole)


def row(name: str, length: int, ranks: int, link: str) -> dict[str, Any]:
    """Return the counts of a sequence of `length` tokens, in bytes and seconds of a rank."""
    counts, rate, local = counts_of(name), LINKS[link], length // ranks
    received = 2 * counts.exchanged * (length - local)
    gather = received / rate + LATENCY
    pairs = [length * min(window or length / 2, length / 2) / ranks for window in counts.windows]
    attention = [each * counts.pair_flops / FLOPS for each in pairs]
    products = (counts.products * local + counts.whole_products * length) / FLOPS
    compute = 3.5 * sum(attention) + products
    exchange = 3 * gather * len(attention)
    step, ring, groups, neighbors = compute + exchange, 0.0, 0.0, 0.0
    for seconds, window in zip(attention, counts.windows, strict=True):
        if window:
            neighbors += 3 * gather - 3 * (4 * window * counts.exchanged / rate + LATENCY)
        else:
            ring += max(0.0, _ring_saves(counts, seconds, gather, local, ranks, rate))
            groups += max(0.0, _groups_save(seconds, gather)) * counts.has_groups
    return {
        **{"model": name, "tokens": length, "ranks": ranks, "link": link},
        "layer": {
            "received": received,
            "received_in_backward": 2 * received,
            "held": 2 * counts.exchanged * length,
            "gather_s": gather,
            "attention_s": max(attention),
            "merge_s": _merges(counts, local, ranks),
        },
        "compute_s": compute,
        "exchange_s": exchange,
        "exchange_share": exchange / step,
        "ring_saves": ring / step,
        "groups_save": groups / step,
        "neighbors_save": neighbors / step,
        "left_beside_a_partner": max(0.0, exchange - compute) / max(compute, exchange),
    }


def _ring_saves(
    counts: Counts, attention: float, gather: float, local: int, ranks: int, rate: float
) -> float:
    """Return the seconds by which a ring is faster in a layer without a window, forward and
    backward; negative if it is slower. `attention`: seconds of its products, forward."""

    def passed(work: float, bytes_of_number: int) -> float:
        hop = bytes_of_number * counts.exchanged * local / rate + LATENCY
        return work / ranks + (ranks - 1) * max(work / ranks, hop)

    home = 4 * counts.exchanged * local / rate + LATENCY
    ring = passed(attention, 2) + passed(2.5 * attention, 2 + 4) + home
    return 3.5 * attention + 3 * gather - ring - _merges(counts, local, ranks)


def _groups_save(attention: float, gather: float) -> float:
    """Return the seconds by which a layer without a window is faster in groups of heads, forward
    and backward, where the gradients of a group arrive beside the keys of another."""

    def in_groups(work: float, before: float, after: float) -> float:
        hidden = (GROUPS - 1) * max(work, before + after) / GROUPS
        return (before + work + after) / GROUPS + hidden + 2 * (GROUPS - 1) * LATENCY

    forward = in_groups(attention, gather, 0.0)
    return 3.5 * attention + 3 * gather - forward - in_groups(2.5 * attention, gather, gather)


def _merges(counts: Counts, local: int, ranks: int) -> float:
    """Return the seconds in which a layer adds up partial outputs and gradients."""
    numbers = counts.outputs + counts.queries + counts.exchanged
    return (ranks - 1) * local * numbers * MERGED_BYTES / HBM


def rows() -> Iterator[dict[str, Any]]:
    """Yield the counts of all cases; NVLink within a machine alone."""
    for name in MODELS:
        for length in LENGTHS:
            for ranks in RANKS:
                for link in LINKS:
                    if ranks <= MACHINE or link != "NVLink":
                        yield row(name, length, ranks, link)


def markdown_table(cases: Sequence[dict[str, Any]], ranks: int) -> str:
    """Make the table of the cases with so many context ranks, in percent of a step."""
    chosen = [case for case in cases if case["ranks"] == ranks]
    links = list(dict.fromkeys(case["link"] for case in chosen))
    lines = [["model", "tokens", "MiB", *links], ["---"] * (3 + len(links))]
    for name, length in dict.fromkeys((case["model"], case["tokens"]) for case in chosen):
        same = [case for case in chosen if (case["model"], case["tokens"]) == (name, length)]
        held = f"{same[0]['layer']['held'] / 2**20:,.0f}"
        lines.append([name, f"{length:,}", held, *map(_percents, same)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _percents(case: dict[str, Any]) -> str:
    names = "exchange_share", "ring_saves", "groups_save", "neighbors_save"
    exchange, ring, groups, neighbors = (f"{100 * case[name]:.1f}" for name in names)
    parts = [exchange, ring, groups if case["groups_save"] else "-"]
    return " / ".join([*parts, neighbors] if case["neighbors_save"] else parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    out.write_text("".join(f"{json.dumps(case)}\n" for case in rows()), "utf-8")


if __name__ == "__main__":
    main()
