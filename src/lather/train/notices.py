"""Lines that a run shows beside the numbers of its steps: its sizes at the start, and notices of
what the user may want to change.

Experts have collapsed if the router sends nearly all tokens to few of them. A model that starts
from random weights collapses within its first tens of steps, and recovers if the load is balanced
strongly enough. So the first steps do not count, and a notice needs two windows of
steps in a row. Trained weights may be used unevenly on narrow text; they are not watched.

Letters: L MoE blocks, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lather.config.config import Config
from lather.engine.optimizer import build_optimizer, head_rows
from lather.engine.step import learning_rate
from lather.engine.step_reading import NO_LABELS, StepResult
from lather.engine.trained_parameters import outline, train_only, trained_parameters
from lather.models.saving.rounded_weights import narrow_product_weights
from lather.parallel.mesh import Mesh

SETTLED = 60
"""Steps from random weights that do not count, at most half of the run."""
WINDOW = 20
"""Steps over which loads are added up."""
LEAST_LOAD = 0.1
"""Load, relative to an even load, below which an expert is as good as unused."""
FEW = 1 / 16
"""Share of experts that makes a block uneven if so many are unused; of many, a few often are."""
MOST_LOAD = 3.0
"""Load, relative to an even load, above which an expert of few does too much of the work. The limit
for an expert of many is half of its greatest possible load."""
LEAST_ROWS = 50
"""Rows of an even load below which a window says nothing."""
STRONG = 0.015
"""A coefficient of a block's balance loss that held small models of all families (docs/log.md)."""


