"""Causal self-attention layers over packed documents and sliding windows: multi-head latent
attention, and grouped-query attention with or without sinks or a gate of its output.

Sources: multi-head latent attention, MLA (DeepSeek-V2, arXiv:2405.04434, section 2.1), in its
training form, which expands keys and values from the latent and then attends as usual; grouped
queries (Ainslie et al., arXiv:2305.13245); RMSNorm of queries and keys (Henry et al.,
arXiv:2010.04245, in the form of Qwen3, by head, or of OLMoE, arXiv:2409.02060, over all heads);
sinks (GPT-OSS, arXiv:2508.10925); the gate (Qiu et al., arXiv:2505.06708, in the form of
Qwen3-Next).

Letters: B sequences, S positions, D hidden size, H heads, G key-value heads, N width of a head's
query and key (MLA: non-rotary width), R rotary width, U width of a head's value, L rank of the
key-value latent, P = R / 2 rotary pairs, T keys: S, or all slots of a
cache, or the tokens of all context ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.kernels.inputs_only import saving_inputs_only
from lather.models.attention_kernels import Recipe, attend
from lather.models.attention_logits import MeasuredAttention
from lather.models.context import Context
from lather.models.key_value_cache import KeyValueCache
from lather.models.layers import Linear, RMSNorm, project
from lather.models.lora import merged
from lather.models.rotary import Rotary, YarnConfig
from lather.models.saving.recomputed import NO_RECOMPUTATION, Recomputation
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float

LATENT_EPS = 1e-6
"""eps of the latents' norms; in the published models it does not depend on `rms_norm_eps`."""
Table = Float[Tensor, "#b s p"]
"""The cosines or the sines of a rotary embedding."""


def _side_by_side(attended_BSHU: Tensor, recomputation: Recomputation) -> Tensor:
    """Return the heads' outputs side by side, (B, S, H * U). Attention saves its output anyway;
    this reordered copy is recomputed from it."""
    side_by_side = attended_BSHU.flatten(2)
    recomputation.add(
        (side_by_side,), lambda attended_BSHU: (attended_BSHU.flatten(2),), attended_BSHU
    )
    return side_by_side


def gather_heads(context: Context, k_BSGN: Tensor, v_BSGN: Tensor) -> tuple[Tensor, ...]:
    """Return the keys and values of all context ranks, in the values' dtype, as attention takes
    them."""
    return context.gather((k_BSGN.to(v_BSGN.dtype), v_BSGN))


