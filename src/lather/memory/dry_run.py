"""Runs training steps of a rank on the stand-in device, with the real engine, executor and
optimizer, and returns the rank's live bytes (`lather.memory.dry_rank`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from lather.boxes import gradient_dtype
from lather.checkpoint.save import Staging
from lather.config.config import Config
from lather.device import is_gpu
from lather.engine.averaged_weights import averaged_weights
from lather.engine.optimizer import build_optimizer, head_rows
from lather.engine.step import TrainStep
from lather.memory.dry_rank import BUILDING, DryRank, dry_rank, kind_of_state
from lather.memory.gathering_costs import GatheringCost, gathering_costs
from lather.memory.ledger import MemoryTimeline
from lather.memory.work import Work
from lather.memory.workers import Assumed
from lather.optim import MatrixOptimizer
from lather.parallel.mesh import Mesh

T = TypeVar("T")

RATE = 1e-3
"""Learning rate of the steps; no byte depends on it."""

FIRST = "the first optimizer step"
SAVE = "a checkpoint"
STEP = "a step"


@dataclass(frozen=True)
class HostMemory:
    """Memory that a rank needs of its host, in bytes."""

    pinned: int = 0
    """Pinned memory, as torch allocates it."""
    visiting: int = 0
    """Offloaded state, all of which visits the device in every step."""
    bases: int = 0
    """Part of it that is written back after a refresh alone."""


@dataclass(frozen=True)
class RankRun:
    """The memory of a rank during a few steps."""

    rank: int
    pp_rank: int
    layers: tuple[Sequence[int], ...]
    """Layers of each of the rank's stages."""
    steps: Mapping[str, MemoryTimeline]
    """Timelines by name: building the model, whose part is unsharded at first; the first optimizer
    step alone, which creates the state; a checkpoint; then complete steps, each of which refreshes
    all bases."""
    work: Mapping[str, Work]
    """Work of one step with all micro-batches, by how often it occurs (`WorkTally`)."""
    state_bytes: Mapping[int, int]
    """Bytes of the optimizer state of spread matrices, by rank, for the ranks at this position;
    empty if there are none."""
    checkpoint_bytes: int = 0
    """Bytes of weights, optimizer state and random state that the rank contributes to a checkpoint;
    of copies on several ranks, one is written. An asynchronous checkpoint keeps a copy of these
    bytes, in the plan of a CPU, or in the host's memory beside a GPU."""

    host: HostMemory = HostMemory()
    gathering: Mapping[str, GatheringCost] = field(default_factory=dict)
    """The costs of both values of `parallel.gather`, in a pipeline with several data ranks."""

    @property
    def peak(self) -> int:
        """Peak bytes over all steps."""
        return max(timeline.peak for timeline in self.steps.values())

    @property
    def peak_step(self) -> str:
        """The first step with the largest peak."""
        return max(self.steps, key=lambda name: self.steps[name].peak)

    @property
    def largest(self) -> MemoryTimeline:
        """The timeline of this step."""
        return self.steps[self.peak_step]

    @property
    def missing_state(self) -> int:
        """Bytes of optimizer state that this rank lacks, compared with the rank at this position
        that owns the most."""
        return max(self.state_bytes.values(), default=0) - self.state_bytes.get(self.rank, 0)


def dry_run(
    config: Config,
    world_size: int,
    assumed: Assumed,
    rank: int,
    *,
    layers: Sequence[Sequence[int]] | None = None,
) -> RankRun:
    """Run one of `world_size` ranks of a training run and return its memory; the process must have
    no other use. `layers`: layers of every stage; None: equally many."""
    with dry_rank(config, world_size, assumed, rank, layers) as dry:
        engine, mode, ledger = dry.engine, dry.mode, dry.mode.ledger
        timelines = {BUILDING: ledger.timeline()}
        optimizer = build_optimizer(config.optim, engine.parameters, head_rows(config))
        average = averaged_weights(config.train, engine.parameters, optimizer)
        if average is not None:
            ledger.label("parameters", average.values.values())
        held = _omitted_inputs(dry)
        ledger.label("activations", held)

        def record(name: str, work: Callable[[], T]) -> T:
            start = ledger.time
            mode.tally.restart()
            ledger.mark(name)
            result = work()
            mode.label_state(optimizer)
            timelines[name] = ledger.timeline(start)
            return result

        has_bases = refresh_at_every_step(optimizer)
        step = TrainStep(engine, optimizer, config.train.max_grad_norm, config.train.qk_clip)
        record(FIRST, lambda: step_without_passes(step))
        if has_bases and not optimizer.counters["refreshes_done"]:
            record(f"{FIRST}, again", lambda: step_without_passes(step))
        copies = config.checkpoint.asynchronous and not is_gpu(engine.mesh.device)
        staging = Staging(torch.device("cpu"), engine.mesh.device) if copies else None
        checkpoint_bytes = record(SAVE, lambda: mode.save(optimizer, average, staging))
        with_logits = config.log.attention_logits_every > 0

        def whole_step() -> None:
            if config.train.cuda_graph and is_gpu(engine.mesh.device):
                step_of_graph(step, dry)
            else:
                step(dry.batch, RATE, with_logits=with_logits)
            if average is not None:
                average.update(1)

        record(STEP, whole_step)
        if any(group.get("async_refresh") for group in optimizer.param_groups):
            record("a step beside refreshes", whole_step)
        share, work = engine.part.share, dict(mode.tally.sums)
        return RankRun(
            rank,
            engine.mesh.pp_rank,
            tuple(share.layers_of_stage[stage] for stage in share.stages_of_rank),
            timelines,
            work,
            _state_of_ranks(optimizer, engine.mesh, offloaded=False),
            checkpoint_bytes,
            _host_memory(dry, optimizer),
            gathering_costs(dry, config, timelines[STEP], work),
        )


