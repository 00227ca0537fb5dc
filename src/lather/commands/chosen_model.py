"""The options by which `lather eval`, `generate` and `score` choose the weights of a run, and say
how these are held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lather.checkpoint.chosen_weights import Weights
from lather.train.trained_model import Layerwise


@dataclass(frozen=True, kw_only=True)
class ChosenModel:
    """Weights of a run, their data type and place."""

    step: int = -1
    """Step of the checkpoint; negative: the newest."""
    weights: Weights = "raw"
    """raw: the weights after that step; average: those that the run has averaged
    (train.average_timescale); last:N: the mean of the last N checkpoints."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Data type of weights, activations and products; left out: as the run was trained."""
    layerwise: Layerwise = "auto"
    """Read the weights of a block from disk when it runs, so that the model may be larger than the
    device's memory: always, never, or, with auto, if the weights do not fit."""
