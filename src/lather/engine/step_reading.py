"""Collects on the device the values that the host reads in a step, and reads them with one
all-reduce and one wait for the device."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lather.device import Read, read
from lather.optim.batched.gradients import GradientNorms
from lather.parallel.local_parameters import LocalParameters, squared_norm
from lather.parallel.mesh import Mesh
from lather.pipeline.model_part import ModelPart
from lather.profiled import profiled
from lather.shapes import Float, Int

NO_LABELS, NOT_FINITE = "no token to learn", "loss or gradient not finite"
SPIKE, LEFT_OUT = "a spike", "left out by train.skip_steps"
"""Reasons for which a step changes nothing."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step; the same on all ranks, but for the seconds."""

    loss: float
    """Cross entropy in nats, averaged over labels; NaN if there are none."""
    mtp_loss: float
    """Cross entropy of multi-token prediction, averaged over its labels, and over depths; NaN if
    there are none."""
    balance_loss: float
    """Average over MoE blocks and, weighted by tokens, over micro-batches; without its
    coefficient."""
    counts_LE: Int[Tensor, "l e"]
    """Rows per MoE block and expert, on the CPU."""
    tokens: int
    """Number of labels."""
    logits_AH: Float[Tensor, "a h"] | None = None
    """The largest logit of each head of the attention layers `ModelPart.measured`, on the CPU; None
    if they were not measured."""
    grad_norm: float = math.nan
    """Norm of all gradients before clipping; NaN if it was not measured."""
    optimizer_seconds: float = 0.0
    refreshes_done: int = 0
    """Refreshes since the previous step; with `optim.async_refresh` that step started them."""
    refreshes_skipped: int = 0
    skip_reason: str = ""
    """Why the step changed nothing; empty if it took place."""

    @property
    def skipped(self) -> bool:
        """Whether the step changed nothing."""
        return bool(self.skip_reason)


class StepReading:
    """Collects what the host reads in a step, on the device, in fp64."""

    losses: Float[Tensor, " n"]
    """This rank's parts of the balance loss, of the cross entropy, and of those of multi-token
    prediction by depth, which all ranks add up."""
    counts_LE: Float[Tensor, "l e"]
    """This rank's rows per MoE block and expert, which all ranks add up."""
    logits_AH: Float[Tensor, "a h"]
    """This rank's largest logit of each head, or -inf; all ranks take the maximum. No rows if they
    are not measured."""

    def __init__(
        self,
        part: ModelPart,
        parameters: LocalParameters,
        mesh: Mesh,
        num_labels: int,
        *,
        with_logits: bool = False,
    ) -> None:
        """Begin with losses, loads and a norm of zero. `num_labels`: of all ranks."""
        self._parameters, self._mesh, self._num_labels = parameters, mesh, num_labels
        shape = len(part.moe_layers), part.num_experts
        num_losses = 2 + len(part.mtp_layers)
        self._passes = torch.zeros(
            num_losses + math.prod(shape), dtype=torch.float64, device=mesh.device
        )
        self.losses = self._passes[:num_losses]
        self.counts_LE = self._passes[num_losses:].view(shape)
        rows = len(part.measured) if with_logits else 0
        heads = max(part.measured.values(), default=0)
        self.logits_AH = self._passes.new_full((rows, heads), -math.inf)
        self._square = self._norms = self._passes.new_zeros(0)

    def add_gradients(self, norms: GradientNorms) -> None:
        """Add the norm of all gradients, and the values of `norms`, which the optimizer measured
        and this rank alone reads."""
        square = squared_norm(self._parameters, self._mesh, norms.of_parameter)
        self._square, values = square[None], norms.values
        if len(values):
            self._norms = values.to(square.device)

    def read(self) -> tuple[StepResult, Tensor]:
        """Return the result of all ranks, and the values of the norms that were added, on the host.

        All ranks call it together.
        """
        total = torch.cat((self._passes, self._square))
        logits = self.logits_AH.flatten()
        if self._mesh.size > 1:
            with profiled("wait"):
                dist.all_reduce(total)
                if len(logits):
                    dist.all_reduce(logits, dist.ReduceOp.MAX)
        parts = (self.losses, self.counts_LE, self._square, logits, self._norms)
        values = read(torch.cat((total, logits, self._norms)), Read.STEP)
        losses, counts, square, logits, norms = values.split([part.numel() for part in parts])
        balance_loss, loss, *mtp_losses = losses.tolist()
        norm = square.sqrt().to(self._parameters.norm_dtype)
        result = StepResult(
            loss=loss if self._num_labels else math.nan,
            mtp_loss=statistics.fmean(mtp_losses) if mtp_losses else math.nan,
            balance_loss=balance_loss,
            counts_LE=counts.view(self.counts_LE.shape).long(),
            tokens=self._num_labels,
            logits_AH=logits.view(self.logits_AH.shape) if len(logits) else None,
            grad_norm=norm.item() if len(norm) else math.nan,
        )
        return result, norms
