"""QK-clip of a model on a mesh: the largest logits of this rank's passes, and the clipping of its
rows of the weights (`lather.models.attention_logits` has the mathematics).

All ranks clip by the maxima over all ranks, each its own rows, so that the weights are the same on
any mesh. The optimizer's state is not touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from lather.config.config import Config
from lather.device import to_device
from lather.engine.trained_parameters import outline
from lather.errors import require
from lather.models.attention_logits import measured_layers
from lather.optim.batched.remainders import exact_weight, set_weight
from lather.parallel.local_parameters import LocalParameters
from lather.pipeline.model_part import ModelPart
from lather.shapes import Float


@contextmanager
def measuring(part: ModelPart, logits_AH: Float[Tensor, "a h"]) -> Iterator[None]:
    """Inside this context, the largest logits of the layers `part.measured` are collected in the
    rows of a tensor; nothing is measured if it has none."""
    layers = measured_layers(part) if len(logits_AH) else {}
    for name, layer in layers.items():
        layer.largest_H = logits_AH[list(part.measured).index(name), : layer.num_heads]
    try:
        yield
    finally:
        for layer in layers.values():
            layer.largest_H = None


@torch.no_grad()
def clip_logits_(
    part: ModelPart,
    parameters: LocalParameters,
    states: Mapping[Tensor, Mapping[str, Tensor]],
    logits_AH: Float[Tensor, "a h"],
    threshold: float,
) -> None:
    """Scale projections of queries and keys in place, after a step in which the largest logits of
    the layers `part.measured` on all ranks were these, on the CPU. `states`: the optimizer's, in
    which bf16 weights may have remainders.

    A layer of which such a projection is frozen is left as it is.
    """
    entries = {entry.info.name: entry for entry in parameters}
    layers = measured_layers(part)
    for name, logits_H in zip(part.measured, logits_AH, strict=True):
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
                p, first, state = entry.parameter, entry.info.offset, states[entry.source]
                x = exact_weight(p, state)
                dtype = torch.promote_types(x.dtype, torch.float32)
                rows_x = factor_X[first : first + entry.info.length].to(dtype)
                factor = to_device(rows_x, p.device).view(-1, *[1] * (p.dim() - 1))
                set_weight(p, x * factor, state)


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
