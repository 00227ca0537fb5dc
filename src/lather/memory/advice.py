"""Searches settings with which a run fits into its devices, and their price.

Settings are tried in this order, each kind completely: other meshes of the same ranks; layers
assigned to stages by memory; fewer kept activations; smaller optimizer states; rows of the state on
every rank; rules with less state. The search stops after the first kind with which enough settings
fit. Replicas are not tried: they need more memory and, at the assumed rates, save nothing. Bytes
are estimated (`lather.memory.estimate`); the cheapest settings are then planned in full, and only
those that fit by their plan are advised.

The price is flops, bytes sent and bubble. To order settings these are converted to seconds at
assumed rates (`FLOPS`, `LINK`, `EXCHANGE`), which are no prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch

from lather.config.config import Config, num_routed_experts
from lather.config.optim import RuleOptimConfig, optim_config
from lather.errors import ConfigError
from lather.memory.estimate import Estimate, Estimator
from lather.memory.plan import MemoryPlan, allowance_for, bubble_of, plan
from lather.memory.stage_bytes import memory_partition
from lather.memory.workers import Assumed, worker_processes
from lather.models.families import build_model
from lather.optim.options import name_of, options_of
from lather.pipeline.partition import Partition

FLOPS = 400e12
"""Assumed flops per second of a device."""
LINK, EXCHANGE = 50e9, 300e9
"""Assumed bytes per second that a device sends to any rank, and to expert ranks of its machine;
none of it overlaps with compute."""

ENOUGH = 3
"""Number of advised settings."""
MOST_PLANS = 6
"""Maximal number of settings that are planned in full."""
MOST_PARTITIONED = 2
"""Maximal number of settings whose layers are assigned by memory; each takes its own dry runs."""
PARTITION_SAVES = 0.15
"""Fraction of the largest rank's bytes that assigning layers by memory is assumed to save at most;
the largest observed was 0.13."""
LARGEST_WORLD = 64
"""Largest factor by which the number of ranks is multiplied if nothing fits."""

Changes = dict[str, Any]

ACTIVATIONS: tuple[Changes, ...] = (
    {},
    {"train.recompute": ("attention",)},
    {"moe.memory": "recompute"},
    {"moe.memory": "recompute", "train.recompute": ("attention",)},
    {"train.recompute": ("attention", "experts", "shared_experts")},
)
"""Settings of kept activations, from more bytes to fewer."""
STACKED = "stacked_soap"
LIGHTER_RULES = (STACKED, "soap_muon", "muon")
"""Rules, from more bytes to fewer."""


@dataclass(frozen=True)
class Setting:
    """A configuration, and its differences from the one that the user asked about."""

    changes: Changes
    """Changed values by dotted name, as on the command line."""
    config: Config
    estimate: Estimate
    bubble: float
    """Fraction of the step in which a pipeline rank waits, if a layer's backward takes twice as
    long as its forward."""
    partition: Partition | None = None
    """The partition, if layers are assigned by memory."""

    @property
    def seconds(self) -> float:
        """Seconds of a step at the assumed rates, used only to order settings."""
        work = self.estimate.work
        return work.flops / FLOPS / (1 - self.bubble) + work.sent / LINK + work.exchanged / EXCHANGE


@dataclass(frozen=True)
class Advice:
    """The result of a search."""

    settings: tuple[tuple[Setting, MemoryPlan], ...]
    """Settings that fit, the one with the shortest step at the assumed rates first."""
    number_tried: int
    least_flops: float
    """Minimal flops of a step among all settings that were tried."""
    lightest: Setting
    """The setting that needs the least memory."""
    world_that_fits: int | None
    """If nothing fits: the smallest number of ranks, among doublings, with which the lightest
    settings fit; None: not even `LARGEST_WORLD` times as many are enough."""


def advise(
    config: Config,
    world_size: int,
    assumed: Assumed,
    *,
    machine: int = 8,
    say: Callable[[str], None] = lambda what: None,
) -> Advice:
    """Search settings with which `world_size` ranks, whose memory `assumed` says, can train this
    model.

    Args:
        config: not resolved, so that defaults that depend on the rule can follow another rule.
        machine: devices per machine; expert ranks, which communicate most, stay within one.
            Pipelines may go from machine to machine.
        say: called with a line of progress.

    Raises ConfigError if no mesh of this many ranks can run the batch, or if no setting can be
    estimated.
    """
    assert assumed.memory is not None
    with worker_processes() as pool:
        search = _Search(
            config,
            world_size,
            assumed.memory,
            assumed,
            machine,
            Estimator(config, assumed, pool),
            say,
        )
        search.run()
        lightest = min(search.tried, key=lambda setting: setting.estimate.needed)
        best = sorted(search.fitting(), key=lambda setting: setting.seconds)
        if len(best) > MOST_PLANS:
            best = [
                *(setting for setting in best[:MOST_PLANS] if setting is not lightest),
                lightest,
            ]  # fits if any does
        chosen: list[tuple[Setting, MemoryPlan]] = []
        for setting in best:
            for one in (setting, search.with_early_weight_gradients(setting)):
                say(f"planning {as_options(one.changes) or 'the given configuration'}")
                found = plan(one.config.resolved(), world_size, assumed, one.partition)
                if found.needed <= assumed.memory:
                    chosen.append((one, found))
                if found.needed <= assumed.memory or not found.peaks_where_weight_gradients_wait:
                    break
            if len(chosen) == ENOUGH:
                break
        world = None if chosen else search.world_that_fits(lightest)
    return Advice(
        tuple(chosen),
        len(search.tried),
        min(setting.estimate.work.flops for setting in search.tried),
        lightest,
        world,
    )


@dataclass
class _Search:
    """The search that the module docstring describes."""

    config: Config
    world_size: int
    memory: int
    assumed: Assumed
    machine: int
    estimator: Estimator
    say: Callable[[str], None]
    tried: list[Setting] = field(default_factory=list)

    def run(self) -> None:
        meshes = list(self.meshes())
        if not meshes:
            raise ConfigError(
                f"no mesh of {self.world_size} ranks, {self.machine} on a machine, can run this "
                "model and batch with all ranks that share experts on one machine: change --world, "
                "--machine or train.batch_size"
            )
        meshes.sort(
            key=lambda mesh: mesh["parallel.pp"] != 2
        )  # the estimator measures other settings on the first mesh only
        kept = [*ACTIVATIONS, *({**one, "train.micro_batch_size": 1} for one in ACTIVATIONS)]
        self.try_all("meshes", meshes)
        if not self.tried:
            raise ConfigError(f"no setting could be estimated: {self.estimator.failures[0]}")
        if not self.is_enough():
            self.partition_by_memory()
        for name, lighter in (
            ("fewer kept activations", [{}]),
            ("smaller optimizer states", self.lighter_states()),
            ("smaller optimizer states on all ranks", self.shared_states()),
            ("rules with less state", self.lighter_rules()),
        ):
            if not self.is_enough() and lighter:
                self.try_all(
                    name,
                    [mesh | less | state for state, mesh, less in product(lighter, meshes, kept)],
                )

    def partition_by_memory(self) -> None:
        """Retry the fastest pipelines that nearly fit, with layers assigned so that the largest
        rank is as small as possible."""
        uniform = [
            one
            for one in self.tried
            if one.config.parallel.pp > 1 and one.config.parallel.partition == "uniform"
        ]
        near = [
            one
            for one in uniform
            if self.memory < one.estimate.needed <= self.memory / (1 - PARTITION_SAVES)
        ]
        for setting in sorted(near, key=lambda setting: setting.seconds)[:MOST_PARTITIONED]:
            changes: Changes = {**setting.changes, "parallel.partition": "memory"}
            config = changed(self.config, changes, self.world_size)
            assert config is not None
            self.say(
                "assigning layers by memory: "
                f"{as_options(setting.changes) or 'the given configuration'}"
            )
            try:
                partition = memory_partition(config.resolved(), self.world_size, self.assumed)
            except (
                ConfigError,
                RuntimeError,
            ) as error:  # too few layers of a kind, or an operation that refuses these sizes
                self.say(f"not assigned: {error}")
                continue
            if partition is not None and partition.largest < partition.uniform_largest:
                peak = setting.estimate.peak * (partition.largest / partition.uniform_largest)
                estimate = replace(
                    setting.estimate,
                    peak=peak,
                    allowance=allowance_for(float(peak.sum()), self.assumed.device),
                )
                bubble = bubble_of(config, self.world_size, partition.layers)
                self.tried.append(Setting(changes, config, estimate, bubble, partition))

    def is_enough(self) -> bool:
        return len(self.fitting()) >= ENOUGH

    def fitting(self) -> list[Setting]:
        return [setting for setting in self.tried if setting.estimate.needed <= self.memory]

    def meshes(self) -> Iterator[Changes]:
        """Yield the meshes that can run the model and the batch, and whose expert groups each lie
        on one machine, the configured one first."""
        own, world_size = mesh_of(self.config), self.world_size
        experts = num_routed_experts(self.config.model)
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        fitting = [(pp, ep) for pp, ep in product(sizes, sizes) if world_size % (pp * ep) == 0]
        others = [
            {"parallel.pp": pp, "parallel.ep": ep}
            for pp, ep in fitting
            if experts % ep == 0 and self.has_room(pp * ep)
        ]
        for changes in [own, *(one for one in others if one != own)]:
            if changed(self.config, changes, world_size) is None:
                continue
            ep = changes["parallel.ep"]
            if are_on_machines(ep, world_size, self.machine):
                yield changes
            elif changes == own:
                self.say(
                    f"--parallel.ep {ep} is left out: some ranks that share experts would lie on "
                    f"two machines or more, with --machine {self.machine} devices each"
                )

    def has_room(self, parts: int) -> bool:
        """Return whether a rank's part of the model and its gradients, all of which it holds at a
        time, are smaller than its memory."""
        return 8 * self.num_parameters / parts < self.memory

    @cached_property
    def num_parameters(self) -> int:
        return sum(
            p.numel()
            for p in build_model(self.config.model, None, torch.device("meta")).parameters()
        )

    def lighter_states(self) -> list[Changes]:
        """Return changes that make the state of the same rule smaller, from more bytes to fewer."""
        assert isinstance(self.config.optim, RuleOptimConfig)
        known = options_of(self.config.optim.rules[""])
        sides: list[Changes] = [{}, {"optim.sides": "smaller"}] if "sides" in known else [{}]
        dtypes: list[Changes] = [{}, {"optim.state_dtype": "bfloat16"}]
        return [one | two for one, two in product(sides, dtypes)][1:]

    def shared_states(self) -> list[Changes]:
        """Return the same changes, and none, each with rows of every matrix's state on every rank,
        if parameters are sharded."""
        is_sharded = (
            self.config.parallel.data_ranks(self.world_size) > self.config.parallel.replicas
        )
        return (
            [{"optim.ownership": "replicated", **state} for state in [{}, *self.lighter_states()]]
            if is_sharded
            else []
        )

    def lighter_rules(self) -> list[Changes]:
        """Return rules with less state than the configured one; those that stack all experts of a
        layer only if every rank has them all."""
        assert isinstance(self.config.optim, RuleOptimConfig)
        own = name_of(self.config.optim.rules[""])
        lighter = LIGHTER_RULES[LIGHTER_RULES.index(own) + 1 if own in LIGHTER_RULES else 0 :]
        return [
            {"optim.name": name}
            for name in lighter
            if self.config.parallel.ep == 1 or name != STACKED
        ]

    def try_all(self, name: str, several: Sequence[Changes]) -> None:
        """Estimate the settings that were not tried yet."""
        known = {repr(setting.config) for setting in self.tried}
        possible = (
            (changes, changed(self.config, changes, self.world_size)) for changes in several
        )
        new = {
            repr(config): (changes, config)
            for changes, config in possible
            if config is not None and repr(config) not in known
        }
        self.say(f"trying {name}: {len(new)} settings")
        estimates = self.estimator.estimates(
            [config for _, config in new.values()], self.world_size
        )
        self.tried += (
            Setting(
                differences(changes, self.config),
                config,
                estimate,
                bubble_of(config, self.world_size),
            )
            for (changes, config), estimate in zip(new.values(), estimates, strict=True)
            if estimate is not None
        )

    def with_early_weight_gradients(self, setting: Setting) -> Setting:
        """The same setting of a pipeline with weight gradients as early as they can be. Estimates,
        which are of the first rank, do not show what this saves: it is tried where a plan does."""
        changes = {**setting.changes, "parallel.schedule_memory": "least"}
        config = changed(self.config, changes, self.world_size)
        return (
            setting
            if config is None
            else replace(
                setting, changes=changes, config=config, bubble=bubble_of(config, self.world_size)
            )
        )

    def world_that_fits(self, lightest: Setting) -> int | None:
        kept = {
            name: value
            for name, value in lightest.changes.items()
            if not name.startswith("parallel.")
        }
        larger = self
        while larger.world_size < LARGEST_WORLD * self.world_size:
            larger = replace(self, world_size=2 * larger.world_size, tried=[])
            if not are_on_machines(lightest.config.parallel.ep, larger.world_size, self.machine):
                continue
            larger.try_all(f"{larger.world_size} ranks", [mesh_of(lightest.config) | kept])
            if larger.fitting():
                return larger.world_size
        return None


def are_on_machines(ep: int, world_size: int, machine: int) -> bool:
    """Return whether every expert group lies on one machine: its `ep` ranks are neighbors
    (`lather.parallel.mesh`), and machines have `machine` ranks each, in their order, the last one
    perhaps fewer."""
    firsts = range(0, world_size, ep)
    return all(first // machine == (first + ep - 1) // machine for first in firsts)


def mesh_of(config: Config) -> Changes:
    return {"parallel.pp": config.parallel.pp, "parallel.ep": config.parallel.ep}


def changed(config: Config, changes: Changes, world_size: int | None = None) -> Config | None:
    """Return the configuration with other values, not resolved; None if they contradict each other,
    or if `world_size` ranks cannot divide the batch. Another rule comes with its own default
    options and rates."""
    try:
        if (rule := changes.get("optim.name")) is not None:
            shared = ("schedule", "warmup_steps", "decay_fraction", "min_lr_ratio")
            config = replace(
                config,
                optim=optim_config(rule, **{name: getattr(config.optim, name) for name in shared}),
            )
        sections: dict[str, Changes] = {}
        for name, value in changes.items():
            if name != "optim.name":
                section, _, key = name.partition(".")
                sections.setdefault(section, {})[key] = value
        config = replace(
            config,
            **{name: replace(getattr(config, name), **values) for name, values in sections.items()},
        )
        if world_size is not None:
            config.num_micro_batches(config.parallel.data_ranks(world_size))
    except ValueError:
        return None
    return config


def differences(changes: Changes, config: Config) -> Changes:
    """Return the changes to values that the configuration does not have."""
    sections = {name: name.partition(".") for name in changes}
    own = {
        name: getattr(getattr(config, section), key, None)
        for name, (section, _, key) in sections.items()
    }
    return {name: value for name, value in changes.items() if value != own[name]}


def as_options(changes: Changes) -> str:
    """Write changes as command-line options."""
    parts = [
        f"--{name.replace('_', '-')} {' '.join(value) if isinstance(value, tuple) else value}"
        for name, value in changes.items()
    ]
    return " ".join(parts)
