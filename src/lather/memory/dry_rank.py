"""Builds a rank of a training run on the stand-in device (`lather.standin`), with the real engine,
and records its live bytes in a ledger.

The other ranks do not exist, and communication with them completes at once (torch's fake process
group). Values on which a step depends are assumed: every label counts, gradients are finite, and
the experts have an even load, times `imbalance` on this rank.

Letters: T tokens of a micro-batch, K experts per token, E experts of the model, P expert ranks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lather.boxes import is_dtensor, local
from lather.checkpoint.save import Staging
from lather.checkpoint.state import TrainingState
from lather.config.config import Config
from lather.data.batches import Batch
from lather.device import Read
from lather.engine.averaged_weights import AveragedWeights
from lather.engine.engine import Engine, build_engine
from lather.memory.ledger import Ledger
from lather.memory.work import Work, WorkTally
from lather.memory.workers import Assumed
from lather.optim import MatrixOptimizer
from lather.optim.batched.remainders import REMAINDER
from lather.parallel.context_ranks import EXCHANGE
from lather.parallel.fsdp_units import FsdpUnit
from lather.parallel.mesh import Mesh
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import TRANSFERS, Action, Kind
from lather.standin.device import module, standin
from lather.standin.mode import StandInMode
from lather.standin.operations import RanOperation
from lather.time_model.launches import launch_named, launch_of, launch_of_triton
from lather.torch_private import start_fake_process_group

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

DOCUMENTS = 4
"""Documents per sequence if attention stays within documents."""

BUILDING = "building the model"


class LedgerMode(StandInMode, Recorder):
    """Runs a rank on the stand-in device and records its bytes and its work: operations as they
    come, and the kinds of bytes action by action."""

    engine: Engine
    """Set when the engine is built, which is before the first action."""

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
        self.tally.in_context = EXCHANGE in self._segments
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
        """Return the number of pairs of this rank's experts, or of a single expert."""
        experts, ranks = self.load.config.model.num_routed_experts, self.load.config.parallel.ep
        pairs = min(flags.numel(), self.load.pairs * ranks)
        return pairs * ranks // experts if what is Read.EXPERT_ROWS else pairs

    def launch(self, name: str, read: int, written: int, *, flops: int = 0) -> None:
        self.tally.launched(launch_named(name, read, written, flops=flops))

    def launch_triton(self, function: Any, arguments: Mapping[str, Any]) -> None:
        self.tally.launched(launch_of_triton(function, arguments))

    def ran(self, operation: RanOperation) -> None:
        travels = operation.func.namespace == "c10d"
        tensors = operation.inputs if travels else operation.made
        self.ledger.note(filter(self.is_here, tensors), travels=travels)
        if travels:
            self.tally.travels(operation.name, operation.args)
        elif launch := launch_of(*operation):
            self.tally.launched(launch)

    # --- labels -----------------------------------------------------------------------------------

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        self.ledger.settle("activations")
        self.ledger.mark(str(action))
        self.tally.in_micro_batch = any(chunk.micro_batch is not None for chunk in action.chunks)
        yield
        self.tally.in_micro_batch = False
        self.label_step()
        self.ledger.settle(SETTLES.get(action.kind, "activations"))
        self.ledger.mark(BETWEEN)

    @contextmanager
    def sharding(self, action: Action, unit: FsdpUnit) -> Iterator[None]:
        self.label_unit(unit)
        if action.kind is Kind.UNSHARD and not unit.is_gathered:
            self.tally.add(Work(frozen=unit.host_bytes))
        before = len(self.ledger.records)
        yield
        self.ledger.label("gathered parameters", unit.gathered)
        self.ledger.settle(SETTLES[action.kind], before)

    def label_step(self) -> None:
        """Label the current gradients and rounded weights."""
        for unit in dict.fromkeys(self.engine.units.values()):
            self.label_unit(unit)

    def label_unit(self, unit: FsdpUnit) -> None:
        """Label the current gradients of a unit, and rounded weights."""
        parameters = (*unit.modules.parameters(), *unit.gathered)
        gradients = [x for p in parameters if (x := p.grad) is not None]
        plain = [local(x) if is_dtensor(x) else x for x in gradients]
        self.ledger.label("gradients", (*plain, *unit.sums))
        self.ledger.label("rounded weights", self.engine.rounded_weights.copies())

    def label_state(self, optimizer: MatrixOptimizer) -> None:
        for state in optimizer.state.values():
            for name, x in state.items():
                if isinstance(x, Tensor):
                    self.ledger.label(kind_of_state(name), [local(x)])

    def save(
        self, optimizer: MatrixOptimizer, average: AveragedWeights | None, staging: Staging | None
    ) -> int:
        """Collect the tensors of the rank's checkpoint without writing them; return their bytes.
        `staging` copies them to the stand-in device, which is then a CPU, and keeps the copies."""
        engine = self.engine
        pieces = TrainingState(
            engine.parameters, engine.part, optimizer, engine.mesh, average
        ).pieces()
        written = {piece.key: piece.value for piece in pieces if piece.is_stored}
        if staging is not None:
            self.ledger.label("checkpoint copies", staging.copy(written).values())
        return sum(x.nbytes for x in written.values())


