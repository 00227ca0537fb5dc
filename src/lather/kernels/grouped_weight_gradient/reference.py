"""Sums of outer products over each expert's rows in torch: the specification. The host reads the
ends of the experts' rows."""

from __future__ import annotations

from torch import Tensor

from lather.device import Read, read


def outer_product_sums(
    grad_GO: Tensor, x_GI: Tensor, end_E: Tensor, out_EOI: Tensor, accumulate: bool
) -> None:
    """Write the fp32 product of each expert to `out_EOI`, or add it to what is there. Without rows
    an expert's product is 0, and a sum stays what it is."""
    start = 0
    for out_OI, end in zip(out_EOI, read(end_E, Read.ENDS).tolist(), strict=True):
        product_OI = grad_GO[start:end].float().T @ x_GI[start:end].float()
        if not accumulate:
            out_OI.copy_(product_OI)
        elif end > start:
            out_OI.add_(product_OI)
        start = end
