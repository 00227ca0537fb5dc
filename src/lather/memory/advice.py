"""Plans settings, at most ten from a ladder, with which a run fits into its devices.

The ladder has rungs, in the order in which an engineer would climb it: another mesh, if experts are
not shared among ranks yet; parameters gathered block by block, and fewer activations; long
sequences divided among context ranks; another order or partition of a pipeline; a smaller state of
the same rule; weights and sums of gradients in bf16; state in the host's memory; rows of the state
on every rank; the rule with the least state; more pipeline ranks; twice as many ranks. If fewer
activations cannot suffice, the smaller state, weights and gradients come first. The settings of a
rung, three at most, are planned at the same time, on top of what helped on the rungs below. The
first rung with a setting that fits is the last.

Every size is that of a whole plan (`lather.memory.plan`), and so are flops and bytes sent. Settings
are ordered by their predicted steps (`lather.memory.step_time`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from lather.config.config import Config
from lather.config.kind_config import KINDS
from lather.config.optim import optim_config
from lather.config.rate_schedule import SCHEDULE_OPTIONS
from lather.errors import ConfigError
from lather.memory.plan import MemoryPlan, allowance_for, plan
from lather.memory.step_time import parts_of_step
from lather.memory.workers import worker_processes
from lather.optim.options import NEEDED_BY_OFFLOAD, name_of

MOST_SETTINGS = 10
"""Maximal number of settings that are planned."""
REACH = 0.7
"""Fraction of the activations at a peak that smaller micro-batches and recomputation are assumed to
save at most. It decides the order of the rungs alone."""
HELPS = 0.99
"""Largest fraction of the bytes with which a setting counts as a help to build upon."""
LONG = 8192
"""Length from which on sequences are divided among context ranks."""
LEANEST_RULE = "muon"
"""The rule with the least state."""
OF_ANY_RULE = ("optim.state_dtype", "optim.weight_rounding", "optim.offload")
"""Options of the ladder that another rule has, too."""

Changes = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """A configuration with its plan, and its differences from the user's."""

    changes: Changes
    """Changed values by dotted name, as on the command line; `world` is the number of ranks."""
    config: Config
    plan: MemoryPlan

    def seconds(self, machine: int) -> float:
        """Return the predicted seconds of a step, with `machine` ranks per machine."""
        return sum(parts_of_step(self.plan, machine))


@dataclass(frozen=True)
class Advice:
    """The settings that were planned."""

    memory: int
    """Bytes of a device."""
    machine: int
    """Ranks per machine."""
    tried: tuple[Setting, ...]
    """The user's configuration, and all settings in the order in which they were planned."""

    @property
    def fitting(self) -> list[Setting]:
        """The settings that fit, the shortest predicted step first; of steps that are equally long
        to two digits, the one with the fewest changes."""

        def order(setting: Setting) -> tuple[float, int, float]:
            seconds = setting.seconds(self.machine)
            return float(f"{seconds:.1e}"), len(setting.changes), seconds

        return sorted(
            (setting for setting in self.tried if setting.plan.needed <= self.memory), key=order
        )

    @property
    def lightest(self) -> Setting:
        """The setting that needs the least memory."""
        return min(self.tried, key=lambda setting: setting.plan.needed)

    @property
    def without_pipeline(self) -> Setting | None:
        """The setting that fits, has no pipeline and a shorter step than the user's, whose pipeline
        is on one machine; None if there is none."""
        present = self.tried[0]
        if present.config.parallel.pp == 1 or present.plan.world_size > self.machine:
            return None
        shorter = (
            setting
            for setting in self.fitting
            if set(setting.changes) <= {"parallel.pp", "parallel.ep"}
            and setting.config.parallel.pp == 1
            and setting.seconds(self.machine) < present.seconds(self.machine)
        )
        return next(shorter, None)


