"""The sections `[train]`, the training loop, numerics and safeguards, and `[debug]`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from lather.config.records import Number
from lather.config.rule_fields import check_ranges
from lather.config.step_ranges import StepRanges
from lather.data.batch_sizes import BatchSizes
from lather.errors import ConfigError, require
from lather.optim.options import Count, Decay, NonNegative, Positive, Range, at_least

Patterns = Annotated[tuple[str, ...], Range("patterns of names, none empty", all)]


@dataclass(frozen=True)
class DebugConfig:
    """Help with finding errors; a run without errors is not changed by it."""

    nan: bool = False
    """Run the passes of a step whose loss or gradient is not finite again, looking at every
    operation, and name the layer, the operation and the rank where a NaN began; takes many times
    as long as the step."""


@dataclass(frozen=True)
class LoopConfig:
    """Training steps, batch sizes, numerics and safeguards."""

    steps: Count = 300
    """Optimizer steps."""
    epochs: NonNegative = 0.0
    """Passes over the training data, in place of steps: the run sets train.steps to the least that
    read so many sequences, when it opens its data. 0: train.steps counts."""
    minutes: NonNegative = 0.0
    """Wall-clock limit of a launch, in minutes since its start; it saves and ends when another step
    and a checkpoint might not fit; 0: no limit."""
    batch_size: Count = 8
    """Sequences per step."""
    first_batch_size: Number = 0
    """Sequences of the first step, a divisor of batch_size, if the batch grows; 0: it does not."""
    batch_growth_steps: Number = 0
    """Steps in which the batch grows from first_batch_size to batch_size, by first_batch_size each
    time (batch-size warm-up)."""
    micro_batch_size: Number = 0
    """Sequences in one forward and backward pass of a rank; 0: the rank's share of batch_size (of
    first_batch_size, if the batch grows), divided only as far as its pipeline requires."""
    sequence_length: Count = 256
    """Tokens per sequence."""
    mtp_loss_weight: Positive = 0.3
    """Weight of the loss of multi-token prediction, the mean over its depths, beside the loss of
    the next token; without effect on models that have none. DeepSeek-V3: 0.3, then 0.1."""
    dpo_beta: NonNegative = 0.0
    """Train on pairs of a chosen and a rejected answer by DPO with this beta, against the
    log-probabilities that their data set has; 0.1 is common. 0: cross entropy, without pairs."""
    max_grad_norm: Annotated[float, Range("at least 0", lambda norm: norm >= 0)] = 1.0
    """Clip the norm of the gradient to this value; 0: do not clip."""
    qk_clip: NonNegative = 0.0
    """QK-clip: after each step scale the projections of queries and keys of every attention head
    whose largest logit was above this value, so that it falls to it; Kimi K2 was trained with 100.
    0: no clipping. For models without norms of queries and keys."""
    average_timescale: Decay = 0.0
    """Also keep an exponential average of the trained weights, whose time constant is this fraction
    of the run's steps: try 0.05 to 0.2, most useful with a rate that does not fall to zero. It is
    validated beside the weights, saved in checkpoints, and chosen with --weights average; 4 bytes
    per trained weight. 0: none."""
    trainable: Patterns = ()
    """Patterns of parameter names to train, such as layers.0.* or *.experts.*; none: all
    parameters. With [lora]: in addition to the adapters."""
    frozen: Patterns = ()
    """Patterns of parameter names not to train; they take precedence over trainable and [lora]."""
    max_skipped_steps: Count = 10
    """Stop the run after this many consecutive steps that were skipped because their loss or
    gradient was not finite, or a spike."""
    skip_steps: StepRanges = ""
    """Steps to leave out, such as "120:140 300": 120 to 140, both included, and 300. They compute
    and change nothing; all other steps keep their numbers, batches and learning rates."""
    spikes: Literal["off", "note", "skip", "roll_back"] = "off"
    """Treatment of a step whose loss or gradient norm is a spike. note: take it, and name the
    documents that it read. skip: change nothing in it instead. roll_back: go back to the newest
    checkpoint, and leave out all batches since then. off: do not look for spikes."""
    spike_deviations: Positive = 8.0
    """Deviations above the median of the last steps from which on a loss, or the logarithm of a
    gradient norm, is a spike; a deviation is 1.4826 times the median absolute deviation."""
    spike_window: Annotated[int, at_least(20)] = 100
    """Last steps with which a step is compared; the first 20 steps of a run are no spikes."""
    validation_every: Number = 100
    """Steps between validations; the run is always validated at its start and at its end. 0: only
    then."""
    validation_sequences: Count = 64
    """Held-out sequences per validation."""
    patience: Number = 0
    """End the run after so many validations in a row whose loss is no lower than the lowest before,
    and keep the best checkpoint, as checkpoint.keep_best does; 0: never."""
    patience_on: str = ""
    """Name of the held-out set that patience and checkpoint.keep_best follow; empty: the run's
    own."""
    recompute: tuple[Literal["attention", "experts", "shared_experts"], ...] = ()
    """Parts of each block whose activations are computed again in the backward pass instead of kept
    (activation checkpointing)."""
    compile: bool = False
    """Compile norms, rotary embeddings and similar operations with torch.compile; the start takes
    longer."""
    cuda_graph: bool = False
    """Capture the forward and backward passes of a step as a CUDA graph and replay it, for a single
    GPU whose host cannot keep up; from the third step on. What the passes hold at their peak, and
    the gradients, then stay allocated. Without effect on a CPU."""
    deterministic: bool = False
    """Get the same bits in every run on a GPU (torch.use_deterministic_algorithms); attention's
    backward pass, among others, is slower."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """bf16: matrix products in bfloat16 (autocast), weights and optimizer state in float32. fp64:
    the model in float64, slow, to compare two runs."""
    fp8: Literal["none", "block"] = "none"
    """block: the routed experts' products, forward and for the gradients of their inputs, multiply
    in FP8 (e4m3), with a scale for each 128 elements of a row and 128 x 128 of a weight; needs bf16
    precision, and a GPU of compute capability 8.9 or newer. Rows travel to experts on other ranks,
    and are kept there, in FP8. Weight gradients and all other products stay in bf16."""
    rounded_weights: Literal["step", "block", "product"] = "step"
    """When bf16 training rounds the weights. step: once per step, which takes 2 more bytes per
    weight that the rank alone has. block: before each pass through a block, which takes 2 bytes per
    weight of two units of blocks, or with parallel.gather 'stage' of whole stages. product: for
    each matrix product. Weights that data ranks divide are gathered in bfloat16, whatever this
    says."""
    weight_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which the weights of matrix products (linear layers, experts, an untied head) are
    kept; bfloat16 needs bf16 precision. Embedding, norms, routers, biases and adapters stay in
    float32. optim.weight_rounding of new weights: with remainder, the default, the run is that of
    float32 weights; stochastic drops nothing on average; nearest loses small changes."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype in which the gradients of a step are kept between micro-batches. They are computed, and
    summed over ranks, in float32; with bfloat16 the sums are rounded stochastically, which saves 2
    bytes per weight that a rank keeps, and with parallel.gather 'block' also the float32 gradients
    of all units of blocks but one. With 'stage' those of whole stages stay until the end of the
    step."""
    offload_frozen: bool = False
    """Keep frozen weights in the host's pinned memory; each block's are copied to the GPU just
    before its forward and its backward pass, beside the computation: twice for each micro-batch,
    and a step with many small micro-batches waits for the bus. With parallel.gather 'stage' the
    copies of whole stages are fetched once and stay on the GPU for the step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if there is a GPU, else the CPU."""

    def __post_init__(self) -> None:
        check_ranges(self, "train.")
        if self.weight_dtype == "bfloat16":
            allowed = f"float32 with train.precision = {self.precision!r}"
            require(self.precision == "bf16", "train.weight_dtype", self.weight_dtype, allowed)
        if self.fp8 == "block":
            allowed = f"none with train.precision = {self.precision!r}: give train.precision bf16"
            require(self.precision == "bf16", "train.fp8", self.fp8, allowed)
        if self.precision == "fp64":
            allowed = "float32 with train.precision = 'fp64', which keeps gradients in float64"
            is_wide = self.gradient_dtype == "float32"
            require(is_wide, "train.gradient_dtype", self.gradient_dtype, allowed)
        if self.patience and not self.validation_every:
            raise ConfigError(
                f"train.patience = {self.patience} needs validations between the steps: give "
                "train.validation_every, such as 100"
            )
        first, growth = self.first_batch_size, self.batch_growth_steps
        if bool(first) != bool(growth):
            raise ConfigError(
                f"train.first_batch_size = {first} and train.batch_growth_steps = {growth} belong "
                "together: give both, or neither"
            )
        if first:
            fits = first < self.batch_size and self.batch_size % first == 0
            constraint = f"a divisor of train.batch_size ({self.batch_size}), below it"
            require(fits, "train.first_batch_size", first, constraint)
        for option in ("batch_size", "first_batch_size"):
            if self.micro_batch_size and getattr(self, option) % self.micro_batch_size:
                raise ConfigError(self.batch_that_fits(1, 1, option))

    @property
    def batch_sizes(self) -> BatchSizes:
        """The sequences of every step."""
        return BatchSizes(self.batch_size, self.first_batch_size, self.batch_growth_steps)

    def steps_of_epochs(self, epoch_size: int) -> int:
        """Return the steps of `epochs` with so many sequences in each."""
        return self.batch_sizes.steps_of(math.ceil(round(self.epochs * epoch_size, 6)))

    def with_batches(self, size: int, micro: int) -> LoopConfig:
        """Return a copy whose steps all have `size` sequences, in micro-batches of `micro`."""
        return replace(
            self, batch_size=size, micro_batch_size=micro, first_batch_size=0, batch_growth_steps=0
        )

    def batch_that_fits(self, data_ranks: int, least: int, option: str = "batch_size") -> str:
        """Say why a batch, that of `option`, cannot be divided among data ranks with at least
        `least` micro-batches each, and name the smallest changes that mend it."""
        batch, micro = getattr(self, option), self.micro_batch_size
        unit = data_ranks * max(1, micro)
        factors = [f"{data_ranks} data ranks"] if data_ranks > 1 else []
        factors += [f"train.micro_batch_size {micro}"] if micro else []
        constraints = [f"a multiple of {unit} ({' x '.join(factors)})"] if unit > 1 else []
        if least > 1:
            constraints.append(
                f"at least {least * unit} (the pipeline needs {least} micro-batches of each data "
                "rank)"
            )
        counts = batch // unit, batch // unit + 1
        batches = {max(count, least) * unit for count in counts} - {batch}
        if option == "first_batch_size":
            multiples = range(least * unit, self.batch_size, unit)
            divisors = [each for each in multiples if self.batch_size % each == 0]
            batches = {*sorted(divisors, key=lambda each: abs(each - batch))[:2]}
        remedies = [f"train.{option} {' or '.join(map(str, sorted(batches)))}"] if batches else []
        share = 0 if batch % data_ranks else batch // data_ranks
        sizes = [size for size in range(1, share // least + 1) if share % size == 0]
        if micro and sizes:
            nearest = min(sizes, key=lambda size: abs(size - micro))
            remedies.append(f"train.micro_batch_size {nearest}")
        return (
            f"train.{option} = {batch} is not valid: it must be {' and '.join(constraints)}: "
            + (f"give {', or '.join(remedies)}" if remedies else "leave it out")
        )
