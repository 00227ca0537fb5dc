"""Muon under the Hugging Face Trainer, on a mixture of experts made from a configuration.

    python examples/integrations/hf_trainer_muon.py        (seconds on a CPU)

The Trainer clips gradients, steps the schedule and saves. A second Trainer goes on from the
checkpoint in the middle and ends where the first one did. It loads the weights with
`from_pretrained`: the Trainer itself does not find the experts in a folder that it has saved.
Prints the losses of both.
"""

import tempfile

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

from lather.optim import Muon, parameter_groups


class MuonTrainer(Trainer):
    def create_optimizer(self, model=None):
        if self.optimizer is None:
            groups = parameter_groups(
                self.model if model is None else model, rest_lr=3.2 * self.args.learning_rate
            )
            for group in groups:
                if group.get("rule") == "adamw":  # embeddings, head, norms and biases
                    group["weight_decay"] = 0.0
            self.optimizer = Muon(
                groups,
                lr=self.args.learning_rate,
                momentum=0.9,
                weight_decay=self.args.weight_decay,
            )
        return self.optimizer


def make_model(checkpoint=None):
    if checkpoint is not None:
        return Qwen3MoeForCausalLM.from_pretrained(checkpoint)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, use_cache=False)
    )


def make_rows():
    """Make sequences that count up in steps of 1 to 4."""
    starts, strides = torch.arange(256) * 7, torch.arange(256) % 4 + 1
    rows = (starts[:, None] + strides[:, None] * torch.arange(16)) % 64
    return [{"input_ids": row, "labels": row} for row in rows]


def make_trainer(folder, checkpoint=None, **changes):
    schedule = {
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 4,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }
    length = {
        "max_steps": 40,
        "per_device_train_batch_size": 16,
        "save_steps": 20,
        "logging_steps": 10,
        "report_to": "none",
    }
    arguments = TrainingArguments(
        folder, **{**schedule, **length, "use_cpu": not torch.cuda.is_available(), **changes}
    )
    return MuonTrainer(make_model(checkpoint), arguments, train_dataset=make_rows())


def main():
    with tempfile.TemporaryDirectory() as folder:
        for checkpoint in (None, f"{folder}/checkpoint-20"):
            trainer = make_trainer(folder, checkpoint, disable_tqdm=True)
            trainer.train(resume_from_checkpoint=checkpoint)
            losses = {
                row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row
            }
            print(
                "resumed:" if checkpoint else "losses: ",
                "  ".join(f"{step}: {loss:.4f}" for step, loss in losses.items()),
            )


if __name__ == "__main__":
    main()
