"""Measures the bytes that each layer adds to a pipeline rank, phase by phase, and finds the
partition whose largest rank is smallest.

A rank is dry-run with one layer in each of its stages, and again for each kind of layer and each
stage, with a layer of this kind added there. The bytes that a layer adds are assumed not to depend
on the other layers. This is nearly so: the optimizer batches matrices of equal shape, so its
temporaries grow by less. The plan with the resulting partition runs all layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lather.config.config import Config
from lather.config.ranks import check_parallel
from lather.errors import ConfigError
from lather.memory.dry_rank import BUILDING
from lather.memory.dry_run import RankRun, dry_run
from lather.memory.workers import Assumed, worker_processes
from lather.models.families import build_model
from lather.pipeline.partition import Partition, RankPeaks, smallest_peak

Phases = Mapping[str, int]
"""Bytes at the peak of each phase."""


def memory_partition(config: Config, world_size: int, assumed: Assumed) -> Partition | None:
    """Return the partition for `parallel.partition = "memory"`; None if layers are assigned
    uniformly, or if no other partition is possible.

    Raises ConfigError if the ranks cannot be divided as the configuration says.
    """
    check_parallel(config, world_size)
    pp = config.parallel.pp
    if config.parallel.partition != "memory" or pp == 1 or config.model.num_hidden_layers == 2 * pp:
        return None
    blocks = build_model(config.model, None, torch.device("meta")).layers
    of_main_model = [block for block in blocks if block.mtp is None]
    kinds = sorted(block_kinds(of_main_model), key=len, reverse=True)
    samples = [sample for position in range(pp) for sample in _samples(kinds, position, pp)]
    run = partial(_phase_peaks, config, world_size, assumed)
    with worker_processes() as pool:
        phases = dict(zip(samples, pool.map(run, samples), strict=True))
    return smallest_peak(
        [
            _rank_peaks(
                kinds, {sample: phases[sample] for sample in samples if sample.position == at}
            )
            for at in range(pp)
        ],
        config.model.num_nextn_predict_layers,
    )


@dataclass(frozen=True)
class _Sample:
    """A dry run with few layers."""

    position: int
    """Position of the pipeline rank, from 0."""
    layers: tuple[tuple[int, ...], ...]
    """Layers of every stage; stages of other ranks have none."""
    added: tuple[int, int] | None = None
    """Kind of the layer that this run has in addition to the base run, and its stage (0 or 1 of the
    rank); None: the base run."""


def _samples(kinds: Sequence[Sequence[int]], position: int, pp: int) -> list[_Sample]:
    """Return the dry runs of a position, with layers from anywhere in the model; `kinds` has the
    layers of each kind, the most common kind first. Raises ConfigError unless three layers are of
    the same kind."""
    if len(kinds[0]) < 3:
        raise ConfigError(
            "parallel.partition = 'memory' is not valid: it needs three layers of one kind to "
            "measure, and "
            f"{sum(map(len, kinds))} layers of {len(kinds)} kinds have at most {len(kinds[0])}: "
            "set parallel.partition = 'uniform'"
        )

    def layers(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            {position: first, 2 * pp - 1 - position: second}.get(stage, ())
            for stage in range(2 * pp)
        )

    a, b, third = kinds[0][:3]
    samples = [_Sample(position, layers((a,), (b,)))]
    for kind, of_kind in enumerate(kinds):
        more = third if kind == 0 else of_kind[0]
        samples.append(_Sample(position, layers((a, more), (b,)), (kind, 0)))
        samples.append(_Sample(position, layers((a,), (b, more)), (kind, 1)))
    return samples


def _phase_peaks(config: Config, world_size: int, assumed: Assumed, sample: _Sample) -> Phases:
    """Dry-run a sample and return its peaks."""
    rank = sample.position * (world_size // config.parallel.pp)
    return phase_peaks(dry_run(config, world_size, assumed, rank, layers=sample.layers))


def phase_peaks(run: RankRun) -> Phases:
    """Return the peak of each phase of each step, with the optimizer state of the rank at this
    position that owns the most."""
    peaks: defaultdict[str, int] = defaultdict(int)
    for step, timeline in run.steps.items():
        total, missing = timeline.total, 0 if step == BUILDING else run.missing_state
        for mark, start, stop in timeline.spans():
            name = f"{step}: {mark}"
            peaks[name] = max(peaks[name], int(total[start : max(stop, start + 1)].max()) + missing)
    return dict(peaks)


def _rank_peaks(kinds: Sequence[Sequence[int]], samples: Mapping[_Sample, Phases]) -> RankPeaks:
    """Combine the samples of a rank, without phases that can never be its largest."""
    shared = set.intersection(*(set(phases) for phases in samples.values()))
    names = sorted(shared)
    bytes_of = {
        sample.added: np.array([phases[name] for name in names], np.float64)
        for sample, phases in samples.items()
    }
    least = bytes_of[None]
    adds = {added: x - least for added, x in bytes_of.items() if added is not None}
    base = least - adds[0, 0] - adds[0, 1]
    columns = np.stack([base, *adds.values()])
    largest = [i for i in range(len(names)) if not _is_dominated(columns, i)]
    kind_of = {layer: kind for kind, layers in enumerate(kinds) for layer in layers}
    first, second = (
        np.stack([adds[kind_of[layer], stage] for layer in range(len(kind_of))], axis=1)
        for stage in (0, 1)
    )
    return RankPeaks(base[largest], first[largest], second[largest])


def _is_dominated(columns: np.ndarray[tuple[int, int], np.dtype[np.float64]], i: int) -> bool:
    """Return whether another phase has at least as many bytes for any layers; the first of equal
    phases is not dominated by them."""
    least = (columns >= columns[:, i : i + 1]).all(0)
    equal = (columns == columns[:, i : i + 1]).all(0)
    return bool((least & ~equal).any() or equal[:i].any())


def block_kinds(layers: Iterable[nn.Module]) -> list[list[int]]:
    """Return the indices of the blocks, grouped by kind, in order. Blocks of a kind have the same
    modules, settings and shapes of tensors."""
    kinds: dict[str, list[int]] = {}
    for index, block in enumerate(layers):
        kinds.setdefault(repr(_signature(block)), []).append(index)
    return list(kinds.values())


def _signature(value: Any) -> Any:
    """Return an object's contents without addresses in memory and values of tensors."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        return {str(key): _signature(item) for key, item in value.items() if key != "training"}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_signature(item) for item in value]
    if isinstance(value, nn.Module) or repr(value) == object.__repr__(value):
        return type(value).__qualname__, _signature(vars(value))
    return repr(value)
