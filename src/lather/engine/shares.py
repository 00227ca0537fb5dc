"""The shares of global batches that a data rank has, divided into micro-batches.

Losses are sums divided by the number of labels, or of pairs, on all ranks. The auxiliary losses of
the routers are means over tokens: a micro-batch counts by its share of the tokens on all ranks,
whatever its labels. Padding is no token. Each depth of multi-token prediction has labels and tokens
of its own, by which its losses are averaged.

Letters: B sequences, S positions, N depths of multi-token prediction, M micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lather.config.config import MoEConfig
from lather.config.loop import LoopConfig
from lather.data.batches import Batch
from lather.device import Read, read, to_device
from lather.engine.micro_batch_columns import (
    check_columns,
    learned_pairs,
    num_pairs_of,
    with_columns,
)
from lather.models.document_boundaries import document_boundaries
from lather.models.token_positions import SequenceLayout
from lather.parallel.mesh import Mesh
from lather.pipeline.chunk import MicroBatch
from lather.pipeline.model_part import ModelPart
from lather.shapes import Float


class DividedShare(NamedTuple):
    """A share of a global batch, divided."""

    num_labels: int
    """Number of labels on all ranks."""
    micro_batches: list[MicroBatch]
    weights: list[float]
    """Weights of the micro-batches in the auxiliary losses."""
    weights_of_depths: list[Float[Tensor, " m"]]
    """The same for each depth of multi-token prediction, on the device."""


class Shares:
    """Divides the shares that this rank's data rank has of the global batches of a run."""

    def __init__(
        self, part: ModelPart, mesh: Mesh, loop: LoopConfig, moe: MoEConfig, num_micro_batches: int
    ) -> None:
        """`moe`: with its coefficients resolved; `num_micro_batches`: of a whole share."""
        self._part, self._mesh, self._moe = part, mesh, moe
        self.micro_batch_size = loop.batch_size // (mesh.data_size * num_micro_batches)
        self._size = self.micro_batch_size * num_micro_batches
        self._first_size = loop.first_batch_size // mesh.data_size
        self._length = loop.sequence_length
        self._mtp_loss_weight, self.dpo_beta = loop.mtp_loss_weight, loop.dpo_beta
        self._layout = SequenceLayout(
            self.micro_batch_size, self._length, mesh.device, context=mesh.context
        )

    def divide(self, batch: Batch) -> DividedShare:
        """Divide a share.

        Raises ValueError, before anything is sent, if the share has another shape than the run's,
        and DataError if its routing is not one of the model.
        """
        check_columns(batch, self._part, self.dpo_beta)
        num_labels, num_tokens = self.counts_of_all(batch)
        parts, normalizer = batch.tokens_of_parts(self.micro_batch_size), num_labels
        if self.dpo_beta:
            batch = replace(batch, columns=learned_pairs(batch.columns, batch.labels_BS))
            (normalizer,) = self._sums_of_ranks(num_pairs_of(batch.columns))
        weights = [tokens / max(1, num_tokens) for tokens in parts]
        micro_batches = self.micro_batches(batch, float(max(1, normalizer)), weights)
        micro_batches, weights_of_depths = self._with_depths(batch, micro_batches)
        return DividedShare(num_labels, micro_batches, weights, weights_of_depths)

    def rehearsed(self, batch: Batch) -> tuple[MicroBatch, MicroBatch]:
        """Return two micro-batches of a share whose losses are not averaged: the first without
        padding, the second with it. Raises as `divide` does."""
        self._check(batch)
        check_columns(batch, self._part, self.dpo_beta)
        batch = replace(batch, padding_BS=None)
        weights = [1.0] * (len(batch.inputs_BS) // self.micro_batch_size)
        micro_batches = self.micro_batches(batch, 1.0, weights)
        first, second, *_ = self._with_depths(batch, micro_batches)[0]
        padding_BS = torch.zeros(self.micro_batch_size, self._length, dtype=torch.bool)
        padding_BS[-1, -1] = True
        return first, replace(second, layout=second.layout.with_padding(padding_BS))

    def counts_of_all(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of labels and tokens of the global batch of a step, the same on all
        ranks. The ranks add up the numbers that this rank's share lacks.

        Raises ValueError, before anything is sent, if the share has another shape than the run's.
        """
        self._check(batch)
        return self.add_up(batch)

    def _check(self, batch: Batch) -> None:
        """Check the shape of a share, which is a multiple of the first one while batches grow."""
        first, size = self._first_size, len(batch.inputs_BS)
        is_part = first > 0 and 0 < size < self._size and size % first == 0
        self.check_shape(batch, size if is_part else self._size)

    def check_shape(self, batch: Batch, num_sequences: int) -> None:
        """Raise ValueError unless the batch has so many sequences of the length of the run."""
        expected = (num_sequences, self._length)
        columns = {"inputs": batch.inputs_BS, "labels": batch.labels_BS, **batch.columns}
        for name, x_BS in columns.items():
            if tuple(x_BS.shape[:2]) != expected:
                raise ValueError(
                    f"the batch's {name} have shape {tuple(x_BS.shape)}, not {expected}: give "
                    "every data rank its own share of the sequences, each of train.sequence_length"
                )

    def add_up(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of labels and tokens of a batch on all ranks."""
        if batch.labels_of_all is not None and batch.tokens_of_all is not None:
            return batch.labels_of_all, batch.tokens_of_all
        num_labels, num_tokens = self._sums_of_ranks(batch.num_labels, batch.num_tokens)
        return num_labels, num_tokens

    def _sums_of_ranks(self, *of_share: int) -> tuple[int, ...]:
        """Return the sums over data ranks of numbers of their shares."""
        if self._mesh.data_size == 1:  # context ranks have the same share
            return of_share
        total = torch.tensor(of_share, device=self._mesh.device)
        dist.all_reduce(total, group=self._mesh.data_group)
        return tuple((read(total, Read.COUNTS) // self._mesh.cp).tolist())

    def micro_batches(
        self,
        batch: Batch,
        normalizer: float | Tensor,
        weights: Sequence[float | Tensor],
        layouts: Sequence[SequenceLayout] = (),
    ) -> list[MicroBatch]:
        """Divide a batch, and take this rank's slices of its sequences. `weights`: those of its
        micro-batches in the auxiliary losses; `layouts`: those of its documents, if they exist
        already."""
        context = self._mesh.context
        size, length, device = self.micro_batch_size, batch.inputs_BS.shape[1], self._mesh.device
        if not layouts and batch.begins_BS is not None:
            layouts = [
                SequenceLayout(size, length, device, document_boundaries(begins), context=context)
                for begins in batch.begins_BS.split(size)
            ]
        # without documents masks and rotary tables are the same for all
        layouts = layouts or [self._layout] * len(weights)
        if batch.padding_BS is not None:
            paddings = batch.padding_BS.split(size)
            layouts = [
                layout.with_padding(padding_BS)
                for layout, padding_BS in zip(layouts, paddings, strict=True)
            ]
        whole = batch.inputs_BS, batch.labels_BS
        local = whole if context is None else map(context.local, whole)
        on_device = (to_device(x_BS, device).split(size) for x_BS in local)
        balance, z_loss = self._moe.balance_coefficient or 0.0, self._moe.z_loss_coefficient
        micro_batches = [
            MicroBatch(x_BS, y_BS, layout, normalizer, balance * weight, z_loss * weight)
            for x_BS, y_BS, layout, weight in zip(*on_device, layouts, weights, strict=True)
        ]
        sources = batch.columns, self._part, context, device
        return with_columns(micro_batches, *sources, dpo_beta=self.dpo_beta)

    def _with_depths(
        self, batch: Batch, micro_batches: list[MicroBatch]
    ) -> tuple[list[MicroBatch], list[Tensor]]:
        """Add what the depths of multi-token prediction see; return also each depth's weights of
        the micro-batches in the auxiliary losses. The numbers of labels and tokens, on all ranks,
        stay on the device."""
        num_depths, device = len(self._part.mtp_layers), self._mesh.device
        if not num_depths:
            return micro_batches, []
        batches = [batch.ahead(depth + 1) for depth in range(num_depths)]
        counts = torch.tensor([(each.num_labels, each.num_tokens) for each in batches])
        counts_N2 = to_device(counts, device)
        if self._mesh.data_size > 1:
            dist.all_reduce(counts_N2, group=self._mesh.data_group)
            counts_N2 //= self._mesh.cp  # context ranks have the same share
        layouts = [each.layout for each in micro_batches]
        depths, weights_DM = [], []
        for each, (num_labels, num_tokens) in zip(batches, counts_N2.clamp(min=1), strict=True):
            parts = torch.tensor(each.tokens_of_parts(self.micro_batch_size), dtype=torch.float64)
            weights_DM.append(to_device(parts, device) / num_tokens)
            weights = weights_DM[-1].unbind()
            depths.append(self.micro_batches(each, num_labels, weights, layouts))
        loss_weight = self._mtp_loss_weight / num_depths
        return [
            replace(
                each, depths=tuple(replace(depth, loss_weight=loss_weight) for depth in of_each)
            )
            for each, *of_each in zip(micro_batches, *depths, strict=True)
        ], weights_DM
