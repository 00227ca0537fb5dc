"""The sum in torch's own operations: the specification of the kernel."""

from __future__ import annotations

from torch import Tensor


def add_terms(residual: Tensor, routed_TD: Tensor, shared_TD: Tensor | None) -> Tensor:
    """Return residual + (routed + shared), in the dtype of the residual."""
    total_TD = routed_TD.to(residual.dtype)
    if shared_TD is not None:
        total_TD = total_TD + shared_TD
    return (residual + total_TD.view_as(residual)).to(residual.dtype)
