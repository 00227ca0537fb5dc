"""Direct preference optimization: the loss of pairs of a chosen and a rejected answer.

Source: DPO (Rafailov et al., arXiv:2305.18290, eq. 7). With the log-ratio r of an answer, the sum
over its labels of the log-probability minus that of the reference,

    loss = 1 / normalizer * sum over pairs of -log sigmoid(beta (r_chosen - r_rejected))

Under context parallelism each rank has some labels of a pair: the ratios are summed over the ranks,
of which each adds the gradient of its labels and its share of the loss.

Letters: B sequences, S positions, P pairs of the micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.kernels.cross_entropy import divided
from lather.models.context import Context
from lather.shapes import Float, Int


@dataclass(frozen=True)
class AnswerPairs:
    """The pairs of a micro-batch, by label."""

    index_BS: Int[Tensor, "b s"]
    """Number of the label's pair, from 0; P where there is none."""
    sign_BS: Int[Tensor, "b s"]
    """1 in the chosen answer, -1 in the rejected one, 0 elsewhere."""
    reference_BS: Float[Tensor, "b s"]
    """Log-probability of the label under the reference model; 0 where there is no pair."""
    num_pairs: int
    """P."""
    beta: float

    def loss(
        self,
        nats_BS: Float[Tensor, "b s"],
        normalizer: float | Tensor,
        context: Context | None = None,
    ) -> Float[Tensor, ""]:
        """Return the loss from the labels' nats; collective over context ranks."""
        ratio_BS = self.sign_BS * (-nats_BS - self.reference_BS.to(nats_BS.dtype))
        margin_P = nats_BS.new_zeros(self.num_pairs + 1)
        margin_P = margin_P.index_add(0, self.index_BS.flatten(), ratio_BS.flatten())[:-1]
        whole_P = margin_P.detach()
        if context is not None:
            whole_P = context.add_up(whole_P)
        value = divided(F.softplus(-self.beta * whole_P).sum(), normalizer)
        slope_P = -self.beta * torch.sigmoid(-self.beta * whole_P)
        tangent = divided((slope_P * margin_P).sum(), normalizer)
        share = value if context is None else value / context.size
        return tangent + (share - tangent).detach()
