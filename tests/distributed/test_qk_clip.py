"""QK-clip on meshes: after some steps of Muon every parameter is that of one process, whose logits
and clipping are computed here, head by head."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from engines import Case, Pair, make_pair
from ranks import run_ranks
from torch import Tensor

from lather.config.optim import optim_config
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.models import attention, latent_attention
from lather.models.attention import GroupedQueryAttention
from lather.models.latent_attention import MultiHeadLatentAttention
from lather.models.token_positions import SequenceLayout

RATE = 0.05
THRESHOLD = 0.7
CASES = [
    Case(pp=2, ep=2, recompute=("attention",), changes={"q_lora_rank": 9}),
    Case(replicas=2, layers=2),
    Case(family="gpt_oss", layers=2, poison=True),
    Case(cp=2, layers=2, length=8),
    Case(cp=4, family="gpt_oss", layers=2, length=16, num_micro_batches=4),
]


def plain_step(pair: Pair, tokens: Tensor) -> Tensor:
    """Give the plain model its gradients; return its largest logits (layers, heads)."""
    attend = attention.attend
    layers = pair.case.layers
    logits: list[Tensor] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, **options: Any) -> Tensor:
        scale = options.get("scale") or q.shape[-1] ** -0.5
        key_BTHN = k.detach().repeat_interleave(q.shape[2] // k.shape[2], 2)
        logits_HST = scale * torch.einsum("bshn,bthn->hst", q.detach(), key_BTHN)
        position = torch.arange(q.shape[1])
        distance_ST = position[:, None] - position
        hidden_ST = (distance_ST < 0) | (distance_ST >= (options.get("window") or 99))
        logits.append(logits_HST.masked_fill(hidden_ST, -torch.inf).amax((1, 2)))
        return attend(q, k, v, layout, **options)

    with patch.object(attention, "attend", spy), patch.object(latent_attention, "attend", spy):
        pair.plain_gradients(tokens)
    largest: list[Any] = [
        torch.stack(logits).unflatten(0, (-1, layers)).amax(0) if dist.get_rank() == 0 else None
    ]
    dist.broadcast_object_list(largest, 0)
    result: Tensor = largest[0]
    return result


@torch.no_grad()
def clip(layer: Any, logits: list[float]) -> None:
    """Clip the heads of a layer."""
    gammas = [min(1.0, THRESHOLD / logit) if logit > 0 else 1.0 for logit in logits]
    if isinstance(layer, MultiHeadLatentAttention):
        nope, rotary = layer.nope, layer.rotary.size
        query = layer.q_proj if layer.q_lora_rank is None else layer.q_b_proj
        for head, gamma in enumerate(gammas):
            start = head * (nope + rotary)
            query.weight[start : start + nope] *= gamma**0.5
            query.weight[start + nope : start + nope + rotary] *= gamma
            start = head * len(layer.kv_b_proj.weight) // len(gammas)
            layer.kv_b_proj.weight[start : start + nope] *= gamma**0.5
        return
    assert isinstance(layer, GroupedQueryAttention)
    width = layer.head_dim
    of_group = len(gammas) // (len(layer.k_proj.weight) // width)
    for group in range(len(gammas) // of_group):
        heads = range(group * of_group, (group + 1) * of_group)
        of_key = max(gammas[head] for head in heads) ** 0.5
        for p in layer.k_proj.parameters():
            p[group * width : (group + 1) * width] *= of_key
        for head in heads:
            for p in layer.q_proj.parameters():
                p[head * width : (head + 1) * width] *= gammas[head] / of_key


def errors_after_steps(rank: int, world_size: int) -> list[tuple[float, float, int]]:
    """Return for each case the errors of this rank's parameters and of the last step's logits, and
    the number of heads that one process clipped."""
    errors = []
    for case in CASES:
        pair = make_pair(case)
        config = optim_config("muon", lr=RATE, rest={"lr_factor": 1.0})
        optimizer = build_optimizer(config, pair.engine.parameters)
        step = TrainStep(pair.engine, optimizer, max_grad_norm=0.5, qk_clip=THRESHOLD)
        plain = build_optimizer(config, pair.plain.named_parameters())
        num_clipped = 0
        for number in range(3):
            tokens = pair.tokens(number)
            result = step(pair.share_of(tokens), RATE)
            assert not result.skipped
            logits_AH = plain_step(pair, tokens)
            torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)
            for group in plain.param_groups:
                group["lr"] = RATE
            plain.step()
            plain.zero_grad()
            for block, logits_H in zip(pair.plain.layers, logits_AH.tolist(), strict=True):
                clip(block.self_attn, logits_H)
            num_clipped += int((logits_AH > THRESHOLD).sum())
        assert result.logits_AH is not None
        difference = ((result.logits_AH - logits_AH) / logits_AH).abs().max().item()
        errors.append((pair.largest_error("value"), difference, num_clipped))
    return errors


def test_clipped_heads_are_those_of_one_process() -> None:
    for rank, errors in enumerate(run_ranks(errors_after_steps, 4, timeout=220)):
        for case, (value, logits, num_clipped) in zip(CASES, errors, strict=True):
            heads = 3 * case.layers * (6 if case.family == "gpt_oss" else 3)
            assert heads // 5 < num_clipped < heads, (case.name(), num_clipped)
            assert value < 1e-10, (rank, case.name(), value)
            assert logits < 1e-10, (rank, case.name(), logits)
