"""Maps Lather's parameters to the published tensors.

Most names differ only by the prefix `model.`. The families differ in the router and in the routed experts, which Lather stacks as
(E, 2F, D) and (E, D, F):

                    experts                                                   router
    deepseek_v2     separate gate, up (F, D) and down (D, F) per expert       mlp.gate.weight
    qwen3_moe       the same                                                  the same
    gpt_oss         stacked and transposed, (E, D, 2F) and (E, F, D),         mlp.router.weight, .bias
                    or MXFP4 (E, 2F, D/32, 16) and (E, D, F/32, 16)

A parameter may be published in several formats: all can be read, and the first is written. The entries of a parameter are in the order of
its memory, so that it can be streamed in pieces.

Letters: D hidden size, E experts, F expert intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lather.models.hf.mxfp4 import BLOCK
from lather.models.hf.safetensors_folder import Index

Shape = tuple[int, ...]

EXPERTS = re.compile(r"(?P<mlp>.*\.mlp)\.experts\.(?P<part>gate_up_proj|down_proj|gate_up_bias|down_bias)")
STACKED_FAMILIES = ("gpt_oss",)
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tensors that some folders hold in addition to the weights, and that are computed from the configuration."""


@dataclass(frozen=True)
class MappedTensor:
    """A published tensor, and the part of a parameter that it holds."""

    published: str
    """Name in the folder; with `is_packed` there are two tensors, `<name>_blocks` and `<name>_scales`."""
    parameter: str
    """Lather's name of the parameter."""
    index: Index = ()
    """The part is `parameter[index]`; the whole parameter if empty."""
    is_transposed: bool = False
    """True if each expert's matrix is published transposed."""
    is_packed: bool = False
    """True if the tensor is published in MXFP4, not transposed."""

    def published_shapes(self, shape: Shape) -> dict[str, Shape]:
        """Return names and shapes of the published tensors for a part of this shape."""
        if self.is_packed:
            *rows, columns = shape
            blocks = (*rows, -(-columns // BLOCK))
            return {f"{self.published}_blocks": (*blocks, BLOCK // 2), f"{self.published}_scales": blocks}
        return {self.published: (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape}

    def part_shape(self, shape: Shape) -> Shape:
        """Return the shape of `parameter[index]` for a parameter of this shape. Slices have both bounds."""
        part = [at.stop - at.start for at in self.index if isinstance(at, slice)]
        return (*part, *shape[len(self.index) :])


def published_ways(model_type: str, name: str, shape: Shape) -> list[list[MappedTensor]]:
    """Return the formats in which this family publishes the parameter, each a list of entries in the order of memory; the first is
    written."""
    is_stacked = model_type in STACKED_FAMILIES
    if match := EXPERTS.fullmatch(name):
        experts = f"model.{match['mlp']}.experts"
        if is_stacked:
            return _stacked_experts(experts, name, match["part"])
        return _separate_experts(experts, name, match["part"], shape)
    published = name.replace(".mlp.gate.", ".mlp.router.") if is_stacked else name
    return [[MappedTensor(published if published.startswith("lm_head.") else f"model.{published}", name)]]


def _separate_experts(experts: str, name: str, part: str, shape: Shape) -> list[list[MappedTensor]]:
    """Return the published format, and the stacked format that transformers has in memory, which is also Lather's."""
    if part == "gate_up_proj":
        half = shape[1] // 2
        halves = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
        separate = [MappedTensor(f"{experts}.{e}.{key}.weight", name, (e, at)) for e in range(shape[0]) for key, at in halves.items()]
    else:
        separate = [MappedTensor(f"{experts}.{e}.{part}.weight", name, (e,)) for e in range(shape[0])]
    return [separate, [MappedTensor(f"{experts}.{part}", name)]]


def _stacked_experts(experts: str, name: str, part: str) -> list[list[MappedTensor]]:
    if part.endswith("_bias"):
        return [[MappedTensor(f"{experts}.{part.removesuffix('_bias')}_proj_bias", name)]]
    published = f"{experts}.{part}"
    return [[MappedTensor(published, name, is_transposed=True)], [MappedTensor(published, name, is_packed=True)]]


def written_entries(model_type: str, shapes: Mapping[str, Shape]) -> list[MappedTensor]:
    """Return the tensors to write for a model with these parameters, in order."""
    return [entry for name, shape in shapes.items() for entry in published_ways(model_type, name, shape)[0]]