def advise(
    config: Config,
    present: MemoryPlan,
    memory: int,
    *,
    machine: int = 8,
    say: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Plan settings until a setting fits in `memory` bytes.

    Args:
        config: not resolved, so that defaults that depend on the rule can follow another rule.
        present: the plan of this configuration. If it fits, other meshes alone are planned.
        machine: devices per machine; the ranks that share experts, which communicate most, stay
            within a machine. Pipelines may go from machine to machine.
        say: called with a line of progress.
    """
    with worker_processes() as pool:
        ladder = _Ladder(config, present, memory, machine, say, pool)
        ladder.climb()
    return Advice(memory, machine, tuple(ladder.tried))


@dataclass
class _Ladder:
    """The ladder that the module docstring describes."""

    config: Config
    present: MemoryPlan
    memory: int
    machine: int
    say: Callable[[str], None]
    pool: ProcessPoolExecutor
    tried: list[Setting] = field(init=False)
    best: Setting = field(init=False)
    """The setting that the next rung builds upon."""

    def __post_init__(self) -> None:
        self.best = Setting({}, self.config, self.present)
        self.tried = [self.best]

    def climb(self) -> None:
        for rung in self.rungs():
            planned = self.planned(rung())
            self.tried += planned
            lightest = min(planned, key=lambda setting: setting.plan.needed, default=self.best)
            if lightest.plan.needed <= self.memory:
                return
            if lightest.plan.needed <= HELPS * self.best.plan.needed:
                self.best = lightest

    def rungs(self) -> Iterator[Callable[[], list[Changes]]]:
        """Yield the rungs; each returns its settings, as changes of `best`."""
        fits = self.present.needed <= self.memory
        mesh, world = self.config.parallel, self.present.world_size
        has_data_ranks_alone = mesh.pp == mesh.ep == 1 < world // mesh.cp
        are_near = are_on_machines(mesh.ep, world, self.machine)
        if fits or has_data_ranks_alone or self.has_needless_pipeline or not are_near:
            yield self.meshes
        if fits:
            return
        if self.activations_are_within_reach:
            yield from (self.activations, self.contexts, self.pipelines, self.states, self.narrow)
        else:
            yield from (self.states, self.narrow, self.activations, self.contexts, self.pipelines)
        yield from (self.offload, self.rows, self.leanest_rule)
        yield from (self.longer_pipeline, self.more_ranks)

    def planned(self, rung: Sequence[Changes]) -> list[Setting]:
        """Plan the settings of a rung that were not planned yet, at the same time. A value of None
        takes the change of a lower rung back."""
        todo: list[tuple[Changes, Config, int]] = []
        known = [(setting.config, setting.plan.world_size) for setting in self.tried]
        for added in rung:
            both = {**self.best.changes, **added}
            changes = {name: value for name, value in both.items() if value is not None}
            if "optim.name" in added:
                kept = (k for k in changes if k in OF_ANY_RULE or not k.startswith("optim."))
                changes = {**{k: changes[k] for k in kept}, **added}
            world = changes.get("world", self.present.world_size)
            config = changed(self.config, changes, world)
            if config is not None and (config, world) not in known:
                known.append((config, world))
                todo.append((changes, config, world))
        if not (todo := todo[: MOST_SETTINGS + 1 - len(self.tried)]):
            return []
        with ThreadPoolExecutor(len(todo)) as threads:
            return [
                setting for setting in threads.map(self.plan, *zip(*todo, strict=True)) if setting
            ]

    def plan(self, changes: Changes, config: Config, world: int) -> Setting | None:
        """Plan a setting; None, with a line of progress, if its ranks cannot run it."""
        try:
            result = plan(config.resolved(), world, self.present.assumed, pool=self.pool)
        except (ConfigError, RuntimeError) as error:
            self.say(f"{as_options(changes)}: cannot be planned: {error}")
            return None
        fits = "fits" if result.needed <= self.memory else "does not fit"
        self.say(f"{as_options(changes)}: needs {result.needed / 2**30:.2f} GiB, {fits}")
        return Setting(changes, config, result)

    # --- which rungs ------------------------------------------------------------------------------

    @property
    def has_needless_pipeline(self) -> bool:
        """Whether a pipeline is within a machine, whose links are fast."""
        return self.config.parallel.pp > 1 and self.present.world_size <= self.machine

    @property
    def activations_are_within_reach(self) -> bool:
        """Whether the run would fit without `REACH` of the activations of every moment and, if they
        are those of stages, of the gathered parameters."""
        kinds = ["activations", *(["gathered parameters"] if self.gathers_stages else [])]
        peak = max(
            float((step.total - REACH * sum(map(step.of_kind, kinds))).max())
            for run in self.present.ranks
            for step in run.steps.values()
        )
        return peak + allowance_for(peak, self.present.assumed.device) <= self.memory

    @property
    def gathers_stages(self) -> bool:
        """Whether parameters are gathered from other ranks, those of a stage together."""
        parallel, world = self.best.config.parallel, self.present.world_size
        return parallel.resolved_gather == "stage" and world > parallel.pp

    # --- rungs ------------------------------------------------------------------------------------

    def meshes(self) -> list[Changes]:
        """Experts on all ranks of a machine, without a pipeline, with a pipeline from machine to
        machine, and with twice as many pipeline ranks."""
        world, experts = self.present.world_size, max(self.config.model.num_routed_experts, 1)
        machines, sizes = -(-world // self.machine), range(min(world, self.machine), 0, -1)
        near = [ep for ep in sizes if are_on_machines(ep, world, self.machine)]
        meshes: list[Changes] = []
        for pp in dict.fromkeys((1, machines, 2 * machines)):
            ranks = pp * self.config.parallel.cp
            divisors = (ep for ep in near if world % (ranks * ep) == 0 == experts % ep)
            if (ep := next(divisors, None)) is not None:
                meshes.append({"parallel.pp": pp, "parallel.ep": ep})
        return meshes[:1] if self.has_needless_pipeline else meshes

    def activations(self) -> list[Changes]:
        """Parameters gathered block by block, and keys and values gathered again; micro-batches of
        a sequence, with attention computed twice, then also the experts' products."""
        block: Changes = {"parallel.gather": "block"} if self.gathers_stages else {}
        if self.best.config.parallel.cp > 1 and self.best.config.parallel.cp_keep_gathered:
            block["parallel.cp_keep_gathered"] = False
        attention = {**block, "train.micro_batch_size": 1, "train.recompute": ("attention",)}
        return [*([block] if block else []), attention, {**attention, "moe.memory": "recompute"}]

    def contexts(self) -> list[Changes]:
        """Long sequences divided among more context ranks, which leaves fewer data ranks, or where
        there are too few of these, fewer expert ranks."""
        parallel, length = self.best.config.parallel, self.best.config.train.sequence_length
        ep, dp = parallel.ep, self.present.world_size // (parallel.pp * parallel.cp * parallel.ep)
        settings: list[Changes] = []
        for times in (2, 4) if length >= LONG else ():
            missing = times // math.gcd(times, dp)
            if ep % missing == 0:
                fewer = {"parallel.ep": ep // missing} if missing > 1 else {}
                settings.append({"parallel.cp": times * parallel.cp, **fewer})
        return settings

    def pipelines(self) -> list[Changes]:
        """Weight gradients as early as they can be, if the peak waits for them; and layers assigned
        by memory."""
        if self.best.config.parallel.pp == 1:
            return []
        settings: list[Changes] = [{"parallel.partition": "memory"}]
        if self.best.plan.peaks_where_weight_gradients_wait:
            settings.insert(0, {"parallel.schedule_memory": "least"})
        return settings

    def states(self) -> list[Changes]:
        """The state in bf16, with weights rounded block by block, and in 8 bits; if the rule has
        two sides, also of a single side of each matrix."""
        optim = self.config.optim
        if not hasattr(optim, "state_dtype"):
            return []
        bf16, int8 = ({"optim.state_dtype": dtype} for dtype in ("bfloat16", "int8"))
        side = [{"optim.sides": "smaller", **int8}] if hasattr(optim, "sides") else []
        rounding: Changes = {"train.rounded_weights": "block"} if self.rounds_for_steps else {}
        return [{**bf16, **rounding}, int8, *side]

    @property
    def rounds_for_steps(self) -> bool:
        """Whether rounded weights are kept for whole steps that could be those of blocks, and take
        so much that it counts as a help."""
        config, plan = self.best.config, self.best.plan
        if config.parallel.resolved_gather == "stage" or config.train.rounded_weights != "step":
            return False
        steps = (step for run in plan.ranks for step in run.steps.values())
        most = max(int(step.of_kind("rounded weights").max()) for step in steps)
        return most >= (1 - HELPS) * plan.needed

    def narrow(self) -> list[Changes]:
        """Sums of gradients in bf16, and weights, if products are in bf16; these need no rounded
        copies."""
        gradients: Changes = {"train.gradient_dtype": "bfloat16"}
        if self.config.train.precision != "bf16":
            return [gradients]
        has_copies = "train.rounded_weights" in self.best.changes
        rounding = {"train.rounded_weights": None} if has_copies else {}
        return [{**rounding, "train.weight_dtype": "bfloat16", **gradients}]

    def offload(self) -> list[Changes]:
        """State in the host's memory, without remainders of weights, which would stay on the
        device, and without options that do not go with it; beside adapters, the frozen weights, of
        which a pipeline would keep those of whole stages."""
        config, optim = self.best.config, self.best.config.optim
        if config.lora.rank > 0:
            has_stages = config.parallel.resolved_gather == "stage"
            block = {"parallel.gather": "block"} if has_stages else {}
            return [{**block, "train.offload_frozen": True}]
        has_remainders = config.train.weight_dtype == "bfloat16"
        rounding = {"optim.weight_rounding": "stochastic"} if has_remainders else {}
        sections = {"optim": optim, **{f"optim.{kind}": optim.section(kind) for kind in KINDS}}
        values = {"offload": True, **{name: x for name, (x, _) in NEEDED_BY_OFFLOAD.items()}}
        needed = {
            f"{section}.{name}": value
            for section, options in sections.items()
            for name, value in values.items()
            if getattr(options, name, None) not in (None, value)
        }
        return [{**rounding, **needed, "optim.offload": True}]

    def rows(self) -> list[Changes]:
        """Rows of every matrix's state on every rank, if parameters are sharded and the state is
        on the device."""
        parallel, optim = self.best.config.parallel, self.best.config.optim
        is_sharded = self.present.world_size // parallel.pp > parallel.replicas
        is_possible = not any(optim.rule_of(kind).offload for kind in KINDS)
        return [{"optim.ownership": "replicated"}] if is_sharded and is_possible else []

    def leanest_rule(self) -> list[Changes]:
        is_leanest = name_of(self.config.optim.rules[""]) == LEANEST_RULE
        return [] if is_leanest else [{"optim.name": LEANEST_RULE}]

    def longer_pipeline(self) -> list[Changes]:
        """Twice as many pipeline ranks, and half of the expert ranks if they are an even number."""
        pp, ep = self.best.config.parallel.pp, self.best.config.parallel.ep
        return [{"parallel.pp": 2 * pp, "parallel.ep": ep if ep % 2 else ep // 2}]

    def more_ranks(self) -> list[Changes]:
        world = 2 * self.present.world_size
        fits = are_on_machines(self.best.config.parallel.ep, world, self.machine)
        return [{"world": world}] if fits else []


def are_on_machines(ep: int, world_size: int, machine: int) -> bool:
    """Return whether every expert group lies on one machine: its `ep` ranks are neighbors
    (`lather.parallel.mesh`), and machines have `machine` ranks each, in their order, the last
    machine perhaps fewer."""
    firsts = range(0, world_size, ep)
    return all(first // machine == (first + ep - 1) // machine for first in firsts)


def changed(config: Config, changes: Changes, world_size: int | None = None) -> Config | None:
    """Return the configuration with other values, not resolved; None if they contradict each other,
    or if `world_size` ranks cannot divide the batch. Another rule comes with its default options
    and rates."""
    changes = {name: value for name, value in changes.items() if name != "world"}
    try:
        if (rule := changes.get("optim.name")) is not None:
            shared = {name: getattr(config.optim, name) for name in SCHEDULE_OPTIONS}
            config = replace(config, optim=optim_config(rule, **shared))
        config = _replaced(config, {k: v for k, v in changes.items() if k != "optim.name"})
        if world_size is not None:
            config.num_micro_batches(config.parallel.data_ranks(world_size))
    except ValueError:
        return None
    return config


def _replaced(section: Any, changes: Changes) -> Any:
    """Return a section of a configuration with other values by dotted name."""
    inner = defaultdict[str, Changes](dict)
    for name in [name for name in changes if "." in name]:
        key, _, rest = name.partition(".")
        inner[key][rest] = changes[name]
    values = {name: value for name, value in changes.items() if "." not in name}
    sections = {key: _replaced(getattr(section, key), x) for key, x in inner.items()}
    return replace(section, **values, **sections)


def as_options(changes: Changes) -> str:
    """Write changes as command-line options."""
    words: list[str] = []
    for name, value in changes.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:  # an option that is on has no value
            words += value if isinstance(value, tuple) else [str(value)]
    return " ".join(words)
