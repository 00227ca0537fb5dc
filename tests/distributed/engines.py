"""Puts one process's plain model beside a mesh's engine, for tests of the pipeline: the same data,
the same weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from lather.config.config import MoEConfig, ParallelConfig
from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.engine.engine import Engine
from lather.engine.step_reading import StepResult
from lather.engine.trained_parameters import train_only
from lather.models.adapted import add_adapters, is_adapters
from lather.models.decoder import Decoder
from lather.models.families import build_model
from lather.models.lora import LoraConfig
from lather.models.saving.weight_gradients import defer_weight_gradients
from lather.parallel.mesh import Mesh
from lather.pipeline import gathering
from lather.pipeline.model_part import PartLayers, empty_part, fill
from lather.pipeline.partition import stages_of, uniform
from lather.pipeline.schedule import Schedule, dualpipev, sequential
from lather.pipeline.tape import Frees
from models.tiny import FAMILY_TABLES, tiny_family_config, tiny_family_model

LENGTH = 6
VOCABULARY = 37


@dataclass(frozen=True)
class Case:
    """A mesh, a model and the way to run it. Sizes that are not given follow from these."""

    pp: int = 1
    cp: int = 1
    keep_gathered: bool = False
    ep: int = 1
    replicas: int = 1
    family: str = "deepseek_v2"
    layers: int = 0
    """Layers; 0: one more than there are stages, so that one stage has two."""
    experts: int = 4
    num_micro_batches: int = 0
    """Micro-batches of a data rank; 0: one more than the fewest that the schedule takes."""
    schedule: str = "dualpipev"
    gather: str = "stage"
    small: int = 0
    """Bytes up to which blocks are gathered together; 0: each by itself."""
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    """With "bf16" products are bf16, of weights that have `dtype`."""
    rounded_weights: str = "step"
    gradient_dtype: str = "float32"
    frees: bool = True
    poison: bool = False
    defer: bool = True
    recompute: tuple[str, ...] = ()
    memory: str = "saved"
    early_weight_gradients: bool = False
    balance_level: str | None = None
    z_loss: float = 0.0
    lopsided: bool = False
    """Whether all tokens go to two of the experts."""
    length: int = LENGTH
    """Tokens of a sequence."""
    lora: int = 0
    """Rank of adapters of the base weights, which are then frozen; 0: all is trained."""
    changes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", 2 * self.pp + 1)

    def name(self) -> str:
        return (
            " ".join(
                f"{key}={value}"
                for key, value in vars(self).items()
                if value != getattr(Case(), key)
            )
            or "default"
        )


@dataclass
class Pair:
    """This rank's engine, and the model of one process that it must agree with."""

    case: Case
    mesh: Mesh
    engine: Engine
    plain: Decoder
    moe: MoEConfig
    num_data: int

    def tokens(self, step: int = 0) -> Tensor:
        """Draw a global batch."""
        generator = torch.Generator().manual_seed(100 + step)
        count = self.num_data * self.engine.schedule.num_micro_batches
        return torch.randint(VOCABULARY, (count, self.case.length + 1), generator=generator)

    def share_of(self, tokens: Tensor) -> Batch:
        """This rank's share of a global batch."""
        return Batch.of_tokens(tokens.unflatten(0, (self.num_data, -1))[self.mesh.data_rank])

    def run(self, tokens: Tensor) -> StepResult:
        """Run the forward and backward pass of a global batch, of which each rank takes its
        share."""
        return self.engine.launch_gradients(self.share_of(tokens)).read()[0]

    def plain_key(self) -> str:
        """A key that is equal for pairs whose `plain` is the same model on the same tokens."""
        case = self.case
        model = (case.family, case.layers, case.experts, case.changes, case.lopsided, case.dtype)
        model = (*model, case.length)
        return repr(
            (
                *model,
                case.lora,
                case.balance_level,
                case.z_loss,
                self.num_data,
                self.engine.schedule.num_micro_batches,
            )
        )

    def plain_gradients(self, tokens: Tensor) -> float:
        """Run one process's backward passes on rank 0, and give all ranks its gradients and its
        loss, which is returned."""
        found: list[Any] = [None, None]
        if dist.get_rank() == 0:
            found = [self._plain_passes(tokens), [p.grad for p in self.plain.parameters()]]
        dist.broadcast_object_list(found, 0)
        for p, gradient in zip(self.plain.parameters(), found[1], strict=True):
            p.grad = gradient
        loss: float = found[0]
        return loss

    def _plain_passes(self, tokens: Tensor) -> float:
        """Go forward and backward, micro-batch by micro-batch. Where the balance loss is taken over
        the global batch, the parts that data ranks do at the same time are one micro-batch here."""
        total, length = tokens[:, 1:].numel(), self.case.length
        loss = 0.0
        for router in self.plain.routers():
            router.balance.restart(in_step=True)
        together = self.case.balance_level == "global_batch"
        parts = (
            tokens.unflatten(0, (self.num_data, -1)).transpose(0, 1)
            if together
            else tokens.unsqueeze(1)
        )
        for part in parts:
            output = self.plain(part[:, :-1], part[:, 1:], normalizer=float(total))
            share = len(part) * length / total
            auxiliary = output.balance_loss() * (self.moe.balance_coefficient or 0.0) * share
            for depth, mtp_loss in enumerate(output.mtp_losses, start=1):
                # each row of a sequence of depth + 1 to `length` tokens has a label
                mean = mtp_loss * length / (length - depth)
                auxiliary = auxiliary + LoopConfig.mtp_loss_weight / len(output.mtp_losses) * mean
            if self.moe.z_loss_coefficient:
                auxiliary = auxiliary + output.z_loss() * self.moe.z_loss_coefficient * share
            (output.loss + auxiliary).backward()
            loss += output.loss.item()
        for router in self.plain.routers():
            router.balance.restart(in_step=False)
        return loss

    def largest_error(self, what: str) -> float:
        """The largest error of this rank's rows of any parameter ("value") or gradient ("grad"),
        relative to the largest element of the whole tensor."""
        worst = 0.0
        plain = dict(self.plain.named_parameters())
        for entry in self.engine.parameters:
            expected = plain[entry.info.name] if what == "value" else plain[entry.info.name].grad
            actual = entry.parameter if what == "value" else entry.parameter.grad
            if not entry.source.requires_grad:
                assert actual is entry.parameter or actual is None
                continue
            assert expected is not None
            if entry.info.is_empty:
                continue
            assert actual is not None, entry.info.name
            assert actual.isfinite().all(), entry.info.name
            rows = expected[entry.info.offset : entry.info.offset + entry.info.length]
            scale = expected.abs().max().clamp(min=1e-3)
            worst = max(worst, ((actual - rows).abs().max() / scale).item())
        return worst


