"""The gated delta rule, the recurrence of Gated DeltaNet: a matrix per head that maps keys to
values, decays with every token and is corrected along the token's key.

Source: Gated DeltaNet (Yang et al., arXiv:2412.06464). `reference.py` is the recurrence over
tokens, which a single token takes; `chunks.py` computes the same in chunks; `fla.py` calls the
kernels of `fla-core` for bf16 and fp16 on CUDA; `slices.py` passes states between ranks that have
slices of the sequences.

Autograd keeps only the inputs: backward computes the outputs again.

Letters: B sequences, S positions, G key heads, H value heads, K width of queries and keys, V width
of values, L boundaries of documents; R slices of a rank, P positions of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lather.kernels.gated_delta_rule import chunks, fla, reference
from lather.kernels.gated_delta_rule.slices import SliceRule, run_slices
from lather.kernels.gated_delta_rule.slices import StatePassing as StatePassing
from lather.kernels.inputs_only import saving_inputs_only
from lather.shapes import Float, Int


@dataclass(frozen=True)
class Documents:
    """The documents of packed sequences."""

    number_BS: Int[Tensor, "b s"]
    """Number of each token's document, ascending from 0 over all rows."""
    cu_seqlens: Int[Tensor, " l"] | None = None
    """Boundaries of the documents among the B * S tokens, from 0 to B * S; fla needs them."""


def gated_delta_rule(
    q_BSGK: Float[Tensor, "b s g k"],
    k_BSGK: Float[Tensor, "b s g k"],
    v_BSHV: Float[Tensor, "b s h v"],
    decay_BSH: Float[Tensor, "b s h"],
    rate_BSH: Float[Tensor, "b s h"],
    documents: Documents | None = None,
    state_BHKV: Float[Tensor, "b h k v"] | None = None,
    *,
    with_state: bool = False,
) -> tuple[Float[Tensor, "b s h v"], Float[Tensor, "b h k v"] | None]:
    """Return the output of every token in the dtype of v, and with `with_state` the state after the
    last token, in fp32 (fp64 for fp64), the dtype of all computation without fla.

    Queries and keys are normalized here; each key head serves H / G neighboring value heads.
    `decay_BSH` is the logarithm of the factor by which a token shrinks the state; `rate_BSH` is
    between 0 and 1. Without `documents` every sequence is one document. `state_BHKV` is the state
    before the first token (None: zero).

    It can be differentiated once. Raises ValueError for shapes that do not match.
    """
    document_BS = None if documents is None else documents.number_BS
    cu_seqlens = None if documents is None else documents.cu_seqlens
    validate(q_BSGK, k_BSGK, v_BSHV, decay_BSH, rate_BSH, document_BS, state_BHKV)
    single, dtype = v_BSHV.shape[1] == 1, v_BSHV.dtype  # `compute` must not hold v itself
    by_fla = not single and fla.takes(k_BSGK, cu_seqlens, is_packed=documents is not None)

    def compute(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor | None
    ) -> tuple[Tensor, ...]:
        tokens = (q, k, v, decay, rate)
        if by_fla:
            return fla.gated_delta_rule(*tokens, cu_seqlens, state, with_state=with_state)
        q, k, v, decay, rate = (x.to(torch.promote_types(dtype, torch.float32)) for x in tokens)
        operation = reference.gated_delta_rule if single else chunks.gated_delta_rule
        out_BSHV, last = operation(q, k, v, decay, rate, document_BS, state)
        out_BSHV = out_BSHV.to(dtype).contiguous()
        return (out_BSHV, last) if with_state else (out_BSHV,)

    out_BSHV, *states = saving_inputs_only(
        compute, q_BSGK, k_BSGK, v_BSHV, decay_BSH, rate_BSH, state_BHKV
    )
    return out_BSHV, states[0] if states else None


def gated_delta_rule_of_slices(
    q_RPGK: Float[Tensor, "r p g k"],
    k_RPGK: Float[Tensor, "r p g k"],
    v_RPHV: Float[Tensor, "r p h v"],
    decay_RPH: Float[Tensor, "r p h"],
    rate_RPH: Float[Tensor, "r p h"],
    passing: StatePassing,
    documents: Documents | None = None,
) -> Float[Tensor, "r p h v"]:
    """Return the output of every token of this rank's slices, in the dtype of v, as if all ranks'
    slices were the sequences that they are; `documents` are those of the tokens of these rows.

    Collective, here and in backward. It can be differentiated once. Raises ValueError for shapes
    that do not match.
    """
    document_RP = None if documents is None else documents.number_BS
    tokens = (q_RPGK, k_RPGK, v_RPHV, decay_RPH, rate_RPH)
    validate(*tokens, document_RP, None)
    return run_slices(partial(_rule_of, documents), passing, *tokens)


def _rule_of(
    documents: Documents | None,
    q_RPGK: Tensor,
    k_RPGK: Tensor,
    v_RPHV: Tensor,
    decay_RPH: Tensor,
    rate_RPH: Tensor,
) -> SliceRule:
    """Return the rule on these tokens, by fla or in chunks."""
    document_RP = None if documents is None else documents.number_BS
    cu_seqlens = None if documents is None else documents.cu_seqlens
    tokens = (q_RPGK, k_RPGK, v_RPHV, decay_RPH, rate_RPH)
    if fla.takes(k_RPGK, cu_seqlens, is_packed=documents is not None):
        return fla.FlaSlices(*tokens, cu_seqlens)
    dtype = torch.promote_types(v_RPHV.dtype, torch.float32)
    q, k, v, decay, rate = (x.to(dtype) for x in tokens)
    return chunks.Chunks.of(q, k, v, decay, rate, document_RP)


def validate(
    q_BSGK: Tensor,
    k_BSGK: Tensor,
    v_BSHV: Tensor,
    decay_BSH: Tensor,
    rate_BSH: Tensor,
    document_BS: Tensor | None,
    state_BHKV: Tensor | None,
) -> None:
    """Raise ValueError for shapes that do not match."""
    batch, length, heads, width = v_BSHV.shape
    key_heads, key_width = k_BSGK.shape[2:]
    if heads % key_heads:
        raise ValueError(f"{heads} value heads: has to be a multiple of the {key_heads} key heads")
    shapes = {
        "q": (q_BSGK, (batch, length, key_heads, key_width)),
        "k": (k_BSGK, (batch, length, key_heads, key_width)),
        "decay": (decay_BSH, (batch, length, heads)),
        "rate": (rate_BSH, (batch, length, heads)),
        "document": (document_BS, (batch, length)),
        "state": (state_BHKV, (batch, heads, key_width, width)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: with values of shape {tuple(v_BSHV.shape)} it "
                f"has to be {shape}"
            )
