"""TRL's DPOTrainer and SFTTrainer: Lather's DPO and log-probabilities are TRL's, and Lather's
optimizers take their steps in TRL's trainers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.integrations
pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")

import hf_trainer_muon as example
from comparing import Weights, assert_same_training, weights_of
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lather.cli import main
from lather.files import read_rows
from lather.optim import AdamW, Muon, parameter_groups
from tiny_run import write_config

BETA, STEPS, PAIRS = 0.3, 4, 6
LR, EPS = 1e-2, 0.01
"""With so large an eps the step depends on the gradient's scale."""
MODEL = {
    "model-type": "qwen3_moe",
    "num-attention-heads": 2,
    "num-key-value-heads": 1,
    "head-dim": 8,
    "num-experts": 4,
    "num-experts-per-tok": 2,
    "router-aux-loss-coef": 0.0,
}
"""Changes to `tiny_run`'s model."""
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
}
"""Fields of `tiny_run`'s model that this one has, too."""
QUIET = {
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
Pair = dict[str, list[int]]


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def lather(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def flags(values: dict[str, Any], section: str = "") -> list[str]:
    return [word for key, x in values.items() for word in (f"--{section}{key}", str(x))]


def draw_pairs() -> list[Pair]:
    """Draw prompts and answers of several lengths, of which no two pairs fit in 16 tokens."""
    draw = random.Random(0)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(10, 250) for _ in range(draw.randint(low, high))]

    return [
        {"prompt_ids": tokens(2, 3), "chosen_ids": tokens(3, 5), "rejected_ids": tokens(2, 5)}
        for _ in range(PAIRS)
    ]


def rows_of(pair: Pair) -> dict[str, Any]:
    prompt, names = pair["prompt_ids"], ("chosen", "rejected")
    return {
        name: {
            "tokens": prompt + pair[f"{name}_ids"],
            "weights": [0] * len(prompt) + [1] * len(pair[f"{name}_ids"]),
        }
        for name in names
    }


def answer_logprobs(path: Path) -> torch.Tensor:
    """Return the log-probabilities of the chosen and the rejected answers of a scored file, in two
    columns."""
    return torch.tensor(
        [
            [
                sum(x for x, w in zip(row["logprobs"], row["weights"], strict=True) if w)
                for row in (line["chosen"], line["rejected"])
            ]
            for line in map(json.loads, path.read_text().splitlines())
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model a little, score the pairs with it, and tune it by DPO: all pairs in each
    step."""
    folder = tmp_path_factory.mktemp("trl")
    config, pairs = write_config(folder, steps=3), folder / "pairs.jsonl"
    kept = config.read_text().partition("[data]")
    sizes = [line for line in kept[0].splitlines() if line.split(" ")[0] in SIZES]
    config.write_text("\n".join(["[model]", *sizes, "", "".join(kept[1:])]))
    model = flags(MODEL, "model.")
    lather("train", config, "--run-dir", folder / "base", *model, "--log.sample-tokens", 0)
    lather("export", folder / "base", folder / "exported", "--dtype", "fp32")
    pairs.write_text("\n".join(json.dumps(rows_of(pair)) for pair in draw_pairs()))
    lather("score", folder / "base", pairs, folder / "scored.jsonl")
    made = ["--token-rows", "--vocab-size", 300, "--holdout-every", 0, "--workers", 1]
    lather("data", "make", folder / "pairs", folder / "scored.jsonl", *made)
    changes = {
        "init-from": folder / "base",
        "run-dir": folder / "tuned",
        "data.path": folder / "pairs",
        "data.packing": "documents",
        "train.steps": STEPS,
        "train.batch-size": PAIRS,
        "train.micro-batch-size": 2,
        "train.dpo-beta": BETA,
        "train.max-grad-norm": 9,
        "optim.name": "adamw",
        "optim.lr": LR,
        "optim.rest.lr": LR,
        "optim.eps": EPS,
        "optim.weight-decay": 0.1,
        "optim.schedule": "constant",
        "optim.warmup-steps": 0,
        "log.sample-tokens": 0,
    }
    lather("train", config, *model, *flags(changes))
    lather("score", folder / "tuned", pairs, folder / "after.jsonl")
    return folder


class TokensGiven(DPOTrainer):  # type: ignore[misc]
    """TRL's trainer on pairs that are tokens already."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "exported/tokenizer.json"))
    made.pad_token = made.eos_token = made.convert_ids_to_tokens(0)
    return made


def test_dpo_is_trls(folder: Path) -> None:
    """References, losses of all steps, and the margin after them."""
    model = AutoModelForCausalLM.from_pretrained(folder / "exported", dtype=torch.float32)
    changes = {"learning_rate": LR, "max_grad_norm": 9.0, "per_device_train_batch_size": PAIRS}
    pairs = Dataset.from_list(draw_pairs())
    trainer = TokensGiven(
        model,
        args=DPOConfig(
            str(folder / "trl"), beta=BETA, precompute_ref_log_probs=True, **QUIET, **changes
        ),
        train_dataset=pairs,
        eval_dataset=pairs,
        processing_class=tokenizer(folder),
        optimizers=(AdamW(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1), None),
    )
    reference = answer_logprobs(folder / "scored.jsonl")
    columns = ("ref_chosen_logps", "ref_rejected_logps")
    theirs = torch.tensor([trainer.train_dataset[name] for name in columns]).T
    torch.testing.assert_close(reference, theirs, rtol=2e-6, atol=0)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    rows = [row["loss"] for row in read_rows(folder / "tuned/metrics.jsonl") if "loss" in row]
    assert rows == pytest.approx([float(loss) for loss in losses], rel=1e-4)  # theirs are rounded
    assert rows[-1] < 0.9 * rows[0]
    after = answer_logprobs(folder / "after.jsonl")
    chosen, rejected = (BETA * (after - reference)).mean(0).tolist()
    measured = trainer.evaluate()
    assert chosen == pytest.approx(measured["eval_rewards/chosen"], rel=1e-4)
    assert rejected == pytest.approx(measured["eval_rewards/rejected"], rel=1e-4)
    assert chosen - rejected == pytest.approx(measured["eval_rewards/margins"], rel=1e-4)
    assert after.mean(0)[0].item() == pytest.approx(measured["eval_logps/chosen"], rel=1e-5)


def optimizer_of(model: torch.nn.Module, factor: float = 1.0) -> Muon:
    return Muon(parameter_groups(model, rest_lr=factor * 3e-2), lr=factor * 1e-2, momentum=0.9)


def plain_loop(factor: float) -> Weights:
    """Train without TRL, which adds the balance loss for every mixture of experts."""
    model = example.make_model()
    optimizer = optimizer_of(model, factor)
    rows = torch.stack([row["input_ids"] for row in example.make_rows()])
    for step in range(STEPS):
        batch = rows[16 * step :][:16]
        model(input_ids=batch, labels=batch, output_router_logits=True).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model)


def test_supervised_tuning_takes_the_steps_of_a_plain_loop(folder: Path) -> None:
    model = example.make_model()
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            str(folder / "sft"),
            per_device_train_batch_size=16,
            train_sampling_strategy="sequential",
            **QUIET,
        ),
        train_dataset=Dataset.from_list(
            [{"input_ids": row["input_ids"].tolist()} for row in example.make_rows()]
        ),
        processing_class=tokenizer(folder),
        optimizers=(optimizer_of(model), None),
    )
    trainer.train()
    assert_same_training(weights_of(model), plain_loop, 2e-6)
