"""Runs whole training steps with the branches that a GPU takes, on the stand-in device, in a
process of its own, and prints what it found.

    python tests/bench/rehearsed_steps.py [more]         a line of JSON for each case, or for each
                                                         further case

Each case has three steps: with first bases, without, with a refresh; two where there are no bases.
Tensors have no values, but torch checks their shapes, dtypes and devices; a kernel of Triton is
launched with the arguments that it would get.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.launches.cases import STEPS, rows_of_expert, rule_options
from benchmarks.launches.counter import Counter
from lather.config.config import Config, MoEConfig
from lather.config.loop import LoopConfig
from lather.config.optim import optim_config
from lather.data.batches import Batch
from lather.engine.engine import build_engine
from lather.engine.optimizer import build_optimizer
from lather.engine.step import TrainStep
from lather.models.families import FAMILIES
from lather.models.lora import LoraConfig
from lather.parallel.mesh import Mesh
from models.tiny import FAMILY_TABLES

SEQUENCES, LENGTH = 4, 128
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""Sizes that a GPU's fast paths accept; those of a family are in its table."""
NARROW = {"vocab_size": 259, "hidden_size": 72, "moe_intermediate_size": 36}
"""Sizes that no kernel is made for."""


@dataclass(frozen=True)
class Rehearsal:
    """A training run to be rehearsed."""

    family: str = "deepseek_v2"
    precision: str = "bf16"
    rule: str = "soap"
    sizes: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    lora: LoraConfig = field(default_factory=LoraConfig)
    packed: bool = False

    @property
    def name(self) -> str:
        default = Rehearsal()
        others = [
            f"{key} {getattr(self, key)}"
            for key in ("sizes", "loop", "moe", "optim")
            if getattr(self, key)
        ]
        others += ["adapters"] * (self.lora != default.lora) + ["packed"] * self.packed
        return ", ".join([self.family, self.precision, self.rule, *others])

    def config(self) -> Config:
        sizes = {**COMMON, **FAMILY_TABLES[self.family].wide, **self.sizes}
        return Config(
            model=FAMILIES[self.family].config(**sizes),
            train=LoopConfig(
                batch_size=SEQUENCES,
                micro_batch_size=SEQUENCES // 2,
                sequence_length=LENGTH,
                precision=self.precision,  # type: ignore[arg-type]
                **self.loop,
            ),
            moe=MoEConfig(**self.moe),
            lora=self.lora,
            optim=optim_config(self.rule, **{**rule_options(self.rule), **self.optim}),
        )


def rehearsals() -> list[Rehearsal]:
    """List cases of every family, precision and kind of rule, and every choice that a GPU could
    make differently; AdamW unless the case is about the rule."""
    recomputed = {"recompute": ("attention", "experts", "shared_experts")}
    losses = {
        "z_loss_coefficient": 0.01,
        "balance_level": "global_batch",
        "balance_coefficient": 0.1,
    }
    return [
        Rehearsal("gpt_oss", "fp32", "adamw"),
        Rehearsal(rule="klsoap", sizes=NARROW),
        Rehearsal(optim={"stagger_refresh": True, "stagger_first": True, "async_refresh": True}),
        Rehearsal(optim={"offload": True}),
        Rehearsal(
            "qwen3_moe",
            rule="adamw",
            moe={"memory": "recompute", "bias_update_rate": 0.1, **losses},
        ),
        Rehearsal(
            rule="adamw",
            lora=LoraConfig(rank=8),
            loop={"offload_frozen": True, "gradient_dtype": "bfloat16"},
        ),
        Rehearsal(
            "deepseek_v3",
            rule="adamw",
            sizes={"num_nextn_predict_layers": 2},
            loop=recomputed,
            packed=True,
        ),
        Rehearsal("qwen3_next", rule="adamw", packed=True),
        Rehearsal("llama", rule="muon"),
    ]


def more_rehearsals() -> list[Rehearsal]:
    """List every family by itself, and further combinations of the same choices."""
    recomputed = {"recompute": ("attention", "experts", "shared_experts")}
    return [
        *(Rehearsal(family, rule="adamw") for family in FAMILY_TABLES),
        *(Rehearsal(family, "fp32", "adamw") for family in ("deepseek_v2", "qwen3_moe")),
        *(Rehearsal(family, loop=recomputed, packed=True) for family in FAMILY_TABLES),
        *(Rehearsal(family, rule="muon", lora=LoraConfig(rank=8)) for family in FAMILY_TABLES),
        Rehearsal(),
        Rehearsal(rule="muon"),
        Rehearsal(rule="soap_muon"),
        Rehearsal("qwen3_moe"),
        Rehearsal(rule="klsoap"),
        Rehearsal(sizes=NARROW),
        Rehearsal(precision="fp32", sizes=NARROW),
        Rehearsal(lora=LoraConfig(rank=8), optim={"sides": "both"}),
        Rehearsal(rule="adamw", lora=LoraConfig(rank=8)),
        Rehearsal("gpt_oss", rule="adamw", packed=True),
    ]


def batch(packed: bool) -> Batch:
    whole = Batch.of_tokens(torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.long))
    begins = torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool)
    begins[:, [0, 40]] = True
    padding = torch.arange(LENGTH).expand(SEQUENCES, -1) >= LENGTH - 3
    return replace(whole, begins_BS=begins, padding_BS=padding) if packed else whole


def rehearse(case: Rehearsal) -> list[dict[str, Any]]:
    """Run a case; returns for each step its launches, its host waits with their places, and
    oddities."""
    config, found = case.config(), []
    with Counter() as counter:
        counter.rows_of_expert = rows_of_expert(SEQUENCES // 2 * LENGTH, config.model)
        engine = build_engine(config, Mesh.single(counter.device))
        step = TrainStep(
            engine, build_optimizer(config.optim, engine.parameters), config.train.max_grad_norm
        )
        for name in list(STEPS.values())[: 3 if rule_options(case.rule) else 2]:
            counter.restart()
            step(batch(case.packed), 1e-3)
            waits = {f"{what}, {where}": times for (what, where), times in counter.waits.items()}
            found.append(
                {
                    "step": name,
                    "launches": counter.total.launches,
                    "waits": waits,
                    "notes": dict(counter.notes),
                }
            )
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for case in more_rehearsals() if sys.argv[1:] == ["more"] else rehearsals():
        try:
            result: dict[str, Any] = {"steps": rehearse(case)}
        except Exception:
            result = {"error": traceback.format_exc()}
        print(json.dumps({"case": case.name, **result}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
