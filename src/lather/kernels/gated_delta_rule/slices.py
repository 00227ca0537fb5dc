"""The gated delta rule on slices of sequences that several ranks have, with the states passed from
slice to slice.

The state after a slice is affine in the state before it: B + M S, where B is the state after a
start from zero, and M (K x K) the product of what the slice's tokens do to a state. In the forward
pass every rank computes [B | M] of its own slices, gathers those of all, follows them to the state
before each of its slices, and runs these. In the backward pass it computes E, the gradients of the
states before its slices by their own outputs, gathers [E | M], follows these from the last slice
back to the gradient of the state after each of its slices, E + M^T G of the next, and with it
differentiates its slices. So no rank waits for another's recurrence, and M is never differentiated:
the gradient of a slice's last state has all of it.

Beside the rule on its own slices a rank computes M in the forward pass and E in the backward pass.
Autograd keeps the inputs, the states before the slices and their M.

Letters: those of `reference`; R rows, each one of this rank's slices of a sequence, N slices of a
sequence, P positions of a slice, X = V + K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lather.device import no_autocast
from lather.shapes import Bool, Float


@dataclass(frozen=True)
class StatePassing:
    """The exchange of what states pass through, and which slices are this rank's rows."""

    gather: Callable[[Tensor], Tensor]
    """Returns all slices of every sequence in order, (B, N, ...), from the rows of every rank,
    (R, ...). Collective."""
    local: Callable[[Tensor], Tensor]
    """Returns this rank's rows of a tensor of all slices: what was gathered."""
    continues_BN: Bool[Tensor, "b n"] | None
    """Whether the first token of a slice is of the same document as the token before it; None: in
    all slices but the first of a sequence."""


class SliceRule(Protocol):
    """The rule on the rows of a rank."""

    def transition(self) -> Tensor:
        """Return [B | M] of each row, (R, H, K, X), as `reference.transition`."""

    def run(self, state_RHKV: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs (R, P, H, V), and the last states (R, H, K, V), from the states before
        the rows. It can be differentiated."""


def run_slices(
    rule_of: Callable[..., SliceRule], passing: StatePassing, *tokens: Tensor
) -> Float[Tensor, "r p h v"]:
    """Return the outputs of this rank's rows. `rule_of(*tokens)` makes the rule on them, here and
    again in backward, from queries, keys, values, decays and rates (R, P, ...).

    Collective, here and in backward. It can be differentiated once."""
    out_RPHV: Tensor = _RunSlices.apply(rule_of, passing, *tokens)  # type: ignore[no-untyped-call]
    return out_RPHV


class _RunSlices(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rule_of: Callable[..., SliceRule], passing: StatePassing, *tokens: Tensor
    ) -> Tensor:
        ctx.rule_of, ctx.passing = rule_of, passing
        width = tokens[2].shape[-1]
        with no_autocast(tokens[0]):
            rule = rule_of(*tokens)
            map_RHKX = rule.transition()
            maps_BNHKX = passing.gather(map_RHKX)
            state_BNHKV = states_before(maps_BNHKX, width, passing.continues_BN)
            state_RHKV = passing.local(state_BNHKV)
            out_RPHV, _ = _run(rule, state_RHKV, tokens[2].dtype)
        ctx.save_for_backward(*tokens, state_RHKV, map_RHKX[..., width:].contiguous())
        return out_RPHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RPHV: Tensor) -> tuple[Tensor | None, ...]:
        passing: StatePassing = ctx.passing
        *tokens, state_RHKV, m_RHKK = ctx.saved_tensors
        leaves = [x.detach().requires_grad_() for x in tokens]
        state_RHKV = state_RHKV.detach().requires_grad_()
        with torch.enable_grad(), no_autocast(tokens[0]):
            out_RPHV, last_RHKV = _run(ctx.rule_of(*leaves), state_RHKV, tokens[2].dtype)
        (e_RHKV,) = torch.autograd.grad(out_RPHV, state_RHKV, grad_RPHV, retain_graph=True)
        maps_BNHKX = passing.gather(torch.cat((e_RHKV, m_RHKK), dim=-1))
        grads_BNHKV = gradients_after(maps_BNHKX, e_RHKV.shape[-1], passing.continues_BN)
        of_results = (grad_RPHV, passing.local(grads_BNHKV))
        grads = torch.autograd.grad((out_RPHV, last_RHKV), leaves, of_results)
        return None, None, *grads


def _run(rule: SliceRule, state_RHKV: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the outputs in this dtype, and the last states."""
    out_RPHV, last_RHKV = rule.run(state_RHKV)
    return out_RPHV.to(dtype).contiguous(), last_RHKV


def states_before(
    maps_BNHKX: Float[Tensor, "b n h k x"],
    width: int,
    continues_BN: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b n h k v"]:
    """Return the state before each slice from [B | M] of all slices, B being `width` wide."""
    b_BNHKV, m_BNHKK = maps_BNHKX.split((width, maps_BNHKX.shape[-1] - width), dim=-1)
    states = [torch.zeros_like(b_BNHKV[:, 0])]
    for number in range(1, b_BNHKV.shape[1]):
        state_BHKV = b_BNHKV[:, number - 1] + m_BNHKK[:, number - 1] @ states[-1]
        states.append(_where_continued(state_BHKV, continues_BN, number))
    return torch.stack(states, dim=1)


def gradients_after(
    maps_BNHKX: Float[Tensor, "b n h k x"],
    width: int,
    continues_BN: Bool[Tensor, "b n"] | None = None,
) -> Float[Tensor, "b n h k v"]:
    """Return the gradient of the state after each slice from [E | M] of all slices, E being `width`
    wide: the gradients of the states before them by their own outputs."""
    e_BNHKV, m_BNHKK = maps_BNHKX.split((width, maps_BNHKX.shape[-1] - width), dim=-1)
    grads = [torch.zeros_like(e_BNHKV[:, 0])]
    for number in range(e_BNHKV.shape[1] - 1, 0, -1):
        grad_BHKV = e_BNHKV[:, number] + m_BNHKK[:, number].mT @ grads[-1]
        grads.append(_where_continued(grad_BHKV, continues_BN, number))
    return torch.stack(grads[::-1], dim=1)


def _where_continued(x_BHKV: Tensor, continues_BN: Tensor | None, number: int) -> Tensor:
    """Return zeros in place of what comes to a slice that begins with a document."""
    if continues_BN is None:
        return x_BHKV
    return x_BHKV * continues_BN[:, number, None, None, None]
