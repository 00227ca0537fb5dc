"""Causal self-attention over packed documents and sliding windows: grouped-query attention, with or
without sinks or a gate of its output.

Sources: grouped queries (Ainslie et al., arXiv:2305.13245); RMSNorm of queries and keys (Henry et
al., arXiv:2010.04245, in the form of Qwen3, by head, or of OLMoE, arXiv:2409.02060, over all
heads); sinks (GPT-OSS, arXiv:2508.10925); the gate (Qiu et al., arXiv:2505.06708, in the form of
Qwen3-Next).

Letters: B sequences, S positions, D hidden size, H heads, G key-value heads, N width of a head's
query, key and value, T keys: S, or all slots of a cache, or the tokens of all context ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.kernels.inputs_only import saving_inputs_only
from lather.models.attention_kernels import Recipe, attend
from lather.models.gathering_attention import GatheringAttention, Projected, side_by_side
from lather.models.layers import Linear, NormedRows, RMSNorm, project
from lather.models.rotary import Rotary, Table
from lather.models.saving.recomputed import NO_RECOMPUTATION, Recomputation
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float

Heads = tuple[Float[Tensor, "b s h n"], Float[Tensor, "b t g n"], Float[Tensor, "b t g n"]]
"""Queries, keys and values."""


@dataclass(frozen=True)
class HeadSizes:
    """Numbers and width of the heads of grouped-query attention."""

    hidden_size: int
    num_heads: int
    """Number of query heads; a multiple of `num_kv_heads`."""
    num_kv_heads: int
    head_dim: int
    """Width of a head's query, key and value."""


@dataclass(frozen=True)
class QueryKeyNorm:
    """RMSNorm of queries and keys before the rotary embedding."""

    eps: float
    over_all_heads: bool = False
    """True: the heads of a projection are normalized together, with a weight of their whole width;
    False: each by itself, with one weight for all."""
    zero_centered: bool = False
    """See `RMSNorm`."""

    def build(self, sizes: HeadSizes, num_heads: int) -> RMSNorm:
        """Return the norm of a projection with this number of heads."""
        width = sizes.head_dim * (num_heads if self.over_all_heads else 1)
        return RMSNorm(width, self.eps, zero_centered=self.zero_centered)


