"""A chunk, which is a micro-batch in a stage: its tokens, and what is kept of its forward pass
until its backward pass.

Letters: B sequences, S positions, E experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lather.models.token_positions import SequenceLayout
from lather.pipeline.attention_segment import SplitCut
from lather.pipeline.preference_loss import AnswerPairs
from lather.pipeline.tape import Cut, Outputs
from lather.shapes import Float, Int


@dataclass(frozen=True)
class MicroBatch:
    """Tokens and labels of one forward and backward pass, and the weights of its losses."""

    tokens_BS: Int[Tensor, "b s"]
    labels_BS: Int[Tensor, "b s"]
    layout: SequenceLayout
    """Positions, documents and padding, and the choices that routers repeat."""
    normalizer: float | Tensor = 1.0
    """Divisor of the sum of the labels' losses: the number of labels of the whole step, on all
    ranks."""
    balance_weight: float | Tensor = 0.0
    """Weight of each block's balance loss in the differentiated loss: its coefficient times this
    micro-batch's fraction of the step's tokens, on all ranks, without padding."""
    z_weight: float | Tensor = 0.0
    """Weight of each block's router z-loss, computed likewise."""
    loss_weight: float = 1.0
    """Weight of the labels' loss in the differentiated loss."""
    depths: tuple[MicroBatch, ...] = ()
    """The micro-batch as the depths of multi-token prediction see it; those not given are not
    run."""
    weights_BS: Float[Tensor, "b s"] | None = None
    """Factor of each label's nats in the sum; None: 1."""
    pairs: AnswerPairs | None = None
    """Pairs of answers, whose loss replaces that sum; `normalizer` is then their number in the
    step."""


@dataclass(frozen=True)
class RoutingSummary:
    """Statistics of a block's routing that are needed at the end of the step; nothing per token."""

    count_E: Int[Tensor, " e"]
    """Rows of this rank's tokens that each expert of the model received."""
    balance_loss: Float[Tensor, ""]
    """Without its coefficient."""


@dataclass
class BlockTape:
    """The kept state of a block between its forward and its backward pass."""

    attend: Cut | SplitCut
    experts: Cut
    shared: Cut | None = None
    losses: Outputs = ()
    """Losses of the router, detached; none in a dense block."""
    shared_rows: bool = False
    """Whether the shared experts have the normed rows for themselves (`Attended.shared_TD`)."""
    handle: Any = None
    """The handle of the dispatched tokens, which are in the cuts (`Dispatched.handle`)."""


@dataclass
class ChunkTape:
    """The kept state of a chunk between its forward and its backward pass."""

    micro_batch: MicroBatch
    embed: Cut | None = None
    """The embedding's cut; in a depth of multi-token prediction that of its input."""
    blocks: list[BlockTape] = field(default_factory=list)
    head: tuple[Cut, Tensor] | None = None
    """The head's cut, and the gradient of the differentiated loss with respect to its loss."""
    depths: list[ChunkTape] = field(default_factory=list)
    """Tapes of the depths of multi-token prediction."""
    held: list[Tensor] = field(default_factory=list)
    """Tensors that early frees would have freed; used only without early frees, see `Frees`."""