def kind_of_state(name: str) -> str:
    """Return the kind of bytes of an entry in a parameter's optimizer state; a remainder is half of
    a parameter."""
    kinds = {"factor": "optimizer factors", "basis": "optimizer bases", REMAINDER: "parameters"}
    return kinds.get(name.partition("_")[0], "optimizer moments")


@dataclass(frozen=True)
class Load:
    """The numbers of rows that this rank's experts receive for a micro-batch."""

    config: Config
    tokens: int
    """T."""
    imbalance: float

    @property
    def pairs(self) -> int:
        """Number of pairs of a token of an expert rank and an expert of this rank."""
        model, ranks = self.config.model, self.config.parallel.ep
        chosen = model.num_experts_per_tok
        most = self.tokens * min(chosen, model.num_routed_experts // ranks)
        return min(most, math.ceil(self.tokens * chosen / ranks * self.imbalance))

    @property
    def rows(self) -> int:
        """Number of tokens of an expert rank that have an expert on this rank: the expectation for
        K different experts, drawn uniformly."""
        model = self.config.model
        experts, chosen = model.num_routed_experts, model.num_experts_per_tok
        elsewhere = experts - experts // self.config.parallel.ep
        all_elsewhere = (
            math.prod((elsewhere - i) / (experts - i) for i in range(chosen))
            if elsewhere >= chosen
            else 0.0
        )
        return min(self.tokens, math.ceil(self.tokens * (1 - all_elsewhere) * self.imbalance))


def batch_of(config: Config, sequences: int, micro_batch_size: int) -> Batch:
    """Return a rank's batch; if documents are separated, each sequence has `DOCUMENTS` documents,
    and if they are packed whole, each micro-batch has one position of padding, with which it needs
    most."""
    length = config.train.sequence_length
    batch = Batch.of_tokens(torch.zeros(sequences, length + 1, dtype=torch.long))
    if not config.data.is_per_document:
        return batch
    begins_S = torch.arange(length) % math.ceil(length / DOCUMENTS) == 0
    batch = replace(batch, begins_BS=begins_S.expand(sequences, -1))
    if config.data.packing != "documents":
        return batch
    padding_BS = torch.zeros(sequences, length, dtype=torch.bool)
    padding_BS[micro_batch_size - 1 :: micro_batch_size, -1] = True
    return replace(batch, padding_BS=padding_BS)


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
    train = config.train.with_batches(each * data_size * few, each)
    return replace(config, train=train)


@dataclass(frozen=True)
class DryRank:
    """A rank on the stand-in device, after its model is built."""

    engine: Engine
    mode: LedgerMode
    batch: Batch
    """The rank's share of a global batch, with as few micro-batches as `shortened` leaves."""
    omitted_tokens: int
    """Tokens of the micro-batches that `shortened` removed."""


@contextmanager
def dry_rank(
    config: Config,
    world_size: int,
    assumed: Assumed,
    rank: int,
    layers: Sequence[Sequence[int]] | None = None,
    *,
    make_mode: Callable[[Ledger, Load, WorkTally], LedgerMode] = LedgerMode,
) -> Iterator[DryRank]:
    """Build one of `world_size` ranks, for a block; the process must have no other use.

    `layers`: layers of every stage; None: equally many."""
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels would read values
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    module.memory = assumed.memory or module.memory
    data_size = config.parallel.data_ranks(world_size)
    number = config.num_micro_batches(data_size)
    num_tokens = config.train.sequence_length * config.train.batch_size // data_size
    num_tokens //= config.parallel.cp
    config = shortened(config, world_size)
    tally = WorkTally(number / config.num_micro_batches(data_size), rates=assumed.rate_table)
    load = Load(config, num_tokens // number, assumed.imbalance)
    device, mode = standin(assumed.device), make_mode(Ledger(), load, tally)
    with _process_group(rank, world_size, device), mode:
        mesh = Mesh.build(config.parallel, device)
        mode.ledger.mark(BUILDING)
        engine = mode.engine = build_engine(config, mesh, record=mode, layers=layers)
        mode.ledger.label(
            "parameters", [local(x) for x in (*engine.part.parameters(), *engine.part.buffers())]
        )
        batch = batch_of(config, config.train.batch_size // data_size, engine.micro_batch_size)
        present = batch.inputs_BS.numel() // config.parallel.cp
        yield DryRank(engine, mode, batch, num_tokens - present)


@contextmanager
def _process_group(rank: int, world_size: int, device: torch.device) -> Iterator[None]:
    """Have a default process group whose other ranks do not exist, for a block; a single rank has
    none."""
    if world_size == 1:
        yield
        return
    start_fake_process_group(rank, world_size, device)
    try:
        yield
    finally:
        dist.destroy_process_group()