def _host_memory(dry: DryRank, optimizer: MatrixOptimizer) -> HostMemory:
    """Return the host's memory of the rank at this position that owns the most offloaded state."""
    visiting = {"bases": 0, "others": 0}
    for state in optimizer.state.values():
        for name, x in state.items():
            if name != "step" and x.device.type == "cpu":
                is_basis = kind_of_state(name) == "optimizer bases"
                visiting["bases" if is_basis else "others"] += x.nbytes
    mesh = dry.engine.mesh
    owned = _state_of_ranks(optimizer, mesh, offloaded=True)
    total = sum(visiting.values())
    missing = max(owned.values(), default=0) - owned.get(mesh.rank, 0) if total else 0
    scale = 1 + missing / max(total, 1)
    sizes = dry.mode.pinned_bytes + missing, total + missing, int(visiting["bases"] * scale)
    return HostMemory(*sizes)


def _omitted_inputs(dry: DryRank) -> list[torch.Tensor]:
    """Return what a step would hold from its start for the micro-batches that the dry run omits:
    inputs and labels, where documents are separated also positions and documents, and where there
    is padding its mask; for each depth of multi-token prediction inputs, labels and a mask."""
    num_depths, cp = len(dry.engine.part.mtp_layers), dry.engine.mesh.cp
    of_layout = 2 if cp == 1 else 1 + 2 * cp  # those of whole sequences, too
    numbers = 2 * num_depths + 2 + (0 if dry.batch.begins_BS is None else of_layout)
    masks = num_depths + (dry.batch.padding_BS is not None)
    sizes = {torch.long: numbers, torch.bool: masks}
    return [
        torch.empty(number * dry.omitted_tokens, dtype=dtype, device=dry.engine.mesh.device)
        for dtype, number in sizes.items()
    ]


def refresh_at_every_step(optimizer: MatrixOptimizer) -> bool:
    """Make the optimizer refresh all bases at every step, from the first or second on; return
    whether it has bases."""
    refreshing = [group for group in optimizer.param_groups if "precondition_frequency" in group]
    for group in refreshing:
        group["precondition_frequency"] = 1
        for name in ("adam_warmup_steps", "muon_warmup_steps"):
            if name in group:
                group[name] = min(1, group[name])
    return bool(refreshing)


def step_without_passes(step: TrainStep) -> None:
    """Run a training step without its forward and backward passes, which need less memory. It
    creates the optimizer's state and first bases."""
    engine = step.engine
    for entry in engine.parameters:
        if entry.source.requires_grad:
            dtype = gradient_dtype(entry.source)
            entry.source.grad = torch.empty_like(entry.source, dtype=dtype)
    engine.parameters.collect_gradients()
    step.update(engine.new_reading(num_labels=1), RATE)


def step_of_graph(step: TrainStep, dry: DryRank) -> None:
    """Run a training step whose passes are a CUDA graph: what they hold at their peak, the
    gradients, and the graph's tokens and labels stay allocated in the optimizer's step and in a
    validation after it."""
    ledger, engine = dry.mode.ledger, step.engine
    start = ledger.time
    reading = engine.launch_gradients(dry.batch)
    total = ledger.timeline(start).total
    size = int(total.max() - total[-1]) + 2 * dry.batch.inputs_BS.nbytes
    pool = torch.empty(size, dtype=torch.uint8, device=engine.mesh.device)
    ledger.label("activations", [pool])
    gradients = engine.parameters.gradients()
    step.update(reading, RATE)
    engine.validation_loss(dry.batch)
    del pool, gradients


def _state_of_ranks(optimizer: MatrixOptimizer, mesh: Mesh, *, offloaded: bool) -> dict[int, int]:
    """Return bytes of state by rank: offloaded state, or that on the devices. This rank does not
    see the other expert ranks; their experts are assumed to have the same state as its own."""
    sizes: Counter[int] = Counter()
    rank, expert_ranks = mesh.rank, mesh.ep
    which = offloaded if is_gpu(mesh.device) else None
    for ranks, bytes_of_owner in optimizer.state_bytes_of_owners(offloaded=which).items():
        is_of_experts = len({member % expert_ranks for member in ranks}) == 1
        shifts = [at - rank % expert_ranks for at in range(expert_ranks)] if is_of_experts else [0]
        for owner, size in bytes_of_owner.items():
            sizes.update({owner + shift: size for shift in shifts})
    return dict(sizes)
