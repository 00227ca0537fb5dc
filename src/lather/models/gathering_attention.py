"""Attention layers that context ranks cut in two, where they exchange what keys and values are made
of: before it each rank projects its own tokens, after it they attend to those of all ranks.

Letters: B sequences, S positions of a rank, T = C * S positions of all C context ranks, D hidden
size, H heads, U width of a head's value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lather.models.attention_logits import MeasuredAttention
from lather.models.layers import NormedRows
from lather.models.saving.recomputed import Recomputation
from lather.models.token_positions import SequenceLayout
from lather.shapes import Float


@dataclass(frozen=True)
class Projected:
    """The results of the first part of a layer, which the second takes."""

    own: tuple[Tensor, ...]
    """Tensors (B, S, ...) for the queries of this rank, in the dtype in which they are used."""
    shared: tuple[Tensor, ...]
    """Tensors of which keys and values are made, of one dtype: (B, S, ...) from the first part, (B,
    T, ...) for the second."""


class GatheringAttention(MeasuredAttention):
    """An attention layer in two parts; `gather_and_attend` is the reference for those who run them
    one by one (`lather.pipeline.attention_segment`)."""

    def project(
        self, x_BSD: NormedRows, layout: SequenceLayout, recomputation: Recomputation
    ) -> Projected:
        """Run the first part."""
        raise NotImplementedError

    def attend_to_all(
        self, projected: Projected, layout: SequenceLayout, recomputation: Recomputation
    ) -> Float[Tensor, "b s d"]:
        """Run the second part, whose `projected.shared` are those of all ranks."""
        raise NotImplementedError

    @property
    def weights_of_all(self) -> tuple[Tensor, ...]:
        """The weights that multiply tokens of all ranks. The operands of their gradients are of
        whole sequences, so these gradients should not be deferred."""
        return ()

    def gather_and_attend(
        self, x_BSD: NormedRows, layout: SequenceLayout, recomputation: Recomputation
    ) -> Float[Tensor, "b s d"]:
        """Run the whole layer. Backward gathers again, unless the context keeps what it gathers."""
        context = layout.context
        assert context is not None
        projected = self.project(x_BSD, layout, recomputation)
        shared = context.gather(projected.shared)
        if not context.keeps_gathered:
            recomputation.add(shared, lambda *shared: context.gather(shared), *projected.shared)
        return self.attend_to_all(replace(projected, shared=shared), layout, recomputation)


def side_by_side(
    attended_BSHU: Float[Tensor, "b s h u"], recomputation: Recomputation
) -> Float[Tensor, "b s x"]:
    """Return the heads' outputs side by side, (B, S, H * U). Attention saves its output anyway;
    this reordered copy is recomputed from it."""
    side_by_side = attended_BSHU.flatten(2)
    recomputation.add(
        (side_by_side,), lambda attended_BSHU: (attended_BSHU.flatten(2),), attended_BSHU
    )
    return side_by_side
