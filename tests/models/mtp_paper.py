"""Computes the losses of a model with multi-token prediction from section 2.2 of DeepSeek-V3's
report (arXiv:2412.19437), document by document, on sequences that become shorter from depth to
depth: without masks, padding and packing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.models.block import Block
from lather.models.decoder import Decoder
from lather.models.token_positions import SequenceLayout

Span = tuple[int, int, int]
"""Row, first and last position + 1 of a document's tokens."""


@dataclass
class PaperLosses:
    """Sums over labels, and their numbers, for the main model and then for each depth."""

    sums: list[Tensor]
    numbers: list[int]
    rows: list[int] = field(default_factory=list)
    """Numbers of tokens at each depth."""

    def mean(self, depth: int) -> Tensor:
        return self.sums[depth] / max(1, self.numbers[depth])

    def total(self, weight: float) -> Tensor:
        """Equations 24 and 25, with the mean over the labels that exist."""
        depths = range(1, len(self.sums))
        return self.mean(0) + weight / len(depths) * torch.stack([*map(self.mean, depths)]).sum()


def paper_losses(
    model: Decoder, tokens_BS: Tensor, labels_BS: Tensor, documents: Iterable[Span]
) -> PaperLosses:
    """`labels_BS[b, s]`: the token after `tokens_BS[b, s]`, or -100."""
    main = [block for block in model.layers if block.mtp is None]
    mtp_blocks = [block for block in model.layers if block.mtp is not None]
    zero = torch.zeros((), dtype=model.norm.weight.dtype)
    num = 1 + len(mtp_blocks)
    found = PaperLosses([zero] * num, [0] * num, [0] * num)

    def add(depth: int, h_TD: Tensor, labels_T: Tensor) -> None:
        log_p_TV = (h_TD @ model.lm_head.weight.T).log_softmax(-1)
        learned_T = labels_T != -100
        picked_T = log_p_TV[learned_T].gather(1, labels_T[learned_T, None])
        found.sums[depth] = found.sums[depth] - picked_T.sum()
        found.numbers[depth] += int(learned_T.sum())
        found.rows[depth] += len(h_TD)

    for row, start, stop in documents:
        t_T, labels_T = tokens_BS[row, start:stop], labels_BS[row, start:stop]
        h_TD = model.embed_tokens.weight[t_T]
        for block in main:
            h_TD = _through(block, h_TD)
        h_TD = _rms(h_TD, model.norm.weight, model.norm.eps)
        add(0, h_TD, labels_T)
        for k, block in enumerate(mtp_blocks, start=1):
            if len(t_T) <= k:
                break
            mtp = block.mtp
            assert mtp is not None
            e_TD = _rms(model.embed_tokens.weight[t_T[k:]], mtp.enorm.weight, mtp.enorm.eps)
            h_TD = _rms(h_TD[: len(t_T) - k], mtp.hnorm.weight, mtp.hnorm.eps)
            h_TD = F.linear(torch.cat([e_TD, h_TD], 1), mtp.eh_proj.weight)
            h_TD = _rms(_through(block, h_TD), mtp.norm.weight, mtp.norm.eps)
            add(k, h_TD, labels_T[k:])
    return found


def _through(block: Block, x_TD: Tensor) -> Tensor:
    """Run a block on one sequence; blocks are tested against transformers."""
    layout = SequenceLayout(1, len(x_TD), x_TD.device)
    output_1TD: Tensor = block(x_TD.unsqueeze(0), layout)[0]
    return output_1TD[0]


def _rms(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_TD * (x_TD.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight_D