def mesh_of(case: Case) -> Mesh:
    """Build the mesh of a case; all ranks have to call it."""
    config = ParallelConfig(
        pp=case.pp,
        cp=case.cp,
        cp_keep_gathered=case.keep_gathered,
        ep=case.ep,
        replicas=case.replicas,
    )
    return Mesh.build(config, torch.device("cpu"))


@functools.cache
def _shared_mesh(pp: int, cp: int, keep_gathered: bool, ep: int, replicas: int) -> Mesh:
    return mesh_of(Case(pp=pp, cp=cp, keep_gathered=keep_gathered, ep=ep, replicas=replicas))


def shared_mesh(case: Case) -> Mesh:
    """Return the mesh of a case, which a rank makes once for all cases that are laid out like it,
    because each mesh has groups, and threads, of its own; all ranks have to call it."""
    return _shared_mesh(case.pp, case.cp, case.keep_gathered, case.ep, case.replicas)


def make_pair(case: Case, seed: int = 0, mesh: Mesh | None = None) -> Pair:
    """Make the pair of a case; all ranks have to call it. `mesh`: that of `shared_mesh`, or another
    of the same layout; None: a new one."""
    table = FAMILY_TABLES[case.family]
    sizes = {"num_hidden_layers": case.layers, **table.mesh, **case.changes}
    if table.experts:
        sizes[table.experts] = case.experts
    plain = tiny_family_model(case.family, seed=seed, **sizes).to(case.dtype)
    lora = LoraConfig(case.lora)
    _add_adapters(plain, lora, seed)
    plain.set_memory("reference")
    if case.lopsided:
        with torch.no_grad():
            for router in plain.routers():
                router.weight[2:] = router.weight[:1] * 0.01
    mesh = mesh or mesh_of(case)
    schedule = _schedule(case)
    share = PartLayers(
        stages_of(uniform(case.layers, schedule.num_stages)),
        schedule.stages_of(mesh.pp_rank),
        mesh.ep_rank,
        mesh.ep,
    )
    whole = build_model(tiny_family_config(case.family, **sizes), None, torch.device("meta"))
    add_adapters(whole, lora)
    part = empty_part(whole, share, mesh.device, case.dtype)
    fill(part, plain.named_parameters())
    train_only(part, frozenset(name for name, p in plain.named_parameters() if p.requires_grad))
    biases = dict(plain.named_buffers())
    for name, bias in part.named_buffers():
        bias.copy_(biases[name])
    moe = MoEConfig(
        memory=case.memory,
        balance_coefficient=0.05,
        balance_level=case.balance_level,
        z_loss_coefficient=case.z_loss,
    )
    batch = mesh.data_size * schedule.num_micro_batches
    loop = LoopConfig(
        batch_size=batch,
        sequence_length=case.length,
        recompute=case.recompute,  # type: ignore[arg-type]
        precision=case.precision,  # type: ignore[arg-type]
        rounded_weights=case.rounded_weights,  # type: ignore[arg-type]
        gradient_dtype=case.gradient_dtype,  # type: ignore[arg-type]
    )
    frees = Frees(enabled=case.frees, poison=case.poison)
    with mock.patch.object(gathering, "SMALL", case.small):
        engine = Engine(part, mesh, schedule, loop, moe, frees)
    if not case.defer:
        defer_weight_gradients(engine.part, None)
    for router in plain.routers():
        router.takes_z_loss = case.z_loss > 0
    if case.balance_level is not None:
        plain.balance_load(case.balance_level)
    return Pair(case, mesh, engine, plain, moe, mesh.data_size)


@torch.no_grad()
def _add_adapters(model: Decoder, lora: LoraConfig, seed: int) -> None:
    """Add adapters of which both matrices are drawn, so that both have gradients, and freeze all
    else; nothing without adapters."""
    add_adapters(model, lora)
    adapters = {name: p for name, p in model.named_parameters() if is_adapters(name)}
    generator = torch.Generator().manual_seed(seed)
    for p in adapters.values():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    if adapters:
        train_only(model, frozenset(adapters))


def _schedule(case: Case) -> Schedule:
    if case.schedule == "sequential":
        schedule = sequential(case.num_micro_batches or 2)
    else:
        number = case.num_micro_batches or 2 * case.pp + 1
        early = case.early_weight_gradients
        schedule = dualpipev(case.pp, number, early_weight_gradients=early)
    return schedule.by_block() if case.gather == "block" else schedule