def describe_run(
    config: Config, mesh: Mesh, num_sequences: int, layers_of_stage: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Yield the lines on the sizes of the model, the mesh, the data and the steps."""
    trained = trained_parameters(config)
    size = f"{trained.num_parameters / 1e6:.2f} M parameters"
    device = mesh.device.type + ("" if mesh.size == 1 else f", {mesh.describe()}")
    data = ", ".join(map(str, config.data.path)) or config.data.source
    sequences = f"{num_sequences:,} training sequences of {data}"
    yield f"{size}, {config.optim.name}, {device}, {sequences}"
    if trained.num_trained < trained.num_parameters:
        yield trained.describe()
    tokens = config.train.batch_size * config.train.sequence_length
    rates = config.optim.describe_rates(has_experts=config.model.num_routed_experts > 0)
    yield f"peak learning rates for steps of {tokens:,} tokens: {rates}"
    if mesh.pp > 1:
        yield f"layers by stage: {' '.join(str(len(layers)) for layers in layers_of_stage)}"
    if _loses_small_changes(config):
        yield (
            "note: optim.weight_rounding = 'nearest' loses the changes of bf16 weights that are "
            "smaller than about 0.3 % of the weight, which late in a run are most: leave it out, "
            "or give 'stochastic'"
        )


def rates_at(step: int, config: Config) -> str:
    """Describe the learning rate at a step, and those of kinds with a schedule of their own."""
    optim, steps = config.optim, config.train.steps
    text = f"the learning rate of step {step} is {learning_rate(step, optim, steps):.3g}"
    for kind, schedule in optim.own_schedules(
        has_experts=config.model.num_routed_experts > 0
    ).items():
        text += f", of {kind} {schedule.rate(optim.lr_of(kind), step, steps):.3g}"
    return text


def _loses_small_changes(config: Config) -> bool:
    """Return whether trained weights are rounded to the nearest bf16, without a remainder."""
    if config.train.weight_dtype != "bfloat16":
        return False
    model = outline(config)
    train_only(model, trained_parameters(config).names)
    model.set_memory(config.moe.memory)
    narrow_product_weights(model, torch.bfloat16)
    optimizer = build_optimizer(config.optim, model.named_parameters(), head_rows(config))
    return any(
        group["weight_rounding"] == "nearest" and p.dtype == torch.bfloat16
        for group in optimizer.param_groups
        for p in group["params"]
    )


def uneven_blocks(load_LE: Tensor, num_experts_per_tok: int) -> set[int]:
    """Return the blocks, counted from 0, whose load is uneven. `load_LE`: 1 for an even load."""
    num_experts = load_LE.shape[1]
    most = max(MOST_LOAD, num_experts / num_experts_per_tok / 2)
    is_idle_L = (load_LE < LEAST_LOAD).sum(1) >= max(1, FEW * num_experts)
    return set((is_idle_L | (load_LE.amax(1) > most)).nonzero().flatten().tolist())


class ExpertWatch:
    """Finds collapsed experts in the loads of a run that starts from random weights."""

    def __init__(self, num_experts_per_tok: int, steps: int) -> None:
        """`steps`: the length of the run."""
        self._num_experts_per_tok, self._first = num_experts_per_tok, min(SETTLED, steps // 2)
        self._window: list[Tensor] = []
        self._uneven: set[int] = set()

    def collapse(self, step: int, counts_LE: Tensor) -> str:
        """Add the rows of a step (L, E). Return a sentence about the first block whose load was
        uneven in the last two windows; empty if there is none, or within a window."""
        if step <= self._first or counts_LE.numel() == 0:
            return ""
        self._window.append(counts_LE)
        if len(self._window) < WINDOW:
            return ""
        counts_LE, self._window = torch.stack(self._window).sum(0).double(), []
        even_L1 = counts_LE.mean(1, keepdim=True)
        load_LE = torch.where(even_L1 < LEAST_ROWS, torch.ones_like(counts_LE), counts_LE / even_L1)
        before, self._uneven = self._uneven, uneven_blocks(load_LE, self._num_experts_per_tok)
        if not before & self._uneven:
            return ""
        block = min(before & self._uneven)
        return (
            f"the experts of MoE block {block} have collapsed: in steps {step - WINDOW + 1} to "
            f"{step} their loads are between {load_LE[block].min():.2f} and "
            f"{load_LE[block].max():.2f} of an even one"
        )


class Notices:
    """Shows notices on the steps and validations of a launch, at most one for each subject."""

    def __init__(self, config: Config, note: Callable[[str], None]) -> None:
        """`note` shows a line."""
        self._note, self._subjects = note, set[str]()
        self._coefficient = config.resolved_moe().balance_coefficient or 0.0
        self._experts = ExpertWatch(config.model.num_experts_per_tok, config.train.steps)
        self._is_from_random = not config.init_from

    def watch_step(self, number: int, result: StepResult) -> None:
        if result.skip_reason == NO_LABELS:
            self._once(
                "training",
                f"step {number} changed nothing and has no loss, as no token of it is learned: "
                "if many steps are like this, make the data set with the answers learned, or give "
                "more tokens per step (--train.batch-size, --train.sequence-length)",
            )
        elif self._is_from_random and not result.skipped:
            self._watch_experts(number, result)

    def _watch_experts(self, number: int, result: StepResult) -> None:
        sentence = self._experts.collapse(number, result.counts_LE)
        if sentence:
            old = self._coefficient
            new = STRONG if old < STRONG / 1.5 else 3 * old
            self._once(
                "experts",
                f"note: {sentence}; balance them more strongly with --moe.balance-coefficient "
                f"{new:.3g} (now {old:.3g}), also when the run is resumed",
            )

    def watch_validation(
        self, losses: Mapping[str, float | None], num_sequences: Mapping[str, int]
    ) -> None:
        """`losses`: by held-out set, None without a label."""
        for name in (name for name, loss in losses.items() if loss is None):
            self._once(
                f"validation on {name}",
                f"no token of the {num_sequences[name]} sequences of the held-out set {name!r} is "
                "learned, so it has no loss: give one with answers to learn, or more sequences "
                "(--train.validation-sequences)",
            )

    def _once(self, subject: str, text: str) -> None:
        """Show a line, unless the subject has had a line before."""
        if subject not in self._subjects:
            self._subjects.add(subject)
            self._note(text)
