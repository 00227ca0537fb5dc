"""Muon in torchtitan: a train spec whose optimizers are Lather's.

    python examples/integrations/torchtitan_muon.py                                        (seconds
        on a CPU)
    torchrun --nproc-per-node 2 examples/integrations/torchtitan_muon.py runs/titan        (FSDP2,
        on gloo or NCCL)

torchtitan clips gradients, steps the schedule and saves to the folder; it goes on from the last
checkpoint that it finds there. It prints the loss of every fifth step.
"""

import dataclasses
import os
import sys
import tempfile

import torch
import torchtitan_on_cpu  # this has to be imported before torchtitan
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from lather.optim import Muon, parameter_groups


class MuonContainer(OptimizersContainer):
    def __init__(self, model_parts, config):
        self.model_parts, options = (
            model_parts,
            {"lr": config.lr, "weight_decay": config.weight_decay},
        )
        groups = [
            parameter_groups(part, adam_names=("output",), rest_lr=3.2 * config.lr)
            for part in model_parts
        ]
        self.optimizers = [Muon(one, momentum=0.9, **options) for one in groups]
        self._post_init([p for part in model_parts for p in part.parameters()], options)


def build_optimizers(model_parts, config, parallel_dims, ft_manager=None):
    return MuonContainer(model_parts, config)


class Counting:
    """Batches of sequences that count up in steps of 1 to 4. Each rank has its part of the same
    batch, whatever the number of ranks."""

    def __init__(self, dp_world_size, dp_rank, job_config, **_):
        self.num_ranks, self.rank, self.step, self.length = (
            dp_world_size,
            dp_rank,
            0,
            job_config.training.seq_len,
        )

    def __iter__(self):
        while True:
            start = torch.arange(16)[:, None] * 7 + self.step
            rows = (start + (start % 4 + 1) * torch.arange(self.length + 1)) % 64
            self.step += 1
            rows = rows.chunk(self.num_ranks)[self.rank]
            yield {"input": rows[:, :-1]}, rows[:, 1:].contiguous()

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state.get("step", 0)


def register():
    tiny = {
        "tiny": TransformerModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=64, multiple_of=32)
    }
    own = {
        "build_optimizers_fn": build_optimizers,
        "build_dataloader_fn": Counting,
        "build_tokenizer_fn": None,
        "model_args": tiny,
    }
    register_train_spec(
        "counting",
        dataclasses.replace(
            get_train_spec(), **own, state_dict_adapter=None, build_validator_fn=None
        ),
    )


def make_config(folder, steps=20):
    config = JobConfig()
    config.job.dump_folder, config.model.name, config.model.flavor = folder, "counting", "tiny"
    config.optimizer.lr, config.optimizer.weight_decay = 1e-2, 0.01
    config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_type = 2, "cosine"
    config.training.steps, config.training.seq_len = steps, 16
    config.training.local_batch_size = 16 // int(os.environ["WORLD_SIZE"])
    config.training.max_norm, config.training.mixed_precision_param = 1.0, "float32"
    config.activation_checkpoint.mode, config.metrics.log_freq, config.debug.seed = "none", 5, 0
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.last_save_model_only = (
        True,
        10,
        False,
    )
    return config


def main():
    init_logger()
    torchtitan_on_cpu.join_or_be_alone()
    register()
    trainer = Trainer(make_config(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()))
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
