"""Runs training steps of one rank on tensors without storage, with the real engine, executor and
optimizer, and records its live bytes.

The device is the stand-in (`lather.standin`). The other ranks do not exist, and communication with
them completes at once (torch's fake process group). Where a step depends on values, they are
assumed: every label counts, gradients are finite, and the load of the experts is even, times
`imbalance` on this rank.

Letters: T tokens of a micro-batch, K experts per token, E experts of the model, P expert ranks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import local
from lather.checkpoint.save import Staging
from lather.checkpoint.state import TrainingState
from lather.config.config import Config, num_routed_experts
from lather.data.batches import Batch
from lather.device import Read, is_gpu
from lather.engine.engine import Engine, build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.memory.ledger import Ledger, MemoryTimeline
from lather.memory.work import Work, WorkTally
from lather.memory.workers import Assumed
from lather.optim import MatrixOptimizer
from lather.parallel.mesh import Mesh
from lather.pipeline.executor import Recorder
from lather.pipeline.schedule import TRANSFERS, Action, Kind
from lather.standin.device import module, standin
from lather.standin.mode import StandInMode
from lather.standin.operations import flops
from lather.torch_private import start_fake_process_group

T = TypeVar("T")

SETTLES = {
    Kind.UNSHARD: "gathered parameters",
    Kind.RESHARD: "gathered parameters",
    Kind.REDUCE_GRAD: "gradients",
    **dict.fromkeys(TRANSFERS, "communication"),
}
"""Kind of the unlabeled bytes that an action leaves; all other actions leave activations."""

BETWEEN = "between actions"

SEGMENT, OPTIMIZER = "lather.segment.", "lather.optim."
"""Prefixes of the ranges of segments, and of the optimizer's phases."""

RATE = 1e-3
"""Learning rate of the steps; no byte depends on it."""

DOCUMENTS = 4
"""Documents per sequence if attention stays within documents."""

BUILDING = "building the model"
FIRST = "the first optimizer step"
SAVE = "a checkpoint"
STEP = "a step"


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
        """Bytes of optimizer state that the rank at this position that owns the most has, and this
        rank does not."""
        return max(self.state_bytes.values(), default=0) - self.state_bytes.get(self.rank, 0)


