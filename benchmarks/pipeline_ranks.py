"""Makes the contestants of `lather bench pipeline`: the same model and table in our executor, and
in torch's own runtime.

    ours        `lather.pipeline.executor.Executor`: layers in the lean block ("saved"), early frees
    attention   as ours, and the attention segment's activations are computed again in backward
    experts     as ours, and gate/up of experts and dense layers are computed again
                (memory="recompute")
    held        our executor without lean block or early frees: feed-forward and linear layers in
                plain autograd ("reference"), and tensors that could be freed at once stay until
                their chunk's backward
    torch       `ScheduleDualPipeV` with stock `PipelineStage`s, static shapes given, outputs not
                collected; a stage is the model's own blocks in plain autograd as in `held`, and its
                exchange the differentiable one

All have the same parameters and micro-batches, attention, norms (ours, which keep less than plain
ones) and loss (`linear_cross_entropy`: with plain cross entropy the baselines would keep logits,
too). FSDP takes no part: a rank has all parameters of its stages whole.

Letters: B sequences of a micro-batch, S positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.models.families.deepseek_v2 import DeepseekV2Config
from lather.models.lora import LoraConfig
from lather.models.moe import LOCAL_EXCHANGE, Exchange
from lather.models.saving.weight_gradients import WeightGradients, defer_weight_gradients
from lather.models.token_positions import SequenceLayout
from lather.parallel.expert_exchange import ExpertExchange
from lather.parallel.fsdp_units import FsdpUnit
from lather.parallel.mesh import Mesh
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.executor import Activation, Executor
from lather.pipeline.model_part import (
    ModelPart,
    PartLayers,
    Stage,
    allocate,
    fill,
    fresh_weights,
    outlined_part,
)
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.recorder import Recorder
from lather.pipeline.schedule import Action, dualpipev
from lather.pipeline.segments import Segments
from lather.pipeline.tape import Frees


@dataclass(frozen=True)
class EngineLevers:
    """The settings of our engine that save memory."""

    memory: str = "saved"
    early_frees: bool = True
    recompute: tuple[str, ...] = ()


OURS = {
    "ours": EngineLevers(),
    "attention": EngineLevers(recompute=("attention",)),
    "experts": EngineLevers("recompute"),
    "held": EngineLevers("reference", early_frees=False),
}
CONTESTANTS = (*OURS, "torch")
SEED = 0
Watch = Callable[[], None]


@dataclass(frozen=True)
class PipelineCase:
    """A run of the pipeline."""

    model: DeepseekV2Config
    batch: int
    """Sequences in a micro-batch."""
    length: int
    num_micro_batches: int
    dtype: torch.dtype = torch.float32

    def batch_of(self, data_rank: int) -> tuple[Tensor, Tensor]:
        """Draw the tokens and labels of a data rank's step."""
        generator = torch.Generator().manual_seed(1000 + data_rank)
        rows = self.num_micro_batches * self.batch
        tokens_BS = torch.randint(
            self.model.vocab_size, (rows, self.length + 1), generator=generator
        )
        return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()

    @property
    def labels(self) -> int:
        return self.num_micro_batches * self.batch * self.length


def make_contestant(name: str, case: PipelineCase, mesh: Mesh) -> OurRuntime | TorchRuntime:
    """Make a contestant whose gradients are zero tensors, so that nothing that a step makes is a
    parameter or a gradient."""
    contestant = TorchRuntime(case, mesh) if name == "torch" else OurRuntime(case, mesh, OURS[name])
    clear_gradients(contestant.part)
    return contestant


def clear_gradients(part: ModelPart) -> None:
    for p in part.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.zero_()


def _nothing() -> None:
    """Do nothing, where nobody watches."""


def make_part(case: PipelineCase, mesh: Mesh, memory: str) -> ModelPart:
    stages = dualpipev(mesh.pp, 2 * mesh.pp)
    layers = stages_of(uniform(case.model.num_hidden_layers, stages.num_stages))
    share = PartLayers(layers, stages.stages_of(mesh.pp_rank), mesh.ep_rank, mesh.ep)
    part = outlined_part(case.model, share, torch.float32, LoraConfig())
    allocate([part], mesh.device)
    fill(part, fresh_weights(case.model, torch.Generator().manual_seed(SEED), LoraConfig()))
    part.to(case.dtype)
    part.set_memory(memory)
    return part


