"""One optimizer step: micro-batches forward and backward, one norm, clip, update; and what the step is made from."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lather.errors import ConfigError
from lather.models.decoder import Decoder, DecoderOutput
from lather.optim import SOAP, MatrixOptimizer, parameter_groups
from lather.shapes import Int
from lather.train.config import LoopConfig, MoEConfig, OptimConfig

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


def prepare_experts(model: Decoder, config: MoEConfig) -> None:
    """What the experts' layers keep for backward, and how their load is evened."""
    model.set_memory(config.memory)
    if config.balance_level is not None:
        model.balance_load(config.balance_level)
    for router in model.routers():
        router.takes_z_loss = config.z_loss_coefficient > 0
        if config.bias_update_rate:
            router.enable_loss_free_balancing()


def document_boundaries(tokens_BS: Int[Tensor, "b s"], end_of_text: int) -> Int[Tensor, " n"]:
    """Where documents begin and end among the B * S tokens: 0, after each `end_of_text`, B * S."""
    num_tokens = tokens_BS.numel()
    after_end = (tokens_BS.flatten() == end_of_text).nonzero().flatten() + 1
    edges = torch.tensor([0, num_tokens], device=tokens_BS.device)
    boundaries: Tensor = torch.cat((edges, after_end)).unique()
    return boundaries


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

    def __init__(
        self,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        config: LoopConfig,
        moe: MoEConfig,
        *,
        end_of_text: int | None = None,
    ) -> None:
        """`moe` as `prepare_experts` was given it. With `end_of_text`, attention stays within documents, which this token ends."""
        self.model, self.optimizer, self.config, self.moe = model, optimizer, config, moe
        self.end_of_text = end_of_text
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
            self._balance(counts_LE)
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
        for router in self.model.routers():
            router.balance.begin_step()
        for x_BS, y_BS in zip(inputs.split(size), labels.split(size), strict=True):
            share = int((y_BS != IGNORE_INDEX).sum()) / num_tokens
            output = self._forward(x_BS, y_BS, num_tokens)
            assert output.loss is not None
            (output.loss + self._auxiliary_loss(output) * share).backward()
            loss += output.loss.detach()
            balance += output.balance_loss().detach() * (share / max(1, len(output.routings)))
            counts.append(output.rows_per_expert())
        return loss, balance, torch.stack(counts).sum(0).cpu(), num_tokens

    def _forward(self, tokens_BS: Tensor, labels_BS: Tensor, normalizer: float) -> DecoderOutput:
        boundaries = None if self.end_of_text is None else document_boundaries(tokens_BS, self.end_of_text)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.precision == "bf16"):
            output: DecoderOutput = self.model(
                tokens_BS.to(self.device), labels_BS.to(self.device), cu_seqlens=boundaries, normalizer=float(normalizer)
            )
        return output

    def _auxiliary_loss(self, output: DecoderOutput) -> Tensor:
        loss = output.balance_loss() * (self.moe.balance_coefficient or 0.0)
        return loss + output.z_loss() * self.moe.z_loss_coefficient if self.moe.z_loss_coefficient else loss

    def _balance(self, counts_LE: Tensor) -> None:
        """Loss-free balancing, after a step in which the experts had these rows."""
        if self.moe.bias_update_rate:
            for router, count_E in zip(self.model.routers(), counts_LE, strict=True):
                router.update_correction_bias(count_E, self.moe.bias_update_rate)

    @torch.no_grad()
    def validation_loss(self, tokens_BS: Int[Tensor, "b s"]) -> float:
        """Mean cross entropy in nats per token over all sequences."""
        total, num_tokens = 0.0, 0
        for part in tokens_BS.split(self.config.micro_batch_size):
            loss = self._forward(part[:, :-1], part[:, 1:], 1.0).loss
            assert loss is not None
            total += loss.item()
            num_tokens += int((part[:, 1:] != IGNORE_INDEX).sum())
        return total / max(1, num_tokens)

    def _refreshes(self) -> tuple[int, int]:
        if not isinstance(self.optimizer, MatrixOptimizer):
            return 0, 0
        counters = self.optimizer.counters
        return counters["refreshes_done"], counters["refreshes_skipped"]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
