"""Train a policy on rewards: sample answers, reward them, and take a step with their advantages.

    python examples/policy_gradient.py [STEPS]        (some seconds on a CPU)

The policy is a toy Qwen3-MoE with random weights; the reward of an answer is the share of its
tokens that are of the kind of its prompt: odd after an odd token, even after an even one. The
advantage of an answer is its reward less the mean of the answers to the same prompt, in their
standard deviations (GRPO, arXiv:2402.03300). A step trains each token by its nats times the
advantage (docs/after-pretraining.md), and sends it to the experts that it went to when it was
sampled. On a mesh, or with another engine that samples, the loop is the same: `live_weights` gives
it the weights, and it gives the routing.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from lather.config.config import Config
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.engine.engine import Engine, build_engine, build_model
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.evaluation.token_scores import score_tokens
from lather.models import FAMILIES
from lather.models.decoder import Decoder
from lather.models.generate import Continuations, Sampling
from lather.parallel.mesh import Mesh

PROMPTS, ANSWERS, LENGTH = 8, 8, 8
"""Prompts, each of one token; answers to each in a step; tokens of an answer."""
MODEL = FAMILIES["qwen3_moe"].config(
    vocab_size=257,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    num_experts_per_tok=2,
)
LOOP = LoopConfig(batch_size=PROMPTS * ANSWERS, sequence_length=LENGTH)
CONFIG = Config(model=MODEL, train=LOOP, optim=optim_config("muon"))
RATE = 2e-2


@torch.no_grad()
def copy_weights(engine: Engine, policy: Decoder) -> None:
    parameters = dict(policy.named_parameters())
    for entry in engine.parameters:  # a single rank has all rows of all parameters
        parameters[entry.info.name].copy_(entry.parameter)


def sample(policy: Decoder, seed: int) -> Tensor:
    """Return prompts with their answers, (sequences, 1 + LENGTH)."""
    prompts = [[prompt] for prompt in range(PROMPTS) for _ in range(ANSWERS)]
    rows = Continuations(
        policy,
        prompts,
        context=LENGTH + 1,
        sampling=Sampling(temperature=1.0, top_k=0),
        generators=[torch.Generator().manual_seed(seed)] * len(prompts),
    )
    for _ in range(LENGTH):
        rows.step()
    return torch.tensor(rows.tokens)


def rewards(tokens: Tensor) -> Tensor:
    return (tokens[:, 1:] % 2 == tokens[:, :1] % 2).float().mean(1)


def batch_of(policy: Decoder, tokens: Tensor, reward: Tensor) -> Batch:
    of_prompt = reward.view(PROMPTS, ANSWERS)
    deviation = of_prompt.std(1, keepdim=True) + 1e-4
    advantages = ((of_prompt - of_prompt.mean(1, keepdim=True)) / deviation).flatten()
    scores = list(score_tokens(policy, tokens.tolist(), batch_size=len(tokens)))
    columns = {
        "weights": advantages[:, None].expand(-1, LENGTH).contiguous(),
        "routing": torch.stack([scored.routing_TLK[:-1] for scored in scores]),
    }
    return Batch(tokens[:, :-1], tokens[:, 1:], columns=columns)


def main(steps: int) -> None:
    engine = build_engine(CONFIG, Mesh.single(torch.device("cpu")))
    policy = build_model(CONFIG, torch.device("cpu")).eval()
    step = TrainStep(engine, build_optimizer(CONFIG.optim, engine.parameters), max_grad_norm=1.0)
    for number in range(1, steps + 1):
        copy_weights(engine, policy)
        tokens = sample(policy, seed=number)
        reward = rewards(tokens)
        result = step(batch_of(policy, tokens, reward), lr=RATE)
        if number % 10 == 1 or number == steps:
            print(f"step {number:3}  reward {reward.mean():.3f}  gradient {result.grad_norm:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