class OurRuntime:
    """A contestant that our executor runs."""

    def __init__(
        self, case: PipelineCase, mesh: Mesh, levers: EngineLevers, record: Recorder | None = None
    ) -> None:
        self.case = case
        self.part = make_part(case, mesh, levers.memory)
        queue = WeightGradients()
        defer_weight_gradients(self.part, queue)
        frees = Frees(enabled=levers.early_frees)
        local = mesh.ep == 1
        segments = Segments(
            LOCAL_EXCHANGE
            if local
            else ExpertExchange(
                mesh.ep_group, case.model.n_routed_experts, free_buffer=frees.free_buffer
            ),
            weight_gradients=queue,
            frees=frees,
            recompute=levers.recompute,
        )
        self.executor = Executor(
            self.part.stages,
            dualpipev(mesh.pp, case.num_micro_batches),
            segments,
            Activation((case.batch, case.length, case.model.hidden_size), case.dtype),
            mesh,
            {module: FsdpUnit(nn.ModuleList([module])) for module in self.part.modules()},
            record,
        )
        self.layout = SequenceLayout(case.batch, case.length, mesh.device)

    def step(self, tokens_BS: Tensor, labels_BS: Tensor, watch: Watch = _nothing) -> float:
        size = self.case.batch
        batches = [
            MicroBatch(tokens, labels, self.layout, float(self.case.labels))
            for tokens, labels in zip(tokens_BS.split(size), labels_BS.split(size), strict=True)
        ]
        recorder = self.executor.record
        if watch is not _nothing:
            self.executor.record = _Watcher(watch)
        try:
            output = self.executor.run(batches)
        finally:
            self.executor.record = recorder
        return float(sum(float(loss) for loss in output.losses))


class _Watcher(Recorder):
    """A recorder that calls `watch` after each action."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        yield
        self.watch()

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


class TorchRuntime:
    """The contestant that torch's runtime runs."""

    def __init__(self, case: PipelineCase, mesh: Mesh) -> None:
        self.case, self.mesh = case, mesh
        self.part = make_part(case, mesh, "reference")
        self.layout = SequenceLayout(case.batch, case.length, mesh.device)
        self.watch: Watch = _nothing
        self.schedule: Any = None

    def _make(self) -> Any:
        """Make the schedule, which the first step does: torch's stages then make their buffers."""
        case, mesh, part = self.case, self.mesh, self.part
        exchange = (
            LOCAL_EXCHANGE
            if mesh.ep == 1
            else ExpertExchange(mesh.ep_group, case.model.n_routed_experts)
        )
        meta = torch.device("meta")
        tokens = torch.empty(case.batch, case.length, dtype=torch.int64, device=meta)
        x_BSD = torch.empty(
            case.batch,
            case.length,
            case.model.hidden_size,
            dtype=case.dtype,
            device=meta,
            requires_grad=True,
        )
        num_stages = len(part.share.layers_of_stage)
        stages: list[Any] = [
            _WatchedStage(
                self,
                StageModule(stage, self.layout, exchange),
                stage.index,
                num_stages,
                mesh.device,
                input_args=(x_BSD if stage.index else tokens,),
                output_args=(x_BSD,),
                group=mesh.pp_group,
            )
            for stage in part.stages
        ]
        return ScheduleDualPipeV(
            stages, case.num_micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def _loss(self, x_BSD: Tensor, labels_BS: Tensor) -> Tensor:
        assert self.part.lm_head is not None
        return linear_cross_entropy(
            x_BSD, self.part.lm_head.weight, labels_BS, normalizer=float(self.case.labels)
        )

    def step(self, tokens_BS: Tensor, labels_BS: Tensor, watch: Watch = _nothing) -> float:
        self.watch = watch
        if self.schedule is None:
            self.schedule = self._make()
        losses: list[Tensor] = []
        has_ends = self.mesh.pp_rank == 0
        args = (tokens_BS,) if has_ends else ()
        self.schedule.step(
            *args, target=labels_BS if has_ends else None, losses=losses, return_outputs=False
        )
        return float(sum(float(loss.detach()) for loss in losses))


Contestant = OurRuntime | TorchRuntime


class StageModule(nn.Module):
    """A stage as a module for torch's runtime: it loops over its layers as `Decoder.forward`
    does."""

    def __init__(self, stage: Stage, layout: SequenceLayout, exchange: Exchange) -> None:
        super().__init__()
        self.embed_tokens, self.norm, self.lm_head = stage.embed_tokens, stage.norm, stage.lm_head
        self.blocks = nn.ModuleList(stage.blocks)
        self.layout, self.exchange = layout, exchange

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for block in self.blocks:
            x, _ = block(x, self.layout, self.exchange)
        return x if self.norm is None else self.norm(x)


class _WatchedStage(PipelineStage):
    """Torch's stage, which calls `watch` after each of its chunks."""

    def __init__(self, runtime: TorchRuntime, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.runtime.watch()
        output = super().forward_one_chunk(*args, **kwargs)
        self.runtime.watch()
        return output

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        self.runtime.watch()
        output = super().backward_one_chunk(*args, **kwargs)
        self.runtime.watch()
        return output

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        output = super().backward_weight_one_chunk(*args, **kwargs)
        self.runtime.watch()
        return output
