"""Reports a memory plan as a table and as JSON, and the settings that are advised as a table.
(Picture: `lather.memory.plan_picture`.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from lather.console import titled_table
from lather.durations import duration
from lather.files import write_numbers
from lather.lines import short_number
from lather.memory.advice import Advice, Setting, as_options
from lather.memory.dry_run import RankRun
from lather.memory.ledger import segment_title
from lather.memory.plan import CONTEXT_BYTES, FRAGMENTATION, MemoryPlan
from lather.memory.step_time import BUS, LINK, StepTime
from lather.pipeline.partition import SLACK, Partition
from lather.version import describe_version

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters",),
    "optimizer": ("optimizer moments", "optimizer factors", "optimizer bases"),
    "gradients": ("gradients",),
    "gathered": ("gathered parameters", "rounded weights"),
    "activations": ("activations",),
    "communication": ("communication",),
    "temporaries": ("temporaries", "checkpoint copies"),
}
"""Columns of the table, and the kinds that each sums."""

GIB = 2**30


def show(
    plan: MemoryPlan,
    memory: int | None,
    console: Console,
    *,
    machine: int = 8,
    time: StepTime | None = None,
    without_data: str = "",
) -> None:
    """Print a line per pipeline rank at its peak, the activations of the largest rank, whether
    the run fits in `memory` bytes, and the predicted time; `machine`: devices per machine;
    `without_data`: see `times`."""
    unit, scale = unit_of(plan.largest.peak)
    table = titled_table(_title(plan, unit), ("rank", "layers"), (*COLUMNS, "peak"))
    table.add_column("when")
    for run in plan.ranks:
        at_peak = run.largest.at_peak
        cells = [
            _in(sum(at_peak.get(kind, 0) for kind in kinds), scale) for kinds in COLUMNS.values()
        ]
        table.add_row(
            str(run.rank),
            layers_of(run),
            *cells,
            _in(run.peak, scale),
            f"{run.peak_step}, {run.largest.when}",
        )
    console.print(table)
    lines = [
        *remarks(plan, memory, machine),
        *([] if time is None else times(plan, time, without_data)),
    ]
    console.print("\n".join(lines), highlight=False)


def remarks(plan: MemoryPlan, memory: int | None, machine: int = 8) -> list[str]:
    """Return the lines below the table."""
    unit, scale = unit_of(plan.largest.peak)
    timeline = plan.largest.largest
    has_experts = plan.config.model.num_routed_experts > 0
    segments = ", ".join(
        f"{segment_title(name, has_experts=has_experts)} {_in(size, scale)}"
        for name, size in timeline.segments_at(timeline.peak_time).items()
    )
    lines = [
        f"activations of rank {plan.largest.rank} at its peak, by the segment that made them: "
        f"{segments or 'none'}"
    ]
    if plan.partition is not None:
        lines.append(describe_partition(plan, plan.partition))
    if plan.config.parallel.schedule_memory == "least":
        bubbles = f"{plan.bubble(early=True):.1%} instead of {plan.bubble(early=False):.1%}"
        lines.append(
            "weight gradients as early as they can be: bubble "
            f"{bubbles} if all layers take equally long"
        )
    if plan.config.train.fp8 == "block":
        rounded = timeline.of_kind("rounded weights").max()
        received = ", rows are sent to them, and kept, in it" * (plan.config.parallel.ep > 1)
        lines.append(
            f"experts multiply in FP8{received}; weights rounded for products take at most "
            f"{_in(int(rounded), scale)} {unit}"
        )
    if plan.largest.gathering:
        lines.append(gathering(plan.largest, unit, scale))
    if plan.config.parallel.cp > 1:
        lines.append(contexts(plan.largest, *unit_of(int(_of_contexts(plan.largest)))))
    if plan.host.pinned:
        lines.append(offload(plan, min(machine, plan.world_size)))
    lines.append(checkpoint(plan))
    if plan.assumed.device == "gpu":
        lines.append(
            f"a GPU needs {_in(plan.needed, GIB)} GiB: the peak of rank {plan.largest.rank}, "
            f"{CONTEXT_BYTES / GIB:.1f} GiB for context and libraries and {FRAGMENTATION:.0%} for "
            "fragmentation (assumed, not measured)"
        )
    if memory is not None:
        word, rest = ("fits", "left") if plan.needed <= memory else ("does not fit", "missing")
        difference = _in(abs(memory - plan.needed), GIB)
        lines.append(f"{word} in {_in(memory, GIB)} GiB: {difference} GiB {rest}")
    return lines


def times(plan: MemoryPlan, time: StepTime, without_data: str = "") -> list[str]:
    """Return the lines on the predicted time of a step and of the run, and what it assumes;
    `without_data`: why the tokens of the run, which has `train.epochs`, are not known."""
    rates, scale = plan.assumed.rate_table, time.scale
    mfu = f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    parts = {
        "passes": time.passes,
        "optimizer": time.optimizer,
        "exchanges": time.exchanges,
        "transfers with the host": time.bus,
    }
    made_of = ", ".join(
        f"{name} {duration(scale * seconds)}" for name, seconds in parts.items() if seconds
    )
    corrected = (
        f"assumed in part: {rates.compared}; --rates RUN corrects them"
        if scale == 1
        else f"times {scale:.2f}, as a step was measured"
    )
    bubble = f", with a bubble of {plan.bubble():.1%}" if plan.bubble() else ""
    run = f"no time for the run, as train.epochs counts its data: {without_data}"
    if time.run_tokens is not None and time.run_seconds is not None:
        run = f"{duration(time.run_seconds)} for the run's {short_number(time.run_tokens)} tokens"
        epochs = plan.config.train.epochs
        run += f" in {'1 epoch' if epochs == 1 else f'{epochs:g} epochs'}" if epochs else ""
    return [
        f"predicted: {duration(time.seconds)} a step, {time.tokens_per_second:,.0f} tokens/s{mfu}; "
        f"{run}",
        f"of the step {made_of}{bubble}; nothing overlaps; rates of {rates.name}, {corrected}",
    ]


def gathering(run: RankRun, unit: str, scale: int) -> str:
    """Describe what the rank keeps and sends with both values of `parallel.gather`."""
    costs = "; ".join(
        f"{gather!r} keeps at most {_in(cost.kept, scale)} {unit} and sends "
        f"{_in(cost.sent, scale)} {unit} in a step"
        for gather, cost in sorted(run.gathering.items(), reverse=True)
    )
    return f"gathered parameters, and gradients, of rank {run.rank}: parallel.gather {costs}"


def contexts(run: RankRun, unit: str, scale: int) -> str:
    """Describe what the rank sends to context ranks."""
    return (
        f"rank {run.rank} sends {_in(_of_contexts(run), scale)} {unit} in a step to context ranks: "
        "keys and values, or their latents, and gradients"
    )


def offload(plan: MemoryPlan, num_ranks: int) -> str:
    """Describe the pinned memory of the host of so many ranks, and the way of offloaded state and
    frozen weights over the bus."""
    host, (fetched, written), frozen = plan.host, plan.bus, plan.frozen
    text = (
        f"offloaded: {_in(host.pinned, GIB)} GiB of pinned memory of the host per rank, "
        f"{_in(num_ranks * host.pinned, GIB)} per machine of {num_ranks}"
    )
    moved = []
    if host.visiting:
        moved.append(
            f"{_in(fetched, GIB)} GiB of optimizer state are fetched and "
            f"{_in(written, GIB)} written back, which takes {max(fetched, written) / BUS:.2f} s"
        )
    if frozen:
        moved.append(
            f"{_in(frozen, GIB)} GiB of frozen weights are fetched for the passes of all "
            f"micro-batches, which takes {frozen / BUS:.2f} s"
        )
    if not moved:
        return text
    rate = f"{BUS / 1e9:.0f} GB/s each way (assumed, not measured)"
    return f"{text}; in a step {', and '.join(moved)} at {rate}"


def checkpoint(plan: MemoryPlan) -> str:
    """Describe the bytes that a rank writes into a checkpoint, and the memory that copies of them
    take."""
    most = max(plan.ranks, key=lambda run: run.checkpoint_bytes)
    unit, scale = unit_of(most.checkpoint_bytes)
    text = (
        "a checkpoint has at most "
        f"{_in(most.checkpoint_bytes, scale)} {unit} from a rank, rank {most.rank}"
    )
    if not plan.config.checkpoint.asynchronous:
        return f"{text}, and takes no further memory"
    memory = "of its memory" if plan.assumed.device == "cpu" else "memory of the host"
    return f"{text}, and takes as much {memory} while it is written"


def describe_partition(plan: MemoryPlan, partition: Partition) -> str:
    """Describe a partition by memory."""
    unit, scale = unit_of(partition.uniform_largest)
    counts = " ".join(map(str, partition.layers))
    if partition.layers == partition.uniform_layers:
        return (
            f"layers by stage {counts}: equally many, as no other partition "
            f"has a largest rank that is {SLACK:.0%} smaller"
        )
    return (
        f"layers by stage {counts}: the largest rank is expected to have "
        f"{_in(partition.largest, scale)} {unit}, with equally many "
        f"{_in(partition.uniform_largest, scale)}; bubble {plan.bubble():.1%} instead of "
        f"{plan.bubble(partition.uniform_layers, early=False):.1%} if all layers take equally long"
    )


def write(plan: MemoryPlan, time: StepTime, arguments: Sequence[str], out: Path) -> None:
    """Write all numbers as JSON, with the arguments of the command that planned. Raises UserError
    if the file cannot be written."""
    numbers = {**to_json(plan), "time": time_json(plan, time)}
    write_numbers(out, {"lather": describe_version(), "arguments": list(arguments), **numbers})


def time_json(plan: MemoryPlan, time: StepTime) -> dict[str, Any]:
    """Return the predicted time of a step as plain values: its parts in seconds, before they are
    scaled, and what follows from it."""
    return {
        "rates": plan.assumed.rate_table.name,
        **asdict(time),
        "seconds": time.seconds,
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
        "run_seconds": time.run_seconds,
    }


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return plain values: the bytes at the peak by kind and segment, for each step of each
    pipeline rank."""
    partition, early = None, None
    if plan.partition is not None:
        partition = {
            "layers": plan.partition.layers,
            "expected": plan.partition.largest,
            "expected_uniform": plan.partition.uniform_largest,
            "bubble": plan.bubble(),
            "bubble_uniform": plan.bubble(plan.partition.uniform_layers, early=False),
        }
    if plan.config.parallel.schedule_memory == "least":
        early = {"bubble": plan.bubble(early=True), "bubble_normal": plan.bubble(early=False)}
    return {
        "world_size": plan.world_size,
        "device": plan.assumed.device,
        "imbalance": plan.assumed.imbalance,
        "needed": plan.needed,
        "allowance": plan.allowance,
        "partition": partition,
        "early_weight_gradients": early,
        "ranks": [_rank_json(run) for run in plan.ranks],
    }


