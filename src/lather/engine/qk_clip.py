"""QK-clip of a model on a mesh: the largest logits of this rank's passes, and the clipping of its
rows of the weights (`lather.models.attention_logits` has the mathematics).

All ranks clip by the maxima over all ranks, each its own rows, so that the weights are the same on
any mesh. The optimizer's state is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lather.config.config import Config
from lather.device import to_device
from lather.engine.trained_parameters import outline
from lather.errors import require
from lather.models.attention_logits import LargestLogits, measured_layers
from lather.parallel.local_parameters import LocalParameters
from lather.pipeline.model_part import ModelPart
from lather.shapes import Float


def largest_logits(
    part: ModelPart, collected: Mapping[str, LargestLogits], device: torch.device
) -> Float[Tensor, "l h"]:
    """Return the largest logits that were collected in this rank's layers, in fp64; -inf for the
    layers of other ranks."""
    shape = len(part.measured), max(part.measured.values(), default=0)
    logits_LH = torch.full(shape, -torch.inf, dtype=torch.float64, device=device)
    for row_H, name in zip(logits_LH, part.measured, strict=True):
        if name in collected:
            of_head_H = collected[name].of_head_H
            assert of_head_H is not None
            row_H[: len(of_head_H)] = of_head_H
    return logits_LH


@torch.no_grad()
def clip_logits_(
    part: ModelPart, parameters: LocalParameters, logits_LH: Float[Tensor, "l h"], threshold: float
) -> None:
    """Scale projections of queries and keys in place, after a step in which the largest logits of
    all ranks were these, on the CPU.

    A layer of which such a projection is frozen is left as it is.
    """
    entries = {entry.info.name: entry for entry in parameters}
    layers = measured_layers(part)
    for name, logits_H in zip(part.measured, logits_LH, strict=True):
        is_large_H = logits_H > threshold
        if name not in layers or not is_large_H.any():
            continue
        gamma_H = torch.where(is_large_H, threshold / logits_H, 1.0)
        factors = layers[name].clip_factors(gamma_H[: layers[name].num_heads])
        scaled = [
            (entries[key], factor_X)
            for projection, factor_X in factors.items()
            for key in (f"{name}.{projection}.weight", f"{name}.{projection}.bias")
            if key in entries
        ]
        if all(entry.source.requires_grad for entry, _ in scaled):
            for entry, factor_X in scaled:
                rows_x, p = (
                    factor_X.narrow(0, entry.info.offset, entry.info.length),
                    entry.parameter,
                )
                p.mul_(to_device(rows_x.to(p.dtype), p.device).view(-1, *[1] * (p.dim() - 1)))


def check_qk_clip(config: Config) -> None:
    """Raise ConfigError for `train.qk_clip` with a model whose logits it would not change."""
    layers = measured_layers(outline(config)).values() if config.train.qk_clip else ()
    require(
        not layers or any(layer.clip_factors(torch.ones(layer.num_heads)) for layer in layers),
        "train.qk_clip",
        config.train.qk_clip,
        f"0 for {config.model.model_type}, which normalizes queries and keys: that bounds their "
        "logits whatever the projections are",
    )
