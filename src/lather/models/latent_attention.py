"""Multi-head latent attention, MLA: causal self-attention over packed documents whose keys and
values come from a low-rank latent.

Source: DeepSeek-V2 (arXiv:2405.04434, section 2.1), in its training form, which expands keys and
values from the latent and then attends as usual.

Letters: B sequences, S positions, D hidden size, H heads, N width of a head's query and key without
rotary embedding, R rotary width, U width of a head's value, L rank of the key-value latent, P = R /
2 rotary pairs, T keys: S, or all slots of a cache, or the tokens of all context ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.models.attention_kernels import Recipe, attend
from lather.models.gathering_attention import GatheringAttention, Projected, side_by_side
from lather.models.key_value_cache import KeyValueCache
from lather.models.layers import (
    Linear,
    NormedRows,
    RMSNorm,
    norm_for_products,
    norm_in,
    project,
    project_alone,
    recomputed_norm,
)
from lather.models.lora import merged
from lather.models.rotary import Rotary, Table, YarnConfig
from lather.models.saving.recomputed import NO_RECOMPUTATION, Recomputation
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float

LATENT_EPS = 1e-6
"""eps of the latents' norms; in the published models it does not depend on `rms_norm_eps`."""


class MultiHeadLatentAttention(GatheringAttention):
    """Causal attention whose keys and values come from a low-rank latent, with a rotary key
    that all heads share.

    Sizes are those of the published configuration (Hugging Face names). With `q_lora_rank` None the
    query has no latent.
    """

    parts_to_compile = ("keys_and_values", "heads", "queries")

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
        x_BSD: NormedRows,
        layout: SequenceLayout,
        recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> Float[Tensor, "b s d"]:
        if layout.context is not None:
            return self.gather_and_attend(x_BSD, layout, recomputation)
        tables = layout.rotary_tables(self.rotary, x_BSD.dtype)
        query_BSx, latent_BSL, k_BSR = self._projections(x_BSD, recomputation)
        if layout.cache is not None:
            latent_BSL = self.kv_a_layernorm(latent_BSL)
            attended_BSHU = self._attend_to_latents(
                query_BSx, latent_BSL, k_BSR, layout, layout.cache
            )
        else:
            _, normed = recomputed_norm(self.kv_a_layernorm, latent_BSL, recomputation)
            kv_BSx = project_alone(normed, self.kv_b_proj)

            def keys_and_values(
                latent_BSL: Tensor, *key_and_tables: Tensor
            ) -> tuple[Tensor, Tensor]:
                _, normed = norm_for_products(self.kv_a_layernorm, latent_BSL)
                return self.keys_and_values(*project(normed, self.kv_b_proj), *key_and_tables)

            recipe = Recipe(recomputation, (1, 2), keys_and_values, (latent_BSL, k_BSR, *tables))
            heads = self.heads(query_BSx, kv_BSx, k_BSR, *tables)
            self.measure(*heads, layout)
            attended_BSHU = attend(*heads, layout, scale=self.scale, recipe=recipe)
            del heads  # keys and values are recomputed in backward
        return self.o_proj(side_by_side(attended_BSHU, recomputation))

    def _projections(
        self, x_BSD: NormedRows, recomputation: Recomputation
    ) -> tuple[Float[Tensor, "b s x"], Float[Tensor, "b s l"], Float[Tensor, "b s r"]]:
        """Return the outputs of the projections: queries, latents before their norm, and the key
        that all heads share, before its rotation."""
        query_BSx, latent_and_key = project(
            x_BSD,
            self.q_proj if self.q_lora_rank is None else self.q_a_proj,
            self.kv_a_proj_with_mqa,
        )
        if self.q_lora_rank is not None:
            _, normed = recomputed_norm(self.q_a_layernorm, query_BSx, recomputation)
            query_BSx = project_alone(normed, self.q_b_proj)
        latent_BSL, k_BSR = latent_and_key.split((self.kv_lora_rank, self.rotary.size), dim=-1)
        return query_BSx, latent_BSL, k_BSR

    def project(
        self, x_BSD: NormedRows, layout: SequenceLayout, recomputation: Recomputation
    ) -> Projected:
        """Return queries, and the latents and shared keys that ranks exchange: L + R elements a
        token."""
        query_BSx, latent_BSL, k_BSR = self._projections(x_BSD, recomputation)
        dtype = query_BSx.dtype

        def normed(latent_BSL: Tensor) -> tuple[Tensor]:
            return (norm_in(self.kv_a_layernorm, latent_BSL, dtype),)

        shared = normed(latent_BSL)
        recomputation.add(shared, normed, latent_BSL)
        q_BSHN = self.queries(query_BSx, *layout.rotary_tables(self.rotary, dtype))
        return Projected((q_BSHN.to(dtype),), (*shared, k_BSR))

    def attend_to_all(
        self, projected: Projected, layout: SequenceLayout, recomputation: Recomputation
    ) -> Float[Tensor, "b s d"]:
        """Expand the latents of all ranks to keys and values, and attend to these."""
        (q_BSHN,), shared = projected.own, projected.shared
        sources = (*shared, *layout.rotary_tables(self.rotary, q_BSHN.dtype, of_keys=True))

        def expand(latent_BTL: Tensor, k_BTR: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
            (kv_BTx,) = project(latent_BTL, self.kv_b_proj, recomputation=recomputation)
            return self.keys_and_values(kv_BTx, k_BTR, *tables)

        recipe = Recipe(recomputation, (1, 2), expand, sources)
        heads = q_BSHN, *expand(*sources)
        self.measure(*heads, layout)
        attended_BSHU = attend(*heads, layout, scale=self.scale, recipe=recipe)
        del heads  # keys and values are recomputed in backward
        return self.o_proj(side_by_side(attended_BSHU, recomputation))

    @property
    def weights_of_all(self) -> tuple[Tensor, ...]:
        return tuple(self.kv_b_proj.parameters())

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
        query_BSHx = query_BSx.unflatten(-1, (self.num_heads, -1))
        return self.rotary.rotate(query_BSHx, *tables, last=True)

    def keys_and_values(
        self, kv_BSx: Float[Tensor, "b s y"], k_BSR: Float[Tensor, "b s r"], *tables: Table
    ) -> tuple[Float[Tensor, "b s h n"], Float[Tensor, "b s h u"]]:
        """Return keys and values of each head."""
        kv_BSHx = kv_BSx.unflatten(-1, (self.num_heads, -1))
        return self.rotary.join_shared_key(kv_BSHx, k_BSR, *tables, size=self.nope)

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
        q_BSHN, q_BSHR = self.queries(query_BSx, *tables).split(
            (self.nope, self.rotary.size), dim=-1
        )
        q_BSHL = torch.einsum("bshn,hnl->bshl", q_BSHN, k_HNL)
        query = torch.cat((q_BSHL, q_BSHR), dim=-1)
        key = torch.cat(
            (latent_BSL.unsqueeze(2), self.rotary.rotate(k_BSR.unsqueeze(2), *tables)), dim=-1
        )
        (key_BT1x,) = cache.extend(self, key)
        sums_BSHL = attend(
            query, key_BT1x, key_BT1x[..., : self.kv_lora_rank], layout, scale=self.scale
        )
        return torch.einsum("bshl,hul->bshu", sums_BSHL, v_HUL)
