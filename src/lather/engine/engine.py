"""A model on a mesh of ranks: the gradients of a global batch, and validation. A single process is
a mesh of one rank, with the same code.

Every rank gets the sequences of its data rank, so all ranks of a pipeline get the same.
The loss is a sum over labels divided by the number of labels on all ranks (`shares`), so no
gradient is divided later, and after `launch_gradients` every parameter has its whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from lather.config.config import Config, MoEConfig
from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.device import Read, gpu_module, is_gpu, is_nvidia, read, to_device
from lather.engine.qk_clip import measuring
from lather.engine.settings import compute_in_fp8, prepare_experts, schedule_for, weights_dtype
from lather.engine.shares import Shares
from lather.engine.step_graph import StepGraph
from lather.engine.step_reading import NO_LABELS, StepReading, StepResult
from lather.engine.trained_parameters import train_only, trained_parameters, with_adapters
from lather.models.decoder import Decoder
from lather.models.families import build_model as build_family
from lather.models.moe import LOCAL_EXCHANGE, Exchange
from lather.models.routing import counting_step
from lather.models.saving.rounded_weights import (
    RoundedWeights,
    narrow_product_weights,
    set_rounded_weights,
)
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.optim import PendingRefreshes
from lather.parallel.expert_exchange import ExpertExchange
from lather.parallel.local_parameters import local_parameters
from lather.parallel.mesh import Mesh
from lather.parallel.sharded_parameters import Storing
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import Activation, Executor, StepOutput
from lather.pipeline.gathering import shard_part
from lather.pipeline.model_part import ModelPart, PartLayers, fresh_weights, outlined_part
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.prelude import run_prelude
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Schedule, forwards
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees
from lather.shapes import Float, Int


class Engine:
    """This rank's part of a model, and its execution."""

    def __init__(
        self,
        part: ModelPart,
        mesh: Mesh,
        schedule: Schedule,
        loop: LoopConfig,
        moe: MoEConfig,
        frees: Frees,
        record: Recorder | None = None,
    ) -> None:
        """`part`: with values, or on the meta device: then a unit after the other gets memory and
        is sharded, and `parameters.fill` gives it values. `moe`: with its coefficients resolved."""
        self.part, self.mesh, self.schedule, self.moe = part, mesh, schedule, moe
        self.shares = Shares(part, mesh, loop, moe, schedule.num_micro_batches)
        self.micro_batch_size = self.shares.micro_batch_size
        self.schedule_of: Callable[[int], Schedule] = lambda num_micro_batches: schedule
        """Makes the schedule of a step by its number of micro-batches, which may grow."""
        prepare_experts(part, moe, mesh.data_group, mesh.context)
        if loop.fp8 == "block":
            compute_in_fp8(part, mesh.device)
        if loop.weight_dtype == "bfloat16":
            narrow_product_weights(part, torch.bfloat16)
        queue = WeightGradients()
        defer_weight_gradients(part, queue)
        self.rounded_weights = RoundedWeights()
        if loop.rounded_weights != "product":
            set_rounded_weights(part, self.rounded_weights)
        narrow = torch.bfloat16 if loop.precision == "bf16" else None
        of_gradients = torch.bfloat16 if loop.gradient_dtype == "bfloat16" else None
        rounds_own = loop.rounded_weights == "block"
        storing = Storing(narrow, rounds_own, of_gradients, loop.offload_frozen)
        self.units = shard_part(part, mesh, storing)
        self.parameters = local_parameters(part, mesh)
        length, context = loop.sequence_length, mesh.context
        local_length = length if context is None else context.length_of(length)
        shape = (self.micro_batch_size, local_length, part.hidden_size)
        dtypes = (p.dtype for p in part.parameters())  # products' weights may be bf16
        dtype = reduce(torch.promote_types, dtypes, torch.float32)
        self._activation = Activation(shape, dtype, travels_as=narrow)
        self._segments = Segments(
            self._exchange(frees),
            weight_gradients=queue,
            frees=frees,
            recompute=loop.recompute,
            autocast=narrow,
            rounded_weights=self.rounded_weights,
        )
        self._executor = Executor(
            part.stages, schedule, self._segments, self._activation, mesh, self.units, record
        )
        self._graph: StepGraph | None = None
        if loop.cuda_graph and is_nvidia(mesh.device):
            self._graph = StepGraph(self._passes, part.parameters())

    def _exchange(self, frees: Frees) -> Exchange:
        """Return the exchange of tokens among the expert ranks."""
        mesh = self.mesh
        if mesh.ep == 1:
            return LOCAL_EXCHANGE
        return ExpertExchange(
            mesh.ep_group,
            self.part.num_experts,
            free_buffer=frees.free_buffer,
            sizes_group=mesh.sizes_group,
        )

    def launch_gradients(self, batch: Batch, *, with_logits: bool = False) -> StepReading:
        """Run the forward and backward pass of the global batch, of which `batch` is the share of
        this rank's data rank, the same on all of its context ranks; store the gradients of the step
        in `parameters`, and return its losses and loads, and `with_logits` also the largest logit
        of each attention head.

        Raises ValueError, before anything is sent, if the share does not have the engine's shape,
        and DataError if its routing is not one of the model.
        """
        share = self.shares.divide(batch)
        micro_batches = share.micro_batches
        reading = self.new_reading(share.num_labels, with_logits=with_logits)
        with counting_step(self.part.routers()), measuring(self.part, reading.logits_AH):
            try:
                if self._graph is None:
                    schedule = self.schedule_of(len(micro_batches))
                    output = self._passes(micro_batches, schedule)
                else:
                    is_plain = batch.begins_BS is None and batch.padding_BS is None
                    is_plain = is_plain and not batch.columns and not with_logits
                    output = self._graph(micro_batches, replays=is_plain)
            except BaseException:
                self.parameters.clear_gradients()  # they are incomplete
                raise
        self.parameters.collect_gradients()
        weights_M = torch.tensor(share.weights, dtype=torch.float64)
        weights_M = to_device(weights_M, self.mesh.device)
        self._collect(output, [weights_M, *share.weights_of_depths], reading)
        return reading

    def _passes(
        self, micro_batches: Sequence[MicroBatch], schedule: Schedule | None = None
    ) -> StepOutput:
        """Run the passes, after which the sharded parameters have their gradients."""
        output = self._executor.run(micro_batches, schedule)
        self._wait_for_gradients()
        return output

    @contextmanager
    def recorded_by(self, record: Recorder) -> Iterator[None]:
        """Let another recorder record the passes in the block."""
        before, self._executor.record = self._executor.record, record
        try:
            yield
        finally:
            self._executor.record = before

    def _wait_for_gradients(self) -> None:
        for unit in self.units.values():
            unit.wait_for_gradients()

    def new_reading(self, num_labels: int, *, with_logits: bool = False) -> StepReading:
        """Return a reading of a step in which all ranks have so many labels, without passes."""
        sources = self.part, self.parameters, self.mesh
        return StepReading(*sources, num_labels, with_logits=with_logits)

    def run_prelude(self, batch: Batch) -> None:
        """Run two micro-batches of this rank's share of a global batch through its stages, for
        training and for validation, without transfers (`lather.pipeline.prelude`).

        On GPUs with a pipeline all ranks call this before the first step. It changes neither
        parameters nor random state, and leaves no gradients. Raises ValueError and DataError as
        `launch_gradients` does.
        """
        device, micro_batches = self.mesh.device, self.shares.rehearsed(batch)
        with torch.no_grad():
            run_prelude(self._executor, micro_batches)
        with counting_step(self.part.routers()):
            run_prelude(self._executor, micro_batches)
        self._wait_for_gradients()
        self.parameters.clear_gradients()
        if is_gpu(device):
            gpu_module(device).synchronize(device)

    def without_labels(self) -> StepResult:
        """Return the result of a step in which no rank has a label: it has neither loss nor
        load."""
        counts_LE = torch.zeros(len(self.part.moe_layers), self.part.num_experts, dtype=torch.int64)
        return StepResult(math.nan, math.nan, math.nan, counts_LE, 0, skip_reason=NO_LABELS)

    @torch.no_grad()
    def validation_loss(self, batch: Batch) -> float | None:
        """Return the mean cross entropy in nats per label over the sequences of all ranks, of which
        each rank has equally many, whatever their columns. None, without computing anything, if no
        rank has a label.

        Raises ValueError, before anything is sent, if the sequences do not have the engine's
        length.
        """
        self.shares.check_shape(batch, max(1, len(batch.inputs_BS)))
        num_labels, _ = self.shares.add_up(batch)
        if not num_labels:
            return None
        batch = replace(batch, columns={}).padded(-len(batch.inputs_BS) % self.micro_batch_size)
        schedule = forwards(self.schedule.num_stages, len(batch.inputs_BS) // self.micro_batch_size)
        if self.schedule.gathers_blocks:
            schedule = schedule.by_block()
        output = self._executor.run(
            self.shares.micro_batches(batch, 1.0, [0.0] * schedule.num_micro_batches), schedule
        )
        total = torch.cat([torch.zeros(1, device=self.mesh.device), *output.losses]).double().sum()
        if self.mesh.size > 1:
            dist.all_reduce(total)
        return read(total, Read.LOSS).item() / num_labels

    def fill_gaps(self, refreshes: PendingRefreshes) -> None:
        """Do these refreshes, a batch at a time, between the actions of the pipeline."""
        self._executor.refreshes = refreshes

    def _collect(
        self, output: StepOutput, weights: Sequence[Float[Tensor, " m"]], reading: StepReading
    ) -> None:
        """Write this rank's losses and loads into a reading. `weights`: those of the micro-batches
        in the balance loss, of the main model and then of each depth of multi-token prediction."""
        if output.losses:
            reading.losses[1:] = torch.stack(output.losses).double().sum(0)
        layers = self.part.local_moe_layers()
        if not layers:
            return
        of_micro_batches = [
            [summary for stage in self.part.stages for summary in output.routings[stage.index, m]]
            for m in range(len(weights[0]))
        ]
        summaries_LM = list(zip(*of_micro_batches, strict=True))
        balance_LM = torch.stack([summary.balance_loss for row in summaries_LM for summary in row])
        balance_LM = balance_LM.double().view(len(layers), -1)
        of_mtp = dict(zip(self.part.mtp_layers, weights[1:], strict=True))
        weights_LM = torch.stack([of_mtp.get(layer, weights[0]) for layer in layers])
        reading.losses[0] = (balance_LM * weights_LM).sum() / len(self.part.moe_layers)
        for layer, row in zip(layers, summaries_LM, strict=True):
            counts_E = torch.stack([summary.count_E for summary in row]).sum(0)
            reading.counts_LE[self.part.moe_layers.index(layer)] = counts_E

    def balance(self, counts_LE: Int[Tensor, "l e"]) -> None:
        """Apply loss-free balancing after a step in which the experts received these rows."""
        if self.moe.bias_update_rate:
            counts_LE = to_device(counts_LE, self.mesh.device)
            layers = zip(self.part.local_moe_layers(), self.part.routers(), strict=True)
            for layer, router in layers:
                router.update_correction_bias(
                    counts_LE[self.part.moe_layers.index(layer)], self.moe.bias_update_rate
                )


def build_model(config: Config, device: torch.device) -> Decoder:
    """Build the whole model with random weights from the seed, and prepare its experts as `[moe]`
    says."""
    generator = torch.Generator().manual_seed(config.seed)
    model = with_adapters(build_family(config.model, generator, device), config.lora, generator).to(
        weights_dtype(config)
    )
    prepare_experts(model, config.moe)
    return model


def build_engine(
    config: Config,
    mesh: Mesh,
    *,
    record: Recorder | None = None,
    layers: Sequence[Sequence[int]] | None = None,
) -> Engine:
    """Build this rank's engine with the random weights of the seed, the same on every mesh.
    `layers`: layers of every stage; None: equally many."""
    model, num_micro_batches = config.model, config.num_micro_batches(mesh.data_size)
    schedule = schedule_for(config.parallel, num_micro_batches)
    if layers is None:
        sizes = model.num_hidden_layers, schedule.num_stages, model.num_nextn_predict_layers
        layers = stages_of(uniform(*sizes))
    share = PartLayers(tuple(layers), schedule.stages_of(mesh.pp_rank), mesh.ep_rank, mesh.ep)
    part = outlined_part(config.model, share, weights_dtype(config), config.lora)
    train_only(part, trained_parameters(config).names)
    if config.train.compile:
        part.compile_parts()
    frees, moe = Frees(poison=config.parallel.poison), config.resolved_moe()
    engine = Engine(part, mesh, schedule, config.train, moe, frees, record)
    if config.train.first_batch_size:
        engine.schedule_of = lru_cache(1)(partial(schedule_for, config.parallel))
    generator = torch.Generator().manual_seed(config.seed)
    engine.parameters.fill(fresh_weights(config.model, generator, config.lora))
    return engine
