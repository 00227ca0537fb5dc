"""Multi-token prediction: further blocks that predict the tokens after the next one.

Source: DeepSeek-V3 (arXiv:2412.19437, section 2.2). At position i, depth k = 1 ... n combines the
state of depth k - 1 with the embedding of token i + k, runs a block, and predicts token i + k + 1
with the main model's head:

    x_i = eh_proj [enorm(embedding of token i + k); hnorm(h_i^(k-1))]
    h_i^k = norm(block(x)_i)

h^0 is the output of the main model's final norm. The paper leaves open whether states are taken
before or after norms, and writes the state first; here both are as in the programs that serve the
published weights (vLLM, SGLang) and in Megatron-LM, which trains such models.

Letters: B sequences, S positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lather.models.layers import Linear, RMSNorm
from lather.models.saving.recomputed import Recomputation
from lather.shapes import Bool, Float, Int


class MultiTokenPrediction(nn.Module):
    """The layers of a depth of multi-token prediction besides those of its block."""

    def __init__(self, hidden_size: int, rms_norm_eps: float) -> None:
        super().__init__()
        self.enorm = RMSNorm(hidden_size, rms_norm_eps)
        self.hnorm = RMSNorm(hidden_size, rms_norm_eps)
        self.eh_proj = Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = RMSNorm(hidden_size, rms_norm_eps)
        """Comes after the block, before the head."""
        self.warmed_up: set[Hashable] | None = None
        """As that of a `Block`."""

    def forward(
        self, embedded_BSD: Float[Tensor, "b s d"], state_BSD: Float[Tensor, "b s d"]
    ) -> Float[Tensor, "b s d"]:
        """Combine embeddings of later tokens with the states of the previous depth; return the
        input of the block. Backward recomputes the norms."""
        recomputation = Recomputation(
            enabled=self.eh_proj.memory != "reference", warmed_up=self.warmed_up
        )
        with recomputation.watch():
            both = self._normed(embedded_BSD, state_BSD)
            recomputation.add((both,), lambda *x: (self._normed(*x),), embedded_BSD, state_BSD)
            return self.eh_proj(both).to(state_BSD.dtype)

    def _normed(self, embedded_BSD: Tensor, state_BSD: Tensor) -> Tensor:
        return torch.cat((self.enorm(embedded_BSD), self.hnorm(state_BSD)), dim=-1)


def look_ahead(
    tokens_BS: Int[Tensor, "b s"],
    labels_BS: Int[Tensor, "b s"],
    depth: int,
    documents_BS: Int[Tensor, "b s"] | None = None,
    padding_BS: Bool[Tensor, "b s"] | None = None,
) -> tuple[Int[Tensor, "b s"], Int[Tensor, "b s"], Bool[Tensor, "b s"]]:
    """Return what a depth sees at each position: the token and the label `depth` positions later,
    and whether it sees nothing, because they are behind the end of the sequence, in another
    document, or padding. Such positions have label -100, and are padding of this depth.

    `documents_BS`: numbers of documents; None: each sequence is one. `padding_BS`: True at
    positions without a token."""

    def later(x_BS: Tensor, behind: int) -> Tensor:
        return F.pad(x_BS, (0, depth), value=behind)[:, depth:]

    if padding_BS is None:
        padding_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    missing_BS = padding_BS | later(padding_BS, True)
    if documents_BS is not None:
        missing_BS = missing_BS | (documents_BS != later(documents_BS, -1))
    return later(tokens_BS, 0), later(labels_BS, -100).masked_fill(missing_BS, -100), missing_BS
