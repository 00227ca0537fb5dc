"""One optimizer step: micro-batches forward and backward, one norm, clip, update; and what the step is made from."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lather.errors import ConfigError
from lather.models.decoder import Decoder, DecoderOutput
from lather.optim import SOAP, MatrixOptimizer, parameter_groups
from lather.shapes import Float, Int
from lather.train.config import LoopConfig, OptimConfig

IGNORE_INDEX = -100
"""Label of a position that is not learned."""


def build_optimizer(config: OptimConfig, model: Decoder) -> torch.optim.Optimizer:
    """SOAP on matrices and experts with AdamW on the rest, or AdamW on everything."""
    if config.name == "adamw":
        return torch.optim.AdamW(
            model.named_parameters(), lr=config.lr, betas=config.adam_betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
    groups = parameter_groups(model)
    for group in groups:
        if group.get("max_precond_dim") == 0:
            group["betas"] = config.adam_betas
            group["max_update_rms"] = 0.0
    # A gradient that is not finite has already made the step be skipped when the optimizer is called.
    return SOAP(groups, **config.soap_options(), nonfinite="ignore")


def learning_rate(step: int, config: OptimConfig, steps: int) -> float:
    """Of step 1, 2, ..., `steps`: linear warm-up, then the schedule down to `min_lr_ratio` at the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start = config.warmup_steps if config.schedule != "wsd" else max(config.warmup_steps, round(steps * (1 - config.decay_fraction)))
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    shape = {
        "constant": 1.0,
        "linear": 1 - progress,
        "wsd": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[config.schedule]
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def pick_device(name: str) -> torch.device:
    """The device that `train.device` names; raises ConfigError if it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda', but there is no CUDA device: use 'auto' or 'cpu'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def next_token_loss(output: DecoderOutput, labels_BS: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
    """Cross entropy summed over labels that are not IGNORE_INDEX, in fp32 or wider."""
    logits_TV = output.logits_BSV.flatten(0, 1)
    wide = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(wide, labels_BS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True)
class StepResult:
    """What one step did."""

    loss: float
    balance_loss: float
    grad_norm: float
    tokens: int
    counts_LE: Tensor
    """Rows per MoE block and expert, on CPU."""
    optimizer_seconds: float
    refreshes_done: int
    refreshes_skipped: int
    skipped: bool


class TrainStep:
    """Runs optimizer steps on one device."""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, config: LoopConfig, *, balance_coefficient: float) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.balance_coefficient = balance_coefficient
        self.device = next(model.parameters()).device

    def __call__(self, tokens_BS: Int[Tensor, "b s"], lr: float) -> StepResult:
        """`tokens_BS` has one token more per sequence than is trained on. A step that is not finite changes nothing."""
        loss, balance, counts_LE, num_tokens = self._accumulate(tokens_BS)
        params = [p for p in self.model.parameters() if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        finite = bool((loss + grad_norm).isfinite())
        before = self._refreshes()
        start = self._now()
        if finite:
            if self.config.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(params, self.config.max_grad_norm, grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        seconds = self._now() - start
        self.optimizer.zero_grad(set_to_none=True)
        done, skipped = (after - earlier for after, earlier in zip(self._refreshes(), before, strict=True))
        return StepResult(loss.item(), balance.item(), grad_norm.item(), num_tokens, counts_LE, seconds, done, skipped, skipped=not finite)

    def _accumulate(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Gradients of all micro-batches. Every loss is divided by the step's own count of labels, so no gradient is divided later."""
        inputs, labels = tokens_BS[:, :-1], tokens_BS[:, 1:]
        num_tokens = max(1, int((labels != IGNORE_INDEX).sum()))
        loss, balance, counts = torch.zeros((), device=self.device), torch.zeros((), device=self.device), []
        size = self.config.micro_batch_size
        for x_BS, y_BS in zip(inputs.split(size), labels.split(size), strict=True):
            share = int((y_BS != IGNORE_INDEX).sum()) / num_tokens
            with self._autocast():
                output = self.model(x_BS.to(self.device))
            micro_loss = next_token_loss(output, y_BS.to(self.device)) / num_tokens
            micro_balance = output.balance_loss()
            (micro_loss + micro_balance * (self.balance_coefficient * share)).backward()
            loss += micro_loss.detach()
            balance += micro_balance.detach() * (share / max(1, len(output.routings)))
            counts.append(output.rows_per_expert())
        return loss, balance, torch.stack(counts).sum(0).cpu(), num_tokens

    @torch.no_grad()
    def validation_loss(self, tokens_BS: Int[Tensor, "b s"]) -> float:
        """Mean cross entropy in nats per token over all sequences."""
        total, num_tokens = 0.0, 0
        for part in tokens_BS.split(self.config.micro_batch_size):
            with self._autocast():
                output = self.model(part[:, :-1].to(self.device))
            total += next_token_loss(output, part[:, 1:].to(self.device)).item()
            num_tokens += int((part[:, 1:] != IGNORE_INDEX).sum())
        return total / max(1, num_tokens)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16")

    def _refreshes(self) -> tuple[int, int]:
        if not isinstance(self.optimizer, MatrixOptimizer):
            return 0, 0
        counters = self.optimizer.counters
        return counters["refreshes_done"], counters["refreshes_skipped"]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
