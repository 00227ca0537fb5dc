"""The configuration of a run: frozen dataclasses that check ranges when they are constructed, those
of a rule's options by making the rules. `fields.build` checks types before; `toml_file` reads and
writes files.

The string under each field is its documentation, with its unit; `lather train --help all` shows the
same strings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from lather.config.loop import DebugConfig, LoopConfig, Patterns
from lather.config.optim import OptimConfig, optim_config
from lather.config.records import CheckpointConfig, LogConfig, ProfileConfig
from lather.config.rule_fields import check_ranges
from lather.data.config import DataConfig
from lather.errors import ConfigError, require
from lather.models.families import DEFAULT_FAMILY, FAMILIES, ModelConfig
from lather.models.hf.model_folder import Reading
from lather.models.lora import LoraConfig
from lather.models.rotary import YarnConfig
from lather.optim.options import (
    Count,
    NonNegative,
    Positive,
    Range,
    is_number,
    name_of,
)

Coefficient = Annotated[
    float | None,
    Range("a number >= 0, or left out", lambda value: value is None or is_number(value)),
]


@dataclass(frozen=True)
class MoEConfig:
    """Load balancing of the experts, and the activations that MoE layers keep."""

    memory: Literal["saved", "recompute", "reference"] = "saved"
    """saved: keep the gate and up products for backward. recompute: compute them a second time
    instead. reference: keep all that autograd keeps."""
    balance_coefficient: Coefficient = None
    """Weight of each block's load-balancing loss; left out: the model's own."""
    balance_level: Literal["micro_batch", "sequence", "global_batch"] | None = None
    """Tokens over which the expert load is balanced; global_batch: all micro-batches of the step so
    far. Left out: the model's own."""
    z_loss_coefficient: NonNegative = 0.0
    """Weight of each block's router z-loss, which keeps the router's logits small; 0: none."""
    bias_update_rate: NonNegative = 0.0
    """Balancing without a loss: change of each expert's router bias per step, toward an even load;
    0: none."""

    def __post_init__(self) -> None:
        check_ranges(self, "moe.")


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks share the work; `--nproc`, torchrun or SLURM sets the number of ranks."""

    pp: Count = 1
    """Pipeline ranks; each holds two of the 2 * pp stages."""
    cp: Count = 1
    """Context ranks, among which each sequence is divided into slices, for long sequences."""
    cp_keep_gathered: bool = False
    """Keep what attention gathered from the context ranks for the backward pass, rather than gather
    it again: two exchanges of three remain, and each layer keeps keys and values (or latents) of
    whole sequences."""
    ep: Count = 1
    """Expert ranks, among which the experts of every layer are divided. All ranks / (pp * cp * ep)
    is dp; the batch is divided among dp * ep data ranks."""
    replicas: Count = 1
    """Complete copies of the sharded parameters (HSDP), a divisor of dp = all ranks / (pp * cp *
    ep); more copies: less communication, more memory."""
    partition: Literal["uniform", "memory"] = "uniform"
    """How layers are assigned to stages. uniform: equally many to each stage. memory: so that the
    largest rank needs as few bytes as possible, or at most 1 % more for a more even assignment; dry
    runs at the start find it, which takes a minute or more."""
    schedule: Literal["auto", "dualpipev", "sequential"] = "auto"
    """Order of forward and backward passes. sequential: one micro-batch after the other. auto:
    dualpipev with at least two pipeline ranks."""
    schedule_memory: Literal["normal", "least"] = "normal"
    """When a pipeline computes weight gradients. normal: where they fill bubbles. least: as early
    as possible, so that nothing is kept for them. This lowers the peak where activations are
    recomputed and makes a step longer; `lather plan` shows both."""
    gather: Literal["auto", "block", "stage"] = "auto"
    """The parameters that are gathered from the data ranks, and freed, together. block: those of a
    block (below 16 MiB: of several), just before its forward and its backward pass, and its
    gradients are reduced right after. stage: those of a stage, once per step; less communication,
    and more memory unless stages have few such units; `lather plan` shows both. auto: block without
    a pipeline, stage with one."""
    poison: bool = False
    """For debugging: overwrite memory that is freed early with NaN, so that a later read is
    noticed."""
    timeout: Positive = 600.0
    """Seconds that a rank waits for another rank inside a step before it gives up."""

    def __post_init__(self) -> None:
        check_ranges(self, "parallel.")
        if self.schedule == "sequential" and self.pp > 1:
            constraint = f"'dualpipev' or 'auto' with parallel.pp = {self.pp}"
            require(False, "parallel.schedule", self.schedule, constraint)
        if self.schedule_memory == "least" and self.resolved_schedule == "sequential":
            raise ConfigError(
                "parallel.schedule_memory = 'least' is not valid: it must be 'normal' without a "
                "pipeline: set parallel.pp to 2 or more, or parallel.schedule = 'dualpipev'"
            )

    @property
    def resolved_schedule(self) -> Literal["dualpipev", "sequential"]:
        """The schedule, with "auto" resolved."""
        if self.schedule == "auto":
            return "dualpipev" if self.pp > 1 else "sequential"
        return self.schedule

    @property
    def resolved_gather(self) -> Literal["block", "stage"]:
        """The value of `gather`, with "auto" resolved."""
        if self.gather == "auto":
            return "stage" if self.pp > 1 else "block"
        return self.gather

    def data_ranks(self, world_size: int, option: str = "--nproc") -> int:
        """Return the number of data ranks, dp * ep, among `world_size` ranks, which `option` gives.
        Raises ConfigError if the ranks cannot be divided in this way."""
        axes = {"pp": self.pp, **({"cp": self.cp} if self.cp > 1 else {}), "ep": self.ep}
        names, sizes = [f"parallel.{name}" for name in axes], list(axes.values())
        size = math.prod(sizes)
        dp, rest = divmod(world_size, size)
        if rest or not dp:
            raise ConfigError(
                f"{' * '.join(names)} = {' * '.join(map(str, sizes))} = {size} does not divide the "
                f"number of ranks, {world_size}: start {size} ranks ({option} {size}) or a "
                f"multiple, or change {' or '.join(names)}"
            )
        if dp % self.replicas:
            divided = "".join(f" / {name} {size}" for name, size in zip(names, sizes, strict=True))
            raise ConfigError(
                f"parallel.replicas = {self.replicas} does not divide dp = {dp} "
                f"({world_size} ranks{divided}): change it, or the number of ranks"
            )
        return dp * self.ep


@dataclass(frozen=True)
class Config:
    """A training run."""

    run_dir: Annotated[str, Range("a folder", bool)] = "runs/default"
    """Folder for everything that the run writes; a run that is already there is resumed."""
    init_from: str = ""
    """Initial weights of a new run: a Hugging Face folder, RUN (its newest checkpoint), RUN@STEP or
    RUN@best; empty: random weights."""
    init_weights: Literal["raw", "average"] = "raw"
    """The weights of the run that init_from names. average: those that it has averaged
    (train.average_timescale)."""
    ignore_fields: Patterns = ()
    """Fields of the config.json of init_from that are passed over although they may change the
    model; rope_scaling.KEY for one in another."""
    fork_from: str = ""
    """Checkpoint from which a new run continues, with weights, optimizer state and position in the
    data: RUN, RUN@STEP or RUN@best."""
    seed: Annotated[int, Range("an integer >= 0 and < 2**64", lambda seed: 0 <= seed < 2**64)] = 0
    """Seed of the initial weights and of the order of the data."""
    model: ModelConfig = field(default_factory=FAMILIES[DEFAULT_FAMILY].config)
    moe: MoEConfig = field(default_factory=MoEConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=optim_config)
    train: LoopConfig = field(default_factory=LoopConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        check_ranges(self, "")
        constraint = "raw without init_from"
        require(
            self.init_weights == "raw" or bool(self.init_from),
            "init_weights",
            self.init_weights,
            constraint,
        )
        vocab_size, longest = self.model.vocab_size, self.model.max_position_embeddings
        constraint = "at least 257 for byte-level BPE"
        require(vocab_size >= 257, "model.vocab_size", vocab_size, constraint)
        length, constraint = self.train.sequence_length, "at most model.max_position_embeddings"
        remedy = f"lower it, or give the model more: {longer_model(self.model, length)}"
        constraint += f" ({longest}): {remedy}"
        require(length <= longest, "train.sequence_length", length, constraint)
        cp = self.parallel.cp
        constraint = f"a multiple of 2 * parallel.cp = {2 * cp}, so that every rank has two slices"
        require(cp == 1 or length % (2 * cp) == 0, "train.sequence_length", length, constraint)
        ep, num_experts = self.parallel.ep, self.model.num_routed_experts
        constraint = f"a divisor of the {num_experts} routed experts"
        if not num_experts:
            constraint = f"1, because {self.model.model_type} models have no experts"
        require(max(num_experts, 1) % ep == 0, "parallel.ep", ep, constraint)
        if self.optim.stacks_experts and ep > 1:
            raise ConfigError(
                f"parallel.ep = {ep} is not valid: it must be 1 with "
                f"{name_of(self.optim.rules['experts'])!r}, which stacks all experts of a layer to "
                "one matrix; klsoap updates each expert by itself"
            )
        if self.train.fp8 == "block":
            others = {
                f"{self.model.model_type} models without experts": not num_experts,
                "lora.rank, whose adapters multiply in bf16": self.lora.rank,
                "moe.memory 'reference': give saved or recompute": self.moe.memory == "reference",
            }
            for other, is_present in others.items():
                require(not is_present, "train.fp8", self.train.fp8, f"none with {other}")
        qk_clip = self.train.qk_clip
        constraint = "0 with adapters, whose base weights stay as they are"
        require(not (qk_clip and self.lora.rank), "train.qk_clip", qk_clip, constraint)
        beta, has_mtp = self.train.dpo_beta, self.model.num_nextn_predict_layers > 0
        constraint = "0 with multi-token prediction, whose blocks have no loss for pairs"
        require(not (beta and has_mtp), "train.dpo_beta", beta, constraint)
        rises = "with train.dpo_beta, which raises the validation loss: the cross entropy of all "
        rises += "answers, chosen and rejected"
        patience, keep_best = self.train.patience, self.checkpoint.keep_best
        require(not (beta and patience), "train.patience", patience, f"0 {rises}")
        require(not (beta and keep_best), "checkpoint.keep_best", keep_best, f"false {rises}")
        pp, layers = self.parallel.pp, self.model.num_hidden_layers
        if self.parallel.resolved_schedule == "dualpipev":
            constraint = f"at most {layers // 2}: each of 2 * pp stages needs one of the"
            require(2 * pp <= layers, "parallel.pp", pp, f"{constraint} {layers} layers")

    @property
    def reading(self) -> Reading:
        """How the config.json of `init_from` is read."""
        named = self.model.model_type if ":" in self.model.model_type else ""
        return {"model_type": named, "ignore_fields": self.ignore_fields}

    def num_micro_batches(self, data_ranks: int) -> int:
        """Return the number of micro-batches of a rank in a step with the whole `batch_size`.
        Raises ConfigError if the batch, or the first of a batch that grows, cannot be divided in
        this way."""
        train, pp = self.train, self.parallel.pp
        least = 2 * pp if self.parallel.resolved_schedule == "dualpipev" else 1
        option = "first_batch_size" if train.first_batch_size else "batch_size"
        share, rest = divmod(getattr(train, option), data_ranks)
        size = train.micro_batch_size or next(
            (size for size in range(share // least, 0, -1) if share % size == 0), 1
        )
        if rest or share % size or share // size < least:
            raise ConfigError(train.batch_that_fits(data_ranks, least, option))
        return train.batch_size // (data_ranks * size)

    def resolved(self) -> Config:
        """Return the configuration with the defaults of `[optim]` that depend on its rules, on the
        batch size and on the number of steps, as the run directory stores it."""
        tokens_per_step = self.train.batch_size * self.train.sequence_length
        optim = self.optim.with_starts(lambda *of: max(1, round(of[-1] * self.train.steps)))
        return replace(self, optim=optim.resolved(tokens_per_step))

    def resolved_moe(self) -> MoEConfig:
        """Return `[moe]` with the model's own coefficient of the balance loss if none is given."""
        if self.moe.balance_coefficient is not None:
            return self.moe
        return replace(self.moe, balance_coefficient=self.model.balance_loss_coef)


def longer_model(model: ModelConfig, length: int) -> str:
    """Return the settings with which a model takes sequences of `length` tokens."""
    scaling, before = model.rope_scaling, float(model.max_position_embeddings)
    if scaling is not None and scaling.rope_type == YarnConfig.rope_type:
        before = scaling.original_max_position_embeddings
        if scaling.factor * before >= length:
            return f"model.max_position_embeddings {length}, which model.rope_scaling reaches"
    elif scaling is not None:
        before = max(before / scaling.factor, 1)
    factor = math.ceil(100 * length / before) / 100
    return (
        f"with trained weights model.rope_scaling.factor {factor:g}, with new ones "
        f"model.max_position_embeddings {length}"
    )
