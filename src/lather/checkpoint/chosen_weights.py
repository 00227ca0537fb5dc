"""The weights that `--weights` chooses of a run: those of a checkpoint (raw), the averages that the
run has kept (average), or the mean of its last N checkpoints (last:N)."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from lather.checkpoint.folder import list_checkpoints, step_of
from lather.checkpoint.held import held_checkpoint
from lather.checkpoint.reader import open_checkpoint
from lather.errors import CheckpointError
from lather.optim.options import Range
from lather.safetensors_file import Index, TensorHeader, TensorSource

CHOICE = re.compile(r"raw|average|last:([2-9]|[1-9][0-9]+)")
Weights = Annotated[str, Range("raw, average, or last:N with N at least 2", CHOICE.fullmatch)]


@contextlib.contextmanager
def chosen_weights(run: Path, checkpoint: Path, weights: str) -> Iterator[TensorSource]:
    """Yield the parameters and buffers that `weights` chooses of a checkpoint, which the caller
    holds, and of those before it, which are held until the block ends.

    Raises CheckpointError if there are no such weights, or if a checkpoint is damaged.
    """
    newest = open_checkpoint(checkpoint).weights(averaged=weights == "average")
    if not weights.startswith("last:"):
        yield newest
        return
    number, step = int(weights.removeprefix("last:")), step_of(checkpoint)
    paths = list_checkpoints(run / "checkpoints")
    earlier = [path for path in paths if step_of(path) < step][1 - number :]
    if len(earlier) < number - 1:
        raise CheckpointError(
            f"--weights {weights}: {run} has only {len(earlier) + 1} checkpoints up to step {step}:"
            " give a smaller number, or train with a larger checkpoint.keep_last"
        )
    with contextlib.ExitStack() as held:
        sources: list[TensorSource] = [newest]
        for path in earlier:
            folder = held.enter_context(held_checkpoint(run, functools.partial(Path, path)))
            sources.append(open_checkpoint(folder).weights())
        yield MeanTensors(sources)


@dataclass(frozen=True)
class MeanTensors:
    """The means of the tensors of several checkpoints, at least in fp32, read on demand; a mean
    needs memory for another tensor."""

    sources: Sequence[TensorSource]

    @property
    def tensors(self) -> Mapping[str, TensorHeader]:
        return {
            name: replace(header, dtype="F32" if header.dtype == "BF16" else header.dtype)
            for name, header in self.sources[0].tensors.items()
        }

    def read(self, name: str, index: Index = ()) -> Tensor:
        first, *others = self.sources
        total = first.read(name, index)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for source in others:
            total += source.read(name, index)
        return total.div_(len(self.sources))
