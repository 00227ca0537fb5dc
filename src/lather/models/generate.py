"""Sampling text from a decoder, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from lather.models.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: list[int],
    num_tokens: int,
    *,
    context: int,
    temperature: float = 0.7,
    top_k: int = 50,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> list[int]:
    """Up to `num_tokens` tokens that continue `prompt` (at least one token), ending before `stop_token`.

    The model reads the last `context` tokens anew for every token; there is no key-value cache, so this is for looking at a model, not
    for serving it. `temperature` 0 takes the most likely token; `top_k` 0 samples from the whole vocabulary. `generator` is on CPU.

    Raises ValueError for an empty prompt or a context below 1.
    """
    if not prompt:
        raise ValueError("prompt is empty: give at least one token")
    if context < 1:
        raise ValueError(f"context = {context} is not valid: give at least 1 token")
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        logits_V = model(window).logits_BSV[0, -1].float().cpu()
        token = int(logits_V.argmax()) if temperature == 0 else _sample(logits_V / temperature, top_k, generator)
        if token == stop_token:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def _sample(logits_V: Tensor, top_k: int, generator: torch.Generator | None) -> int:
    logits_K, tokens_K = logits_V.topk(top_k if 0 < top_k < len(logits_V) else len(logits_V))
    return int(tokens_K[torch.multinomial(logits_K.softmax(-1), 1, generator=generator)])