class MultiHeadLatentAttention(MeasuredAttention):
    """Causal attention whose keys and values come from a low-rank latent, with a rotary key
    that all heads share.

    Sizes are those of the published configuration (Hugging Face names). With `q_lora_rank` None the
    query has no latent.
    """

    parts_to_compile = ("keys_and_values", "heads")  # backward recomputes the first by itself

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        rotary: Rotary,
        v_head_dim: int,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.nope, self.rotary = qk_nope_head_dim, rotary
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        query_width = qk_nope_head_dim + rotary.size
        yarn = rotary.scaling
        self.scale = query_width**-0.5 * (
            yarn.softmax_factor() if isinstance(yarn, YarnConfig) else 1.0
        )
        if q_lora_rank is None:
            self.q_proj = Linear(hidden_size, num_heads * query_width, bias=False)
        else:
            self.q_a_proj = Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(q_lora_rank, num_heads * query_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_lora_rank + rotary.size, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(
            kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False
        )
        self.o_proj = Linear(num_heads * v_head_dim, hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Float[Tensor, "b s d"],
        layout: SequenceLayout,
        recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> Float[Tensor, "b s d"]:
        tables = layout.rotary_tables(self.rotary, x_BSD.dtype)
        query_BSx, latent_and_key = project(
            x_BSD,
            self.q_proj if self.q_lora_rank is None else self.q_a_proj,
            self.kv_a_proj_with_mqa,
        )
        if self.q_lora_rank is not None:
            query_BSx = self.q_b_proj(recomputation.norm(self.q_a_layernorm, query_BSx))
        latent_BSL, k_BSR = latent_and_key.split((self.kv_lora_rank, self.rotary.size), dim=-1)
        if layout.cache is not None:
            latent_BSL = self.kv_a_layernorm(latent_BSL)
            attended_BSHU = self._attend_to_latents(
                query_BSx, latent_BSL, k_BSR, layout, layout.cache
            )
        elif layout.context is not None:
            attended_BSHU = self._attend_to_all(
                query_BSx, latent_BSL, k_BSR, layout, layout.context, recomputation
            )
        else:
            kv_BSx = self.kv_b_proj(recomputation.norm(self.kv_a_layernorm, latent_BSL))

            def keys_and_values(
                latent_BSL: Tensor, *key_and_tables: Tensor
            ) -> tuple[Tensor, Tensor]:
                return self.keys_and_values(
                    self.kv_b_proj(self.kv_a_layernorm(latent_BSL)), *key_and_tables
                )

            recipe = Recipe(recomputation, (1, 2), keys_and_values, (latent_BSL, k_BSR, *tables))
            heads = self.heads(query_BSx, kv_BSx, k_BSR, *tables)
            self.measure(*heads, layout)
            attended_BSHU = attend(*heads, layout, scale=self.scale, recipe=recipe)
            del heads  # keys and values are recomputed in backward
        return self.o_proj(_side_by_side(attended_BSHU, recomputation))

    def _attend_to_all(
        self,
        query_BSx: Float[Tensor, "b s x"],
        latent_BSL: Float[Tensor, "b s l"],
        k_BSR: Float[Tensor, "b s r"],
        layout: SequenceLayout,
        context: Context,
        recomputation: Recomputation,
    ) -> Float[Tensor, "b s h u"]:
        """Attend to the keys of all context ranks, which exchange latents and shared keys, L + R
        elements a token. Each rank expands all latents. Backward gathers them again."""
        key_tables = layout.rotary_tables(self.rotary, k_BSR.dtype, of_keys=True)

        def gather(latent_BSL: Tensor, k_BSR: Tensor) -> tuple[Tensor, ...]:
            return context.gather((self.kv_a_layernorm(latent_BSL).to(k_BSR.dtype), k_BSR))

        def expand(latent_BTL: Tensor, k_BTR: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
            return self.keys_and_values(self.kv_b_proj(latent_BTL), k_BTR, *tables)

        latent_BTL, k_BTR = gather(latent_BSL, k_BSR)
        recomputation.add((latent_BTL, k_BTR), gather, latent_BSL, k_BSR)
        recipe = Recipe(recomputation, (1, 2), expand, (latent_BTL, k_BTR, *key_tables))
        query = self.queries(query_BSx, *layout.rotary_tables(self.rotary, query_BSx.dtype))
        keys_and_values = expand(latent_BTL, k_BTR, *key_tables)
        self.measure(query, *keys_and_values, layout)
        return attend(query, *keys_and_values, layout, scale=self.scale, recipe=recipe)

    def heads(
        self,
        query_BSx: Float[Tensor, "b s x"],
        kv_BSx: Float[Tensor, "b s y"],
        k_BSR: Float[Tensor, "b s r"],
        *tables: Table,
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h n"], Float[Tensor, "b s h u"]]:
        """Return queries, keys and values of each head, rotated, from the outputs of the
        projections; `tables` are cosines and sines."""
        return self.queries(query_BSx, *tables), *self.keys_and_values(kv_BSx, k_BSR, *tables)

    def queries(
        self, query_BSx: Float[Tensor, "b s x"], *tables: Table
    ) -> Float[Tensor, "b s h n"]:
        """Return the queries of each head, rotated."""
        q_BSHN, q_BSHR = self._split_query(query_BSx)
        return torch.cat((q_BSHN, self.rotary.rotate(q_BSHR, *tables)), dim=-1)

    def _split_query(self, query_BSx: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parts of each head's query without and with rotary embedding."""
        query_BSHx = query_BSx.unflatten(-1, (self.num_heads, -1))
        return query_BSHx.split((self.nope, self.rotary.size), dim=-1)

    def keys_and_values(
        self, kv_BSx: Float[Tensor, "b s y"], k_BSR: Float[Tensor, "b s r"], *tables: Table
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h u"]]:
        """Return keys and values of each head."""
        kv_BSHx = kv_BSx.unflatten(-1, (self.num_heads, -1))
        k_BSHN, v_BSHU = kv_BSHx.split((self.nope, kv_BSHx.shape[-1] - self.nope), dim=-1)
        k_BSHR = self.rotary.rotate(k_BSR.unsqueeze(2), *tables).expand(-1, -1, self.num_heads, -1)
        return torch.cat((k_BSHN, k_BSHR), dim=-1), v_BSHU

    @property
    def head_rows(self) -> dict[str, int]:
        """Rows of a head in the projections that have heads, by name (`optim.per_head`). In
        `kv_b_proj` they are its key and its value; the output projection adds up all heads."""
        query = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        names = query, "kv_b_proj"
        return {name: getattr(self, name).out_features // self.num_heads for name in names}

    def clip_factors(self, gamma_H: Float[Tensor, " h"]) -> dict[str, Float[Tensor, " x"]]:
        gamma_H1 = gamma_H.unsqueeze(1)
        root_HN = gamma_H1.sqrt().expand(-1, self.nope)
        query_Hx = torch.cat((root_HN, gamma_H1.expand(-1, self.rotary.size)), dim=1)
        value_width = self.kv_b_proj.out_features // self.num_heads - self.nope
        kv_Hx = F.pad(root_HN, (0, value_width), value=1.0)
        query = "q_proj" if self.q_lora_rank is None else "q_b_proj"
        return {query: query_Hx.flatten(), "kv_b_proj": kv_Hx.flatten()}

    def _attend_to_latents(
        self,
        query_BSx: Tensor,
        latent_BSL: Tensor,
        k_BSR: Tensor,
        layout: SequenceLayout,
        cache: KeyValueCache,
    ) -> Float[Tensor, "b s h u"]:
        """Compute the same attention on cached latents: the expansion to keys is applied to the
        queries instead, and the expansion to values to the weighted sums. A token takes L + R
        elements of the cache, and L + R instead of N + R products per key."""
        tables = layout.rotary_tables(self.rotary, latent_BSL.dtype)
        kv_HxL = merged(self.kv_b_proj.weight, self.kv_b_proj.lora).unflatten(
            0, (self.num_heads, -1)
        )
        k_HNL, v_HUL = kv_HxL.split((self.nope, kv_HxL.shape[1] - self.nope), dim=1)
        q_BSHN, q_BSHR = self._split_query(query_BSx)
        q_BSHL = torch.einsum("bshn,hnl->bshl", q_BSHN, k_HNL)
        query = torch.cat((q_BSHL, self.rotary.rotate(q_BSHR, *tables)), dim=-1)
        key = torch.cat(
            (latent_BSL.unsqueeze(2), self.rotary.rotate(k_BSR.unsqueeze(2), *tables)), dim=-1
        )
        (key_BT1x,) = cache.extend(self, key)
        sums_BSHL = attend(
            query, key_BT1x, key_BT1x[..., : self.kv_lora_rank], layout, scale=self.scale
        )
        return torch.einsum("bshl,hul->bshu", sums_BSHL, v_HUL)


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


class GroupedQueryAttention(MeasuredAttention):
    """Causal attention in which several query heads share a key-value head.

    The rotary embedding covers the first `rotary.size` columns of each head. Optional: RMSNorm of
    queries and keys, biases of the projections of queries, keys and values and of the output's, a
    sliding window, sinks. With `gate`, `q_proj` gives for each head a query and then a gate of the
    same width, whose sigmoid multiplies what the head attended to."""

    parts_to_compile = ("heads",)

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
        x_BSD: Float[Tensor, "b s d"],
        layout: SequenceLayout,
        recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> Float[Tensor, "b s d"]:
        tables = layout.rotary_tables(self.rotary, x_BSD.dtype)
        q_BSx, k_BSx, v_BSx = project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        projected = (q_BSx, k_BSx, v_BSx, *tables)
        recipe = None
        if isinstance(self.q_norm, RMSNorm):  # the norm saves the outputs of the projections anyway
            recipe = Recipe(
                recomputation, (0, 1), lambda *sources: self.heads(*sources)[:2], projected
            )
        q_BSHN, k_BTGN, v_BTGN = self.heads(*projected)
        if layout.context is not None:
            k_BTGN = k_BTGN.to(v_BTGN.dtype)
            recipe = self._gathering(recomputation, layout.context, recipe, k_BTGN, v_BTGN)
            k_BTGN, v_BTGN = gather_heads(layout.context, k_BTGN, v_BTGN)
        if layout.cache is not None:
            k_BTGN, v_BTGN = layout.cache.extend(self, k_BTGN, v_BTGN)
        self.measure(q_BSHN, k_BTGN, v_BTGN, layout)
        attended_BSHN = attend(
            q_BSHN, k_BTGN, v_BTGN, layout, window=self.window, sinks_H=self.sinks, recipe=recipe
        )
        if not self.gate:
            return self.o_proj(_side_by_side(attended_BSHN, recomputation))
        gate, sources = partial(saving_inputs_only, self._gated), (attended_BSHN, q_BSx)
        gated = gate(*sources)
        recomputation.add(gated, gate, *sources)
        return self.o_proj(*gated)

    def _gathering(
        self,
        recomputation: Recomputation,
        context: Context,
        local: Recipe | None,
        k_BSGN: Tensor,
        v_BSGN: Tensor,
    ) -> Recipe:
        """Return the recipe that gathers keys and values again, which `local` recomputes; without
        it autograd saves those of this rank."""
        if local is None:
            return Recipe(recomputation, (1, 2), partial(gather_heads, context), (k_BSGN, v_BSGN))

        def again(*sources: Tensor) -> tuple[Tensor, ...]:
            q_BSHN, k_BSGN, v_BSGN = self.heads(*sources)
            return q_BSHN, *gather_heads(context, k_BSGN, v_BSGN)

        return Recipe(recomputation, (0, 1, 2), again, local.sources)

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
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s g n"], Float[Tensor, "b s g n"]]:
        """Return queries, keys and values of each head, normalized and rotated, from the outputs of
        the projections; `tables` are cosines and sines."""
        q_BSHN = q_BSx.unflatten(-1, (-1, self.head_dim * (2 if self.gate else 1)))
        q_BSHN = self._normed(self.q_norm, q_BSHN[..., : self.head_dim])
        k_BSGN = self._normed(self.k_norm, k_BSx.unflatten(-1, (-1, self.head_dim)))
        v_BSGN = v_BSx.unflatten(-1, (-1, self.head_dim))
        return self.rotary.rotate(q_BSHN, *tables), self.rotary.rotate(k_BSGN, *tables), v_BSGN

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
