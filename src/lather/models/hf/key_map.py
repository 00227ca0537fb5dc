"""Maps Lather's weights, which are parameters and buffers, to the published tensors.

Most names differ only by the prefix `model.`. The families differ in the router and in the routed
experts, which Lather stacks as (E, 2F, D) and (E, D, F):

                    experts                                                   router
    deepseek_v2     separate gate, up (F, D) and down (D, F) per expert       mlp.gate.weight
    qwen3_moe       the same                                                  the same
    qwen3_5_moe     stacked as Lather's                                       the same
    gpt_oss         stacked and transposed, (E, D, 2F) and (E, F, D),         mlp.router.weight,
                    .bias
                    or MXFP4 (E, 2F, D/32, 16) and (E, D, F/32, 16)

`Family` has the names that a family has instead. A weight may be published in several formats: all
can be read, and the first is written. The entries of a weight are in the order of its memory, so
that it can be streamed in pieces.

Letters: D hidden size, E experts, F expert intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lather.models.entry_names import entry_name, is_stack
from lather.models.family import Family
from lather.models.hf.mxfp4 import BLOCK
from lather.safetensors_file import Index

Shape = tuple[int, ...]

EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
HARMLESS = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
"""Tensors that folders may hold in addition to the weights, and that are computed from the
configuration."""
HEAD = "lm_head.weight"
MTP_NAMES = {".mtp.norm.": ".shared_head.norm.", ".mtp.": "."}
"""Parts of the names of multi-token prediction, and the published text in their place."""
MTP_COPIES = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": HEAD}
"""The copies of embedding and head that each published block of multi-token prediction has, by
their names in the block; they are written, and not read or compared."""


@dataclass(frozen=True)
class MappedTensor:
    """A published tensor, and the part of a weight that it holds."""

    published: str
    """Name in the folder; with `is_packed` there are two tensors, `<name>_blocks` and
    `<name>_scales`."""
    parameter: str
    """Lather's name of the parameter or buffer."""
    shape: Shape
    """Shape of the part."""
    index: Index = ()
    """The part is `parameter[index]`; the whole parameter if empty."""
    is_transposed: bool = False
    """True if each expert's matrix is published transposed."""
    is_packed: bool = False
    """True if the tensor is published in MXFP4, not transposed."""
    unsqueezed_dim: int | None = None
    """The dim of size 1 that only the published tensor has; None: there is none."""

    @property
    def entries(self) -> list[str]:
        """Names of the entries that hold the part in a file of Lather's: an entry per expert of a
        stack."""
        if not is_stack(self.parameter):
            return [self.parameter]
        experts: Iterable[Any] = self.index[:1] or range(self.shape[0])
        return [entry_name(self.parameter, expert) for expert in experts]

    def published_shapes(self) -> dict[str, Shape]:
        """Return names and shapes of the published tensors."""
        shape = self.shape
        if self.is_packed:
            blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
            return {
                f"{self.published}_blocks": (*blocks, BLOCK // 2),
                f"{self.published}_scales": blocks,
            }
        if self.unsqueezed_dim is not None:
            shape = (*shape[: self.unsqueezed_dim], 1, *shape[self.unsqueezed_dim :])
        return {
            self.published: (*shape[:-2], shape[-1], shape[-2]) if self.is_transposed else shape
        }


def published_formats(family: Family, name: str, shape: Shape) -> list[list[MappedTensor]]:
    """Return the formats in which a family publishes a weight, each a list of entries in the order
    of memory; the first is written. The last has the names that transformers has in memory, which
    it writes with `save_original_format=False`."""
    plain = name if name.startswith("lm_head.") else f"{family.prefix}{name}"
    published = replaced(plain, {**family.renamed, **MTP_NAMES})
    plain = replaced(plain, family.in_memory)
    dim = next((dim for end, dim in family.unsqueezed.items() if name.endswith(end)), None)
    whole = MappedTensor(published, name, shape, unsqueezed_dim=dim)
    in_memory = [] if plain == published else [[replace(whole, published=plain)]]
    if EXPERTS.fullmatch(name) is None:
        return [[whole], *in_memory]
    if family.transposes_experts:
        return [[replace(whole, is_transposed=True)], [replace(whole, is_packed=True)]]
    formats = [_separate_experts(whole, *family.expert_names), [whole]]
    return [*(formats[::-1] if family.stacks_experts else formats), *in_memory]


def replaced(name: str, parts: Mapping[str, str]) -> str:
    """Return a name with parts of it replaced, one after another."""
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def _separate_experts(stack: MappedTensor, gate: str, up: str, down: str) -> list[MappedTensor]:
    """Return the entries of a stack's experts, whose matrices have these names. (The stack itself
    is the format that transformers has in memory, which is also Lather's.)"""
    num_experts, rows, *columns = stack.shape
    experts, _, part = stack.published.rpartition(".")
    if part != "gate_up_proj":
        return [
            MappedTensor(f"{experts}.{e}.{down}.weight", stack.parameter, stack.shape[1:], (e,))
            for e in range(num_experts)
        ]
    half = rows // 2
    halves = {gate: slice(0, half), up: slice(half, 2 * half)}
    return [
        MappedTensor(f"{experts}.{e}.{key}.weight", stack.parameter, (half, *columns), (e, at))
        for e in range(num_experts)
        for key, at in halves.items()
    ]
