"""Gated DeltaNet: linear attention whose state per head is corrected by the gated delta rule.

Sources: Gated DeltaNet (Yang et al., arXiv:2412.06464), in the form of Qwen3-Next: queries, keys
and values pass a causal depthwise convolution and SiLU; the output of each head is normalized and
multiplied by SiLU of a gate z. (`lather.kernels.gated_delta_rule` has the rule.)

Autograd keeps the outputs of the projections and of the rule. Backward computes the convolution,
decays, rates, the gated output, and the rule within chunks again.

Under context parallelism a rank's slices of the sequences are rows of a batch. Of the others' a
layer gathers the last W - 1 inputs of the convolution, and in the rule how each slice changes a
state (`lather.kernels.gated_delta_rule.slices`), H K (K + V) numbers in fp32 or wider; nothing that
is gathered is kept.

Letters: B sequences, S positions, D hidden size, G key heads, H value heads (a multiple of G), K
width of a head's query and key, V width of a head's value, C = 2 G K + H V channels of the
convolution, W its width; with a context R slices, P positions of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.kernels.backend import wide_dtype
from lather.kernels.gated_delta_rule import (
    Documents,
    StatePassing,
    gated_delta_rule,
    gated_delta_rule_of_slices,
)
from lather.kernels.inputs_only import saving_inputs_only
from lather.kernels.rms_norm import rms_norm
from lather.models.layers import Linear, NormedRows, RMSNorm, project
from lather.models.saving.recomputed import NO_RECOMPUTATION, Recomputation
from lather.models.sequence_slices import SequenceSlices
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float, Int

Heads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Queries and keys (B, S, G, K), values (B, S, H, V), decays and rates (B, S, H)."""


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of a Gated DeltaNet layer."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of `num_key_heads`."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Number of tokens that the convolution sees, including the token itself."""

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim


class GatedDeltaNet(nn.Module):
    """Causal linear attention by the gated delta rule, which starts anew with every document.

    With `grouped_projections` (Qwen3-Next) two projections give, key head by key head, query, key,
    values and gates, and rates and decays; otherwise (Qwen3.5) there are four projections, of
    queries, keys and values; gates; rates; decays."""

    parts_to_compile = ("heads", "gated")

    def __init__(self, sizes: DeltaSizes, eps: float, *, grouped_projections: bool) -> None:
        super().__init__()
        self.sizes, self.grouped_projections = sizes, grouped_projections
        channels = 2 * sizes.key_width + sizes.value_width
        widths = {
            "in_proj_qkv": channels,
            "in_proj_z": sizes.value_width,
            "in_proj_b": sizes.num_value_heads,
            "in_proj_a": sizes.num_value_heads,
        }
        if grouped_projections:
            widths = {
                "in_proj_qkvz": channels + sizes.value_width,
                "in_proj_ba": 2 * sizes.num_value_heads,
            }
        self.projections = tuple(widths)
        for name, width in widths.items():
            self.add_module(name, Linear(sizes.hidden_size, width, bias=False))
        self.conv1d = nn.Conv1d(channels, channels, sizes.kernel_size, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(sizes.num_value_heads))
        self.norm = RMSNorm(sizes.value_head_dim, eps)
        self.out_proj = Linear(sizes.value_width, sizes.hidden_size, bias=False)

    @property
    def head_rows(self) -> dict[str, int]:
        """Rows of a head in the projections that have heads, by name (`optim.per_head`): queries,
        keys, values and gates of a head each. If keys and values differ in width, the projections
        that have both have none."""
        width, (fused, *others) = self.sizes.value_head_dim, self.projections
        names = [fused] if width == self.sizes.key_head_dim else []
        return dict.fromkeys([*names, *(x for x in others if x == "in_proj_z")], width)

    def forward(
        self,
        x_BSD: NormedRows,
        layout: SequenceLayout,
        recomputation: Recomputation = NO_RECOMPUTATION,
    ) -> Float[Tensor, "b s d"]:
        cache, state = layout.cache, None
        earlier: list[Tensor] = []
        if cache is not None:
            assert isinstance(x_BSD, Tensor), "rows are rounded only without a cache"
            if layout.padding is not None:  # zeros change neither convolution nor state
                x_BSD = layout.padding.fill(x_BSD.flatten(0, 1), 0).view_as(x_BSD)
            *earlier, state = cache.state_of(self) or (None,)
        projected = project(x_BSD, *(self.get_submodule(name) for name in self.projections))
        slices = layout.slices(self.sizes.kernel_size - 1)
        if slices is not None:
            out_BSHV = self._of_slices(slices, projected, recomputation)
        else:
            heads = self._registered(layout.documents, (*projected, *earlier), recomputation)
            documents = None
            if layout.documents is not None:
                documents = Documents(layout.documents, layout.cu_seqlens)
            with_state = cache is not None
            out_BSHV, state = gated_delta_rule(*heads, documents, state, with_state=with_state)
            if cache is not None:
                assert state is not None
                cache.set_state(self, self._last_inputs(projected, *earlier), state)
        gated = self.gated(out_BSHV, *projected)
        recomputation.add(gated, self.gated, out_BSHV, *projected)
        return self.out_proj(*gated)

    def _of_slices(
        self, slices: SequenceSlices, projected: tuple[Tensor, ...], recomputation: Recomputation
    ) -> Tensor:
        """Return the heads' outputs (B, S, H, V) of a context rank."""
        rows, documents = tuple(slices.rows(x) for x in projected), None
        earlier: list[Tensor] = []
        if slices.num_earlier:
            tails = (x[:, -slices.num_earlier :] for x in rows)
            earlier.append(slices.earlier(self._split(*tails)[0]))
        heads = self._registered(slices.document_RU, (*rows, *earlier), recomputation)
        if slices.document_RU is not None:
            number_RP = slices.document_RU[:, slices.num_earlier :]
            documents = Documents(number_RP, slices.cu_seqlens)
        passing = StatePassing(slices.gather, slices.local, slices.continues_BN)
        return slices.positions(gated_delta_rule_of_slices(*heads, passing, documents))

    def _registered(
        self, document_BU: Tensor | None, inputs: tuple[Tensor, ...], recomputation: Recomputation
    ) -> Heads:
        """Return the operands of the gated delta rule, which backward computes again."""
        heads_of = partial(self.heads, document_BU)
        heads = heads_of(*inputs)
        recomputation.add(heads, heads_of, *inputs)
        return heads

    def heads(self, document_BU: Tensor | None, *inputs: Tensor) -> Heads:
        """Return the operands of the gated delta rule from the outputs of the projections, and
        behind these, unless zeros come first, the W - 1 inputs of the convolution before the first
        token. `document_BU`: as `convolution` has it."""
        parameters = (self.conv1d.weight, self.A_log, self.dt_bias)
        make = partial(self._heads, document_BU)
        return saving_inputs_only(make, *parameters, *inputs)  # type: ignore[return-value]

    def _heads(self, document_BU: Tensor | None, *inputs: Tensor) -> Heads:
        """Return the operands, from three parameters and the inputs of `heads`."""
        sizes = self.sizes
        filter_C1W, a_log_H, dt_bias_H, *others = inputs
        projected, earlier = others[: len(self.projections)], others[len(self.projections) :]
        qkv_BSC, _, b_BSH, a_BSH = self._split(*projected)
        mixed_BSC = convolution(qkv_BSC, filter_C1W.squeeze(1), document_BU, *earlier)
        q, k, v = mixed_BSC.split((*(sizes.key_width,) * 2, sizes.value_width), dim=-1)
        wide = wide_dtype(a_BSH)
        decay_BSH = -a_log_H.to(wide).exp() * F.softplus(a_BSH.to(wide) + dt_bias_H.to(wide))
        return (
            q.unflatten(-1, (-1, sizes.key_head_dim)),
            k.unflatten(-1, (-1, sizes.key_head_dim)),
            v.unflatten(-1, (-1, sizes.value_head_dim)),
            decay_BSH,
            b_BSH.to(wide).sigmoid(),
        )

    def gated(self, out_BSHV: Tensor, *projected: Tensor) -> tuple[Tensor]:
        """Return the heads' outputs, normalized and gated, side by side (B, S, H * V)."""
        return saving_inputs_only(self._gated, self.norm.weight, out_BSHV, *projected)  # type: ignore[return-value]

    def _gated(self, weight_V: Tensor, out_BSHV: Tensor, *projected: Tensor) -> tuple[Tensor]:
        z_BSHV = self._split(*projected)[1].view_as(out_BSHV)
        normed_BSHV = rms_norm(out_BSHV, weight_V, self.norm.eps)
        gated_BSHV = normed_BSHV * F.silu(z_BSHV.to(wide_dtype(z_BSHV)))
        return (gated_BSHV.to(out_BSHV.dtype).flatten(2),)

    def fresh_parameter(self, name: str, p: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return a fresh value, on CPU, of a parameter that is no weight: the published models
        began with exp(A_log) uniform below 16, and 1 for dt_bias."""
        fresh_H = torch.ones_like(p, device="cpu")
        return (
            fresh_H if name == "dt_bias" else fresh_H.uniform_(0.01, 16, generator=generator).log_()
        )

    def _split(self, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the convolution's input (B, S, C), gates (B, S, H * V), and the inputs of rates
        and decays (B, S, H)."""
        if not self.grouped_projections:
            return projected  # type: ignore[return-value]
        sizes = self.sizes
        qkvz_BSGx, ba_BSGx = (x.unflatten(-1, (sizes.num_key_heads, -1)) for x in projected)
        values = sizes.value_width // sizes.num_key_heads
        *qkv, z = qkvz_BSGx.split((*(sizes.key_head_dim,) * 2, values, values), dim=-1)
        b, a = ba_BSGx.chunk(2, dim=-1)
        qkv_BSC = torch.cat([x.flatten(2) for x in qkv], dim=-1)
        return qkv_BSC, z.flatten(2), b.flatten(2), a.flatten(2)

    def _last_inputs(
        self, projected: tuple[Tensor, ...], earlier_BWC: Tensor | None = None
    ) -> Tensor:
        """Return the last W - 1 inputs of the convolution, with zeros before the first token."""
        inputs_BSC, missing = self._split(*projected)[0], self.sizes.kernel_size - 1
        if earlier_BWC is not None:
            inputs_BSC = torch.cat((earlier_BWC, inputs_BSC), dim=1)
        return F.pad(inputs_BSC, (0, 0, missing, 0))[:, inputs_BSC.shape[1] :]


def convolution(
    x_BSC: Float[Tensor, "b s c"],
    filter_CW: Float[Tensor, "c w"],
    document_BU: Int[Tensor, "b u"] | None = None,
    earlier_BWC: Float[Tensor, "b v c"] | None = None,
) -> Float[Tensor, "b s c"]:
    """Return SiLU of the sum over lags l < W of filter[:, W - 1 - l] times the input l tokens
    earlier in the same document, in the dtype of x; `earlier_BWC` are the W - 1 inputs before the
    first (None: zeros), and then `document_BU` has their documents before those of the tokens, U =
    W - 1 + S (without: U = S). The sum is computed in fp32 or wider."""
    length, last = x_BSC.shape[1], filter_CW.shape[1] - 1
    filter_CW = filter_CW.to(wide_dtype(x_BSC))
    if earlier_BWC is None:
        padded_BSC = F.pad(x_BSC, (0, 0, last, 0))
    else:
        padded_BSC = torch.cat((earlier_BWC, x_BSC), dim=1)
    if document_BU is not None and earlier_BWC is None:
        document_BU = F.pad(document_BU, (last, 0), value=-1)
    total_BSC = x_BSC * filter_CW[:, last]
    for lag in range(1, last + 1):
        lagged_BSC = padded_BSC[:, last - lag : last - lag + length]
        if document_BU is not None:
            before_BS = document_BU[:, last - lag : last - lag + length]
            lagged_BSC = lagged_BSC * (before_BS == document_BU[:, last:]).unsqueeze(-1)
        total_BSC = total_BSC + lagged_BSC * filter_CW[:, last - lag]
    return F.silu(total_BSC).to(x_BSC.dtype)