class GroupedQueryAttention(GatheringAttention):
    """Causal attention in which several query heads share a key-value head.

    The rotary embedding covers the first `rotary.size` columns of each head. Optional: RMSNorm of
    queries and keys, biases of the projections of queries, keys and values and of the output's, a
    sliding window, sinks. With `gate`, `q_proj` gives for each head a query and then a gate of the
    same width, whose sigmoid multiplies what the head attended to."""

    parts_to_compile = ("heads", "queries", "keys")

    def __init__(
        self,
        sizes: HeadSizes,
        rotary: Rotary,
        *,
        qk_norm: QueryKeyNorm | None = None,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        sinks: bool = False,
        gate: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.rotary, self.window, self.gate = sizes.head_dim, rotary, window, gate
        self.num_heads, self.scale = sizes.num_heads, sizes.head_dim**-0.5
        num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        query_width, width = num_heads * self.head_dim, num_kv_heads * self.head_dim
        self.q_proj = Linear(sizes.hidden_size, query_width * (2 if gate else 1), bias=bias)
        self.k_proj = Linear(sizes.hidden_size, width, bias=bias)
        self.v_proj = Linear(sizes.hidden_size, width, bias=bias)
        self.o_proj = Linear(query_width, sizes.hidden_size, bias=output_bias)
        self.over_all_heads = qk_norm is not None and qk_norm.over_all_heads
        self.q_norm = nn.Identity() if qk_norm is None else qk_norm.build(sizes, num_heads)
        self.k_norm = nn.Identity() if qk_norm is None else qk_norm.build(sizes, num_kv_heads)
        self.sinks = nn.Parameter(torch.empty(num_heads)) if sinks else None

    def forward(
        self,
        x_BSD: NormedRows,
        layout: SequenceLayout,
        recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> Float[Tensor, "b s d"]:
        if layout.context is not None:
            return self.gather_and_attend(x_BSD, layout, recomputation)
        tables = layout.rotary_tables(self.rotary, x_BSD.dtype)
        q_BSx, k_BSx, v_BSx = project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        projected = (q_BSx, k_BSx, v_BSx, *tables)
        recipe = None
        if self._has_norms:  # they save the outputs of the projections anyway
            recipe = Recipe(
                recomputation, (0, 1), lambda *sources: self.heads(*sources)[:2], projected
            )
        q_BSHN, k_BTGN, v_BTGN = self.heads(*projected)
        if layout.cache is not None:
            k_BTGN, v_BTGN = layout.cache.extend(self, k_BTGN, v_BTGN)
        return self._attend(q_BSx, (q_BSHN, k_BTGN, v_BTGN), layout, recipe, recomputation)

    @property
    def _has_norms(self) -> bool:
        return isinstance(self.q_norm, RMSNorm)

    def _attend(
        self,
        q_BSx: Tensor,
        heads: tuple[Tensor, Tensor, Tensor],
        layout: SequenceLayout,
        recipe: Recipe | None,
        recomputation: Recomputation,
    ) -> Float[Tensor, "b s d"]:
        """Attend, apply the gates, which `q_BSx` has behind the queries, and project."""
        self.measure(*heads, layout)
        attended_BSHN = attend(
            *heads, layout, window=self.window, sinks_H=self.sinks, recipe=recipe
        )
        if not self.gate:
            return self.o_proj(side_by_side(attended_BSHN, recomputation))
        gate, sources = partial(saving_inputs_only, self._gated), (attended_BSHN, q_BSx)
        gated = gate(*sources)
        recomputation.add(gated, gate, *sources)
        return self.o_proj(*gated)

    def project(
        self, x_BSD: NormedRows, layout: SequenceLayout, recomputation: Recomputation
    ) -> Projected:
        """Return the outputs of the projection of queries, or without norms and gates, which keep
        these, the queries; and the keys and values that ranks exchange."""
        tables = layout.rotary_tables(self.rotary, x_BSD.dtype)
        q_BSx, k_BSx, v_BSx = project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        dtype = v_BSx.dtype

        def keys(*sources: Tensor) -> tuple[Tensor]:
            return (self.keys(*sources).to(dtype),)

        k_BSGN = keys(k_BSx, *tables)
        if self._has_norms:
            recomputation.add(k_BSGN, keys, k_BSx, *tables)
        own = q_BSx if self._keeps_projection else self.queries(q_BSx, *tables).to(dtype)
        return Projected((own,), (*k_BSGN, v_BSx.unflatten(-1, (-1, self.head_dim))))

    @property
    def _keeps_projection(self) -> bool:
        """Whether autograd keeps the output of the projection of queries anyway."""
        return self._has_norms or self.gate

    def attend_to_all(
        self, projected: Projected, layout: SequenceLayout, recomputation: Recomputation
    ) -> Float[Tensor, "b s d"]:
        """Attend to the keys and values of all ranks, which are exchanged in the values' dtype."""
        (q_BSx,), (k_BTGN, v_BTGN) = projected.own, projected.shared
        if not self._keeps_projection:
            recipe = Recipe(recomputation, (1, 2), lambda *shared: shared, projected.shared)
            return self._attend(q_BSx, (q_BSx, k_BTGN, v_BTGN), layout, recipe, recomputation)
        tables = layout.rotary_tables(self.rotary, q_BSx.dtype)

        def heads(q_BSx: Tensor, k_BTGN: Tensor, v_BTGN: Tensor, *tables: Tensor) -> Heads:
            return self.queries(q_BSx, *tables), k_BTGN, v_BTGN

        sources = (q_BSx, k_BTGN, v_BTGN, *tables)
        recipe = Recipe(recomputation, (0, 1, 2), heads, sources)
        return self._attend(q_BSx, heads(*sources), layout, recipe, recomputation)

    @property
    def head_rows(self) -> dict[str, int]:
        """Rows of a head in the projections that have heads, by name (`optim.per_head`); a head's
        gate is a matrix like its query. The output projection adds up all heads."""
        return dict.fromkeys(("q_proj", "k_proj", "v_proj"), self.head_dim)

    def heads(
        self,
        q_BSx: Float[Tensor, "b s x"],
        k_BSx: Float[Tensor, "b s y"],
        v_BSx: Float[Tensor, "b s y"],
        *tables: Table,
    ) -> Heads:
        """Return queries, keys and values of each head, normalized and rotated, from the outputs of
        the projections; `tables` are cosines and sines."""
        v_BSGN = v_BSx.unflatten(-1, (-1, self.head_dim))
        return self.queries(q_BSx, *tables), self.keys(k_BSx, *tables), v_BSGN

    def queries(self, q_BSx: Float[Tensor, "b s x"], *tables: Table) -> Float[Tensor, "b s h n"]:
        """Return the queries of each head, normalized and rotated."""
        q_BSHN = q_BSx.unflatten(-1, (-1, self.head_dim * (2 if self.gate else 1)))
        q_BSHN = self._normed(self.q_norm, q_BSHN[..., : self.head_dim])
        return self.rotary.rotate(q_BSHN, *tables)

    def keys(self, k_BSx: Float[Tensor, "b s y"], *tables: Table) -> Float[Tensor, "b s g n"]:
        """Return the keys of each head, normalized and rotated."""
        k_BSGN = self._normed(self.k_norm, k_BSx.unflatten(-1, (-1, self.head_dim)))
        return self.rotary.rotate(k_BSGN, *tables)

    def _gated(self, attended_BSHN: Tensor, q_BSx: Tensor) -> tuple[Tensor]:
        gate_BSHN = q_BSx.unflatten(-1, (-1, 2 * self.head_dim))[..., self.head_dim :]
        return ((attended_BSHN * gate_BSHN.sigmoid()).flatten(2),)

    def _normed(self, norm: nn.Module, x_BSHN: Tensor) -> Tensor:
        if self.over_all_heads:
            return norm(x_BSHN.flatten(2)).view_as(x_BSHN)
        return norm(x_BSHN)

    def clip_factors(self, gamma_H: Float[Tensor, " h"]) -> dict[str, Float[Tensor, " x"]]:
        if isinstance(self.q_norm, RMSNorm):
            return {}
        gamma_GR = gamma_H.unflatten(0, (self.k_proj.out_features // self.head_dim, -1))
        key_G1 = gamma_GR.amax(1, keepdim=True).sqrt()
        tiny = torch.finfo(key_G1.dtype).tiny  # gamma is 0 for an infinite logit
        query_HN = (gamma_GR / key_G1.clamp(min=tiny)).view(-1, 1).expand(-1, self.head_dim)
        gate_width = self.q_proj.out_features // self.num_heads - self.head_dim
        return {
            "q_proj": F.pad(query_HN, (0, gate_width), value=1.0).flatten(),
            "k_proj": key_G1.expand(-1, self.head_dim).flatten(),
        }
