"""A model on a mesh of ranks: the gradients of a global batch, and validation. A single process is
a mesh of one rank, with the same code.

Every rank gets the sequences of its data rank, so all ranks of a pipeline get the same.
The loss is a sum over labels divided by the number of labels on all ranks, so no gradient is
divided later, and after `launch_gradients` every parameter has its whole gradient. The auxiliary
losses of the routers are means over tokens: a micro-batch counts by its share of the step's tokens,
on all ranks, whatever its labels. Padding is no token. Each depth of multi-token prediction has
labels and tokens of its own, by which its losses are averaged.
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
from lather.engine.micro_batch_columns import (
    check_columns,
    learned_pairs,
    num_pairs_of,
    with_columns,
)
from lather.engine.qk_clip import measuring
from lather.engine.settings import compute_in_fp8, prepare_experts, schedule_for, weights_dtype
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
from lather.models.token_positions import SequenceLayout, document_boundaries
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
        self.micro_batch_size = loop.batch_size // (mesh.data_size * schedule.num_micro_batches)
        self._first_share = loop.first_batch_size // mesh.data_size
        self.schedule_of: Callable[[int], Schedule] = lambda num_micro_batches: schedule
        """Makes the schedule of a step by its number of micro-batches, which may grow."""
        self._mtp_loss_weight, self._dpo_beta = loop.mtp_loss_weight, loop.dpo_beta
        prepare_experts(part, moe, mesh.data_group, mesh.context)
        if loop.fp8 == "block":
            compute_in_fp8(part, mesh.device, keeps_rows=mesh.ep > 1)
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
        self._length = length
        self._layout = SequenceLayout(shape[0], length, mesh.device, context=context)
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
        check_columns(batch, self.part, self._dpo_beta)
        num_labels, num_tokens = self.counts_of_all(batch)
        parts, normalizer = batch.tokens_of_parts(self.micro_batch_size), num_labels
        if self._dpo_beta:
            batch = replace(batch, columns=learned_pairs(batch.columns, batch.labels_BS))
            (normalizer,) = self._sums_of_ranks(num_pairs_of(batch.columns))
        shares = [tokens / max(1, num_tokens) for tokens in parts]
        micro_batches = self._micro_batches(batch, float(max(1, normalizer)), shares)
        micro_batches, shares_of_depths = self._with_depths(batch, micro_batches)
        reading = self.new_reading(num_labels, with_logits=with_logits)
        with counting_step(self.part.routers()), measuring(self.part, reading.logits_AH):
            try:
                if self._graph is None or with_logits:
                    schedule = self.schedule_of(len(micro_batches))
                    output = self._passes(micro_batches, schedule)
                else:
                    is_plain = batch.begins_BS is None and batch.padding_BS is None
                    is_plain = is_plain and not batch.columns
                    output = self._graph(micro_batches, replays=is_plain)
            except BaseException:
                self.parameters.clear_gradients()  # they are incomplete
                raise
        self.parameters.collect_gradients()
        shares_M = to_device(torch.tensor(shares, dtype=torch.float64), self.mesh.device)
        self._collect(output, [shares_M, *shares_of_depths], reading)
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
        self._check_share(batch)
        check_columns(batch, self.part, self._dpo_beta)
        device, num_batches = self.mesh.device, len(batch.inputs_BS) // self.micro_batch_size
        batch = replace(batch, padding_BS=None)
        micro_batches = self._micro_batches(batch, 1.0, [1.0] * num_batches)
        first, second, *_ = self._with_depths(batch, micro_batches)[0]
        padding_BS = torch.zeros(self.micro_batch_size, self._length, dtype=torch.bool)
        padding_BS[-1, -1] = True
        micro_batches = [first, replace(second, layout=second.layout.with_padding(padding_BS))]
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
        self._check_shape(batch, max(1, len(batch.inputs_BS)))
        num_labels, _ = self._add_up(batch)
        if not num_labels:
            return None
        batch = replace(batch, columns={}).padded(-len(batch.inputs_BS) % self.micro_batch_size)
        schedule = forwards(self.schedule.num_stages, len(batch.inputs_BS) // self.micro_batch_size)
        if self.schedule.gathers_blocks:
            schedule = schedule.by_block()
        output = self._executor.run(
            self._micro_batches(batch, 1.0, [0.0] * schedule.num_micro_batches), schedule
        )
        total = torch.cat([torch.zeros(1, device=self.mesh.device), *output.losses]).double().sum()
        if self.mesh.size > 1:
            dist.all_reduce(total)
        return read(total, Read.LOSS).item() / num_labels

    def fill_gaps(self, refreshes: PendingRefreshes) -> None:
        """Do these refreshes, a batch at a time, between the actions of the pipeline."""
        self._executor.refreshes = refreshes

    def _check_share(self, batch: Batch) -> None:
        """Check the shape of a share, which is a multiple of the first one while batches grow."""
        whole = self.micro_batch_size * self.schedule.num_micro_batches
        grows, size = self._first_share, len(batch.inputs_BS)
        is_part = grows > 0 and 0 < size < whole and size % grows == 0
        self._check_shape(batch, size if is_part else whole)

    def _check_shape(self, batch: Batch, num_sequences: int) -> None:
        expected = (num_sequences, self._length)
        columns = {"inputs": batch.inputs_BS, "labels": batch.labels_BS, **batch.columns}
        for name, x_BS in columns.items():
            if tuple(x_BS.shape[:2]) != expected:
                raise ValueError(
                    f"the batch's {name} have shape {tuple(x_BS.shape)}, not {expected}: give "
                    "every data rank its own share of the sequences, each of train.sequence_length"
                )

    def counts_of_all(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of labels and tokens of the global batch of a step, the same on all
        ranks. The ranks add up the numbers that this rank's share lacks.

        Raises ValueError, before anything is sent, if the share does not have the engine's shape.
        """
        self._check_share(batch)
        return self._add_up(batch)

    def _add_up(self, batch: Batch) -> tuple[int, int]:
        if batch.labels_of_all is not None and batch.tokens_of_all is not None:
            return batch.labels_of_all, batch.tokens_of_all
        num_labels, num_tokens = self._sums_of_ranks(batch.num_labels, batch.num_tokens)
        return num_labels, num_tokens

    def _sums_of_ranks(self, *of_share: int) -> tuple[int, ...]:
        """Return the sums over data ranks of numbers of their shares."""
        if self.mesh.data_size == 1:  # context ranks have the same share
            return of_share
        total = torch.tensor(of_share, device=self.mesh.device)
        dist.all_reduce(total, group=self.mesh.data_group)
        return tuple((read(total, Read.COUNTS) // self.mesh.cp).tolist())

    def _micro_batches(
        self,
        batch: Batch,
        normalizer: float | Tensor,
        shares: Sequence[float | Tensor],
        layouts: Sequence[SequenceLayout] = (),
    ) -> list[MicroBatch]:
        """Divide a batch, and take this rank's slices of its sequences. `shares`: the weights of
        its micro-batches in the auxiliary losses; `layouts`: those of its documents, if they exist
        already."""
        context = self.mesh.context
        size, length, device = self.micro_batch_size, batch.inputs_BS.shape[1], self.mesh.device
        if not layouts and batch.begins_BS is not None:
            layouts = [
                SequenceLayout(size, length, device, document_boundaries(begins), context=context)
                for begins in batch.begins_BS.split(size)
            ]
        # without documents masks and rotary tables are the same for all
        layouts = layouts or [self._layout] * len(shares)
        if batch.padding_BS is not None:
            paddings = batch.padding_BS.split(size)
            layouts = [
                layout.with_padding(padding_BS)
                for layout, padding_BS in zip(layouts, paddings, strict=True)
            ]
        whole = batch.inputs_BS, batch.labels_BS
        local = whole if context is None else map(context.local, whole)
        on_device = (to_device(x_BS, device).split(size) for x_BS in local)
        balance, z_loss = self.moe.balance_coefficient or 0.0, self.moe.z_loss_coefficient
        micro_batches = [
            MicroBatch(x_BS, y_BS, layout, normalizer, balance * share, z_loss * share)
            for x_BS, y_BS, layout, share in zip(*on_device, layouts, shares, strict=True)
        ]
        sources = batch.columns, self.part, context, device
        return with_columns(micro_batches, *sources, dpo_beta=self._dpo_beta)

    def _with_depths(
        self, batch: Batch, micro_batches: list[MicroBatch]
    ) -> tuple[list[MicroBatch], list[Tensor]]:
        """Add what the depths of multi-token prediction see; return also each depth's weights of
        the micro-batches in the auxiliary losses. The numbers of labels and tokens, on all ranks,
        stay on the device."""
        num_depths, device = len(self.part.mtp_layers), self.mesh.device
        if not num_depths:
            return micro_batches, []
        batches = [batch.ahead(depth + 1) for depth in range(num_depths)]
        counts = torch.tensor([(each.num_labels, each.num_tokens) for each in batches])
        counts_N2 = to_device(counts, device)
        if self.mesh.data_size > 1:
            dist.all_reduce(counts_N2, group=self.mesh.data_group)
            counts_N2 //= self.mesh.cp  # context ranks have the same share
        layouts = [each.layout for each in micro_batches]
        depths, shares_DM = [], []
        for each, (num_labels, num_tokens) in zip(batches, counts_N2.clamp(min=1), strict=True):
            parts = torch.tensor(each.tokens_of_parts(self.micro_batch_size), dtype=torch.float64)
            shares_DM.append(to_device(parts, device) / num_tokens)
            shares = shares_DM[-1].unbind()
            depths.append(self._micro_batches(each, num_labels, shares, layouts))
        weight = self._mtp_loss_weight / num_depths
        return [
            replace(each, depths=tuple(replace(depth, loss_weight=weight) for depth in of_each))
            for each, *of_each in zip(micro_batches, *depths, strict=True)
        ], shares_DM

    def _collect(
        self, output: StepOutput, shares: Sequence[Float[Tensor, " m"]], reading: StepReading
    ) -> None:
        """Write this rank's losses and loads into a reading. `shares`: the weights of the
        micro-batches in the balance loss, of the main model and then of each depth of multi-token
        prediction."""
        if output.losses:
            reading.losses[1:] = torch.stack(output.losses).double().sum(0)
        layers = self.part.local_moe_layers()
        if not layers:
            return
        of_micro_batches = [
            [summary for stage in self.part.stages for summary in output.routings[stage.index, m]]
            for m in range(len(shares[0]))
        ]
        summaries_LM = list(zip(*of_micro_batches, strict=True))
        balance_LM = torch.stack([summary.balance_loss for row in summaries_LM for summary in row])
        balance_LM = balance_LM.double().view(len(layers), -1)
        of_mtp = dict(zip(self.part.mtp_layers, shares[1:], strict=True))
        shares_LM = torch.stack([of_mtp.get(layer, shares[0]) for layer in layers])
        reading.losses[0] = (balance_LM * shares_LM).sum() / len(self.part.moe_layers)
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