class LedgerMode(StandInMode):
    """Runs operations on the stand-in device and records them in a ledger."""

    def __init__(self, ledger: Ledger, load: Load, tally: WorkTally) -> None:
        super().__init__()
        self.ledger, self.load, self.tally = ledger, load, tally
        self._segments: list[str] = []

    def __enter__(self) -> LedgerMode:
        self._around.enter_context(self.ledger.following_sizes())
        return super().__enter__()

    def entered(self, name: str) -> None:
        self._segments.append(name)
        self._set_segment()
        if name.startswith(OPTIMIZER):
            self.ledger.mark(f"optimizer, {name.removeprefix(OPTIMIZER)}")

    def left(self) -> None:
        self._segments.pop()
        self._set_segment()

    def _set_segment(self) -> None:
        innermost = next(
            (name for name in reversed(self._segments) if name.startswith(SEGMENT)), ""
        )
        self.ledger.segment = innermost.removeprefix(SEGMENT)
        phases = [name for name in self._segments if name.startswith(OPTIMIZER)]
        self.tally.in_optimizer = bool(phases)
        self.tally.refreshing = any(name.endswith("refresh") for name in phases)

    def values_of(self, x: Tensor, what: Read) -> Tensor:
        """Return the values of a step with the assumed load."""
        load = self.load
        if what is Read.SIZES:
            return torch.tensor([load.rows, load.pairs]).expand(x.shape).contiguous()
        if what is Read.COUNTS:
            return torch.full((2,), load.tokens)
        if what is Read.ENDS:
            pairs = load.pairs * load.config.parallel.ep
            return (torch.arange(1, x.numel() + 1) * pairs // max(1, x.numel())).view(x.shape)
        return super().values_of(x, what)

    def num_true(self, flags: Tensor, what: Read) -> int:
        """Return the number of pairs of this rank's experts, or of one of them."""
        experts, ranks = num_routed_experts(self.load.config.model), self.load.config.parallel.ep
        pairs = min(flags.numel(), self.load.pairs * ranks)
        return pairs * ranks // experts if what is Read.EXPERT_ROWS else pairs

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        self.tally.add(Work(flops))

    def ran(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        made: list[Tensor],
        out: Any,
    ) -> None:
        travels = func.namespace == "c10d"
        self.ledger.note(filter(self.is_here, inputs if travels else made), travels=travels)
        if travels:
            self.tally.travels(name, args)
        else:
            self.tally.add(Work(flops(func, name, args, kwargs, out)))


class Bookkeeper(Recorder):
    """Labels the bytes in a ledger during a step, action by action."""

    engine: Engine
    """Set by its owner before the first action."""

    def __init__(self, ledger: Ledger, tally: WorkTally) -> None:
        self.ledger, self.tally = ledger, tally

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        self.ledger.settle("gathered parameters", BETWEEN)  # allocated in the wait for them
        self.ledger.settle("activations")
        self.ledger.mark(str(action))
        self.tally.in_micro_batch = any(chunk.micro_batch is not None for chunk in action.chunks)
        yield
        self.tally.in_micro_batch = False
        self.label_step()
        self.ledger.settle(SETTLES.get(action.kind, "activations"))
        self.ledger.mark(BETWEEN)

    def label_step(self) -> None:
        """Label the current gradients and rounded weights."""
        self.ledger.label(
            "gradients",
            [local(p.grad) for p in self.engine.part.parameters() if p.grad is not None],
        )
        self.ledger.label("rounded weights", self.engine.rounded_weights.copies())

    def label_state(self, optimizer: MatrixOptimizer) -> None:
        for state in optimizer.state.values():
            for name, x in state.items():
                if isinstance(x, Tensor):
                    self.ledger.label(kind_of_state(name), [local(x)])

    def save(self, optimizer: MatrixOptimizer, staging: Staging | None) -> int:
        """Collect the tensors of the rank's checkpoint without writing them; return their bytes.
        `staging` copies them to the stand-in device, which is then a CPU, and keeps the copies."""
        pieces = TrainingState(
            self.engine.parameters, self.engine.part, optimizer, self.engine.mesh
        ).pieces()
        written = {piece.key: piece.value for piece in pieces if piece.is_stored}
        if staging is not None:
            self.ledger.label("checkpoint copies", staging.copy(written).values())
        return sum(x.nbytes for x in written.values())


def kind_of_state(name: str) -> str:
    """Return the kind of bytes of an entry in a parameter's optimizer state."""
    return {"factor": "optimizer factors", "basis": "optimizer bases"}.get(
        name.partition("_")[0], "optimizer moments"
    )


@dataclass(frozen=True)
class Load:
    """The numbers of rows that ranks receive in a step."""

    config: Config
    tokens: int
    """T."""
    imbalance: float

    @property
    def pairs(self) -> int:
        """Number of pairs of a token of an expert rank and one of this rank's experts."""
        most = self.tokens * min(
            self.config.model.num_experts_per_tok,
            num_routed_experts(self.config.model) // self.config.parallel.ep,
        )
        even = self.tokens * self.config.model.num_experts_per_tok / self.config.parallel.ep
        return min(most, math.ceil(even * self.imbalance))

    @property
    def rows(self) -> int:
        """Number of tokens of an expert rank that have an expert on this rank: the expectation for
        K different experts, drawn uniformly."""
        experts, chosen = (
            num_routed_experts(self.config.model),
            self.config.model.num_experts_per_tok,
        )
        elsewhere = experts - experts // self.config.parallel.ep
        none_here = (
            math.prod((elsewhere - i) / (experts - i) for i in range(chosen))
            if elsewhere >= chosen
            else 0.0
        )
        return min(self.tokens, math.ceil(self.tokens * (1 - none_here) * self.imbalance))


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
            entry.source.grad = torch.empty_like(entry.source)
    engine.parameters.collect_gradients()
    step.update(engine.new_reading(num_labels=1), RATE)


def batch_of(config: Config, sequences: int, micro_batch_size: int) -> Batch:
    """Return a rank's batch; if documents are separated, each sequence has `DOCUMENTS` documents,
    and if they are packed whole, each micro-batch has one position of padding, with which it needs
    most."""
    length = config.train.sequence_length
    batch = Batch.of_tokens(torch.zeros(sequences, length + 1, dtype=torch.long))
    if not config.data.apart:
        return batch
    begins_S = torch.arange(length) % math.ceil(length / DOCUMENTS) == 0
    batch = replace(batch, begins_BS=begins_S.expand(sequences, -1))
    if config.data.packing != "documents":
        return batch
    padding_BS = torch.zeros(sequences, length, dtype=torch.bool)
    padding_BS[micro_batch_size - 1 :: micro_batch_size, -1] = True
    return replace(batch, padding_BS=padding_BS)


def _of_tokens(batch: Batch, tokens: int, device: torch.device) -> list[Tensor]:
    """Return what a step holds from its start for so many further tokens of micro-batches: inputs
    and labels, where documents are separated also positions and documents, and where there is
    padding its mask."""
    numbers = 2 if batch.begins_BS is None else 4
    masks = 0 if batch.padding_BS is None else 1
    sizes = {torch.long: numbers * tokens, torch.bool: masks * tokens}
    return [torch.empty(size, dtype=dtype, device=device) for dtype, size in sizes.items()]


def dry_run(
    config: Config,
    world_size: int,
    assumed: Assumed,
    rank: int,
    *,
    do: Collection[str] = (FIRST, SAVE, STEP),
    layers: Sequence[Sequence[int]] | None = None,
) -> RankRun:
    """Run one of `world_size` ranks of a training run and return its memory, in a process that is
    used for this call alone.

    `do`: which of FIRST, SAVE and STEP to run after the model is built. `layers`: layers of
    every stage; None: equally many."""
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels would read values
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module.memory = assumed.memory or module.memory
    data_size = config.parallel.data_ranks(world_size)
    number = config.num_micro_batches(data_size)
    tokens_of_all = config.train.sequence_length * config.train.batch_size // data_size
    config = shortened(config, world_size)
    load = Load(config, tokens_of_all // number, assumed.imbalance)
    ledger, tally = Ledger(), WorkTally(number / config.num_micro_batches(data_size))
    bookkeeper, device = Bookkeeper(ledger, tally), standin(assumed.device)
    with _group(rank, world_size, device), LedgerMode(ledger, load, tally):
        mesh = Mesh.build(config.parallel, device)
        ledger.mark(BUILDING)
        engine = bookkeeper.engine = build_engine(config, mesh, record=bookkeeper, layers=layers)
        ledger.label(
            "parameters", [local(x) for x in (*engine.part.parameters(), *engine.part.buffers())]
        )
        found = {BUILDING: ledger.timeline()}
        optimizer = build_optimizer(config.optim, engine.parameters)
        batch = batch_of(config, config.train.batch_size // data_size, engine.micro_batch_size)
        left_out = _of_tokens(batch, tokens_of_all - batch.inputs_BS.numel(), device)
        ledger.label("activations", left_out)

        def record(name: str, work: Callable[[], T]) -> T:
            start = ledger.time
            tally.restart()
            ledger.mark(name)
            result = work()
            bookkeeper.label_state(optimizer)
            found[name] = ledger.timeline(start)
            return result

        has_bases = refresh_at_every_step(optimizer)
        step = TrainStep(engine, optimizer, config.train.max_grad_norm)
        if FIRST in do:
            record(FIRST, lambda: step_without_passes(step))
            if has_bases and not optimizer.counters["refreshes_done"]:
                record(f"{FIRST}, again", lambda: step_without_passes(step))
        staging = (
            Staging(torch.device("cpu"), mesh.device)
            if config.checkpoint.asynchronous and not is_gpu(device)
            else None
        )
        checkpoint_bytes = (
            record(SAVE, lambda: bookkeeper.save(optimizer, staging)) if SAVE in do else 0
        )
        if STEP in do:
            record(STEP, lambda: step(batch, RATE))
            if any(group.get("async_refresh") for group in optimizer.param_groups):
                record("a step beside refreshes", lambda: step(batch, RATE))
        owned = _state_of_ranks(optimizer, rank, config.parallel.ep)
        own_layers = tuple(
            engine.part.share.layers_of_stage[stage] for stage in engine.part.share.stages_of_rank
        )
        return RankRun(
            rank, mesh.pp_rank, own_layers, found, dict(tally.found), owned, checkpoint_bytes
        )


def _state_of_ranks(optimizer: MatrixOptimizer, rank: int, expert_ranks: int) -> dict[int, int]:
    """Return bytes of state by rank. This rank does not see the other expert ranks; their experts
    are assumed to have the same state as its own."""
    found: dict[int, int] = {}
    for ranks, of_owners in optimizer.state_bytes_of_owners().items():
        is_of_experts = len({one % expert_ranks for one in ranks}) == 1
        shifts = [at - rank % expert_ranks for at in range(expert_ranks)] if is_of_experts else [0]
        for owner, size in of_owners.items():
            for shift in shifts:
                found[owner + shift] = found.get(owner + shift, 0) + size
    return found


def shortened(config: Config, world_size: int) -> Config:
    """Reduce the number of micro-batches, keeping their size, as far as the peak stays the same
    except for tokens and labels, which exist from the start: a pipeline of P ranks has at most 2 P
    + 1 live chunks; a single rank has gradients from the second micro-batch on."""
    data_size = config.parallel.data_ranks(world_size)
    number = config.num_micro_batches(data_size)
    each = config.train.batch_size // (data_size * number)
    few = min(
        number,
        2 * config.parallel.pp + 2 if config.parallel.resolved_schedule == "dualpipev" else 2,
    )
    train = replace(config.train, batch_size=each * data_size * few, micro_batch_size=each)
    return replace(config, train=train)


def _group(rank: int, world_size: int, device: torch.device) -> AbstractContextManager[object]:
    """Create a default process group, for a block, whose other ranks do not exist; none for a
    single rank."""
    stack = ExitStack()
    if world_size > 1:
        start_fake_process_group(rank, world_size, device)
        stack.callback(dist.destroy_process_group)
    return stack