def _rank_json(run: RankRun) -> dict[str, Any]:
    return {
        "rank": run.rank,
        "pp_rank": run.pp_rank,
        "layers": [list(layers) for layers in run.layers],
        "peak": run.peak,
        "checkpoint": run.checkpoint_bytes,
        "gathering": {gather: asdict(cost) for gather, cost in run.gathering.items()},
        **({"context": context} if (context := _of_contexts(run)) else {}),
        "host": {**asdict(run.host), "frozen": sum(work.frozen for work in run.work.values())},
        "steps": {
            name: {
                "peak": timeline.peak,
                "when": timeline.when,
                "kinds": timeline.at_peak,
                "segments": timeline.segments_at(timeline.peak_time),
            }
            for name, timeline in run.steps.items()
        },
    }


def _of_contexts(run: RankRun) -> float:
    """Return the bytes that the rank sends to context ranks in a step."""
    return sum(work.context for work in run.work.values())


def first_to_last(numbers: Sequence[int]) -> str:
    """Return "3-5", or "3" for a single number."""
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def unit_of(size: float) -> tuple[str, int]:
    """Return the largest unit that is not larger than `size`, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next(((unit, scale) for unit, scale in units if size >= scale), ("B", 1))


def layers_of(run: RankRun) -> str:
    """Return the layers of a rank, for example "0-11, 36-47"."""
    return ", ".join(first_to_last(layers) for layers in run.layers if layers)


def _title(plan: MemoryPlan, unit: str) -> str:
    load = (
        ", an even load of the experts"
        if plan.assumed.imbalance == 1
        else f", {plan.assumed.imbalance:g} times an even load of the busiest rank's experts"
    )
    if not plan.config.model.num_routed_experts:
        load = ""
    ranks = "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks, each"
    return f"{ranks} on a {plan.assumed.device.upper()}{load}; {unit} at the peak"


def _in(size: float, scale: int) -> str:
    return f"{size / scale:,.2f}"


def show_advice(advice: Advice, console: Console) -> None:
    """Print the settings that fit, the shortest step first, with their prices; or the lightest
    setting, and what it needs most of its bytes for."""
    if not advice.fitting:
        _show_infeasible(advice, console)
        return
    title = (
        f"settings that fit in {advice.memory / GIB:.2f} GiB, shortest step first, "
        f"of {len(advice.tried)} planned"
    )
    sizes = ("needs GiB", "left", "flops above least")
    rates = advice.tried[0].plan.assumed.rate_table
    has_contexts = any(setting.plan.work.context for setting in advice.fitting)
    of_context = ("context",) if has_contexts else ()
    prices = ("to experts, GiB", *of_context, "parameters", "pipeline", "optimizer", "bubble")
    table = titled_table(title, ["change"], (*sizes, *prices))
    least = min(setting.plan.work.flops for setting in advice.tried)
    for setting in advice.fitting:
        needed, work = setting.plan.needed, setting.plan.work
        context = (work.context,) if has_contexts else ()
        sent = (work.experts, *context, work.parameters, work.pipeline, work.optimizer)
        table.add_row(
            as_options(setting.changes) or "none",
            *(f"{size / GIB:.2f}" for size in (needed, advice.memory - needed)),
            f"{work.flops / least - 1:.1%}",
            *(f"{size / GIB:,.1f}" for size in sent),
            f"{setting.plan.bubble():.1%}",
        )
    console.print(table)
    lines = [
        "flops of a step of the first pipeline rank, and GiB that it sends to other ranks, are "
        f"counted; the length of a step is predicted from rates of {rates.name}, with links of "
        f"{rates.kinds['exchanges'].bytes / 1e9:.0f} GB/s in a machine and {LINK / 1e9:.0f} GB/s "
        "between machines"
    ]
    if any("optim.name" in setting.changes for setting in advice.fitting):
        lines.append("another rule has its own default options and rates: tune them")
    if (without := advice.without_pipeline) is not None:
        lines.append(_needless_pipeline(advice.tried[0], without))
    console.print("\n".join(lines), highlight=False)


def _needless_pipeline(present: Setting, without: Setting) -> str:
    """Say that a pipeline is not worth it, and what a rank sends with it and without."""
    sent, sent_without = (setting.plan.work.sent / GIB for setting in (present, without))
    return (
        "the pipeline is not worth it on one machine, with fast links: "
        f"{as_options(without.changes)} fits, sends {sent_without:,.1f} GiB in a step in place of "
        f"{sent:,.1f}, and no rank waits for others (bubble {present.plan.bubble():.1%})"
    )


def _show_infeasible(advice: Advice, console: Console) -> None:
    lightest = advice.lightest
    kinds = sorted(lightest.plan.largest.largest.at_peak.items(), key=lambda item: -item[1])[:2]
    most = " and ".join(f"{name} {size / GIB:.1f}" for name, size in kinds)
    console.print(
        f"nothing fits in {advice.memory / GIB:.2f} GiB, of {len(advice.tried)} settings planned; "
        f"the lightest, {as_options(lightest.changes) or 'without changes'}, needs "
        f"{lightest.plan.needed / GIB:.2f} GiB, most of it {most}",
        highlight=False,
    )
