"""The cases that are counted: optimizer steps on a rank's share of published models, a block, the
loss, a training step.

A rank's share is the matrices that `lather.optim.sharded` would make it the owner of, in a model
whose every parameter is cut along dim 0 (FSDP2). What travels between ranks is not counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.launches.counter import Counter
from lather.config.config import Config, MoEConfig
from lather.config.loop import LoopConfig
from lather.config.optim import OptimConfig, optim_config
from lather.data.batches import Batch
from lather.engine.engine import build_engine
from lather.engine.optimizer import ROUTERS, build_optimizer
from lather.engine.step import TrainStep
from lather.kernels.linear_cross_entropy import linear_cross_entropy
from lather.models.families import FAMILIES, ModelConfig, build_model
from lather.models.model_flops import flops_per_token
from lather.optim import parameters_by_kind
from lather.optim.batched.layouts import layout_of
from lather.optim.rules.kl_soap import KLSOAPRule
from lather.optim.sharded.owners import share_out
from lather.optim.sharded.placement import Spread, boxes_of
from lather.parallel.mesh import Mesh

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {
            "vocab_size": 102400,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
        },
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
}
"""Family and sizes; DeepSeek's rotary scaling, which changes no shape, is left out."""

FREQUENCY = 3
"""Steps between refreshes here: the first step makes first bases, the second none, the third
refreshes."""
STEPS = {1: "first bases", 2: "between refreshes", 3: "refresh"}
PLAIN_STEPS = ("first", "a step")
"""Names of the steps of rules without bases."""
STEPS_AFTER_ADAM = {1: "before the bases", 2: "first bases", 3: "refresh"}
"""The steps of KL-SOAP that are counted, and their names."""
TOKENS = 8192
STEP_LAYERS = 3


@dataclass(frozen=True)
class LaunchCase:
    """Work to count, in a row or several."""

    name: str
    config: Mapping[str, Any]
    rows: Callable[[Counter], Iterator[str]]
    """Does the work on the counter's device. It yields a row's name when all that was counted since
    the last row belongs to that row."""
    model_flops: float = 0.0
    """Useful flops of the work of a row (`lather.models.model_flops`), of which MFU is the rate; 0:
    there are none, as in an optimizer's step."""


def model_config(model: str, **changes: Any) -> ModelConfig:
    family, sizes = PUBLISHED[model]
    return FAMILIES[family].config(**{**sizes, **changes})


# --- the optimizer --------------------------------------------------------------------------------


def optimizer_case(
    rule: str,
    model: str,
    ranks: int,
    layers: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> LaunchCase:
    """Make the case of a rule's steps on the share of one rank of `ranks`; `layers` limits the
    model's layers."""
    changes = {} if layers is None else {"num_hidden_layers": layers}
    config = optim_config(rule, **rule_options(rule), **(options or {}))
    shapes = share_of_rank(config, model_config(model, **changes), ranks)

    def rows(counter: Counter) -> Iterator[str]:
        params = [
            (name, nn.Parameter(torch.empty(shape, device=counter.device)))
            for name, shape in shapes.items()
        ]
        optimizer = build_optimizer(config, params)
        matrices: Any = config
        after_adam = issubclass(matrices.rules[""], KLSOAPRule)
        for step, name in (STEPS_AFTER_ADAM if after_adam else STEPS).items():
            if step == FREQUENCY and "precondition_frequency" not in rule_options(rule):
                return
            for _, p in params:
                p.grad = torch.empty_like(p)
            counter.restart()
            optimizer.step()
            yield (
                name
                if "precondition_frequency" in rule_options(rule)
                else {1: "first"}.get(step, "a step")
            )

    described = {
        "part": "optimizer",
        "rule": rule,
        "model": model,
        "ranks": ranks,
        "layers": layers,
        "options": dict(options or {}),
    }
    return LaunchCase(f"{rule}, {model}, a rank of {ranks}", described, rows)


def rule_options(rule: str) -> dict[str, Any]:
    """Return options with which a rule does all refreshes in the same step."""
    refreshes = hasattr(optim_config(rule), "precondition_frequency")
    return {"precondition_frequency": FREQUENCY, "stagger_refresh": False} if refreshes else {}


def share_of_rank(
    config: OptimConfig, model: ModelConfig, ranks: int, rank: int = 0
) -> dict[str, tuple[int, ...]]:
    """The shapes that one rank works on: the matrices that it owns, and its rows of everything
    else."""
    from torch.distributed.tensor import Shard

    whole = build_model(model, None, torch.device("meta"))
    named = [(name, p) for name, p in whole.named_parameters()]
    spreads, wanted = {}, []
    for kind, some in parameters_by_kind(named, router_names=ROUTERS).items():
        rule = config.rule_of(kind)
        for name, p in some:
            spread = Spread(
                tuple(p.shape), tuple(range(ranks)), boxes_of(p.shape, (ranks,), (Shard(0),)), rank
            )
            layout = layout_of(tuple(p.shape), rule)
            if layout.elementwise:
                spreads[name] = spread.box.size
            else:
                wanted.append((name, spread, layout))
    shapes = {name: size for name, size in spreads.items() if 0 not in size}
    for (name, _, layout), units in zip(
        wanted, share_out([(spread, layout) for _, spread, layout in wanted], {}), strict=True
    ):
        if own := sum(unit.owner == rank for unit in units):
            shapes[name] = layout.shape_with(own)
    return shapes


# --- the model ------------------------------------------------------------------------------------


def rows_of_expert(tokens: int, model: ModelConfig) -> int:
    """Return the number of rows of each expert with an even load."""
    return tokens * model.num_experts_per_tok // max(model.num_routed_experts, 1)


def loss_case(
    tokens: int = TOKENS, hidden: int = 2048, vocabulary: int = 102400, precision: str = "bf16"
) -> LaunchCase:
    """Make the case of head and loss, with gradients."""

    def rows(counter: Counter) -> Iterator[str]:
        x_TD = torch.empty(tokens, hidden, device=counter.device, requires_grad=True)
        weight_VD = nn.Parameter(torch.empty(vocabulary, hidden, device=counter.device))
        labels_T = torch.zeros(tokens, dtype=torch.long, device=counter.device)
        counter.restart()
        with (
            torch.autocast(counter.device.type, torch.bfloat16)
            if precision == "bf16"
            else nullcontext()
        ):
            loss = linear_cross_entropy(x_TD, weight_VD, labels_T, normalizer=float(tokens))
        loss.backward()
        yield "forward and backward"

    return LaunchCase(
        "the loss",
        {
            "part": "loss",
            "tokens": tokens,
            "hidden": hidden,
            "vocabulary": vocabulary,
            "precision": precision,
        },
        rows,
        6.0 * tokens * hidden * vocabulary,
    )


def step_case(
    model: str,
    rule: str = "soap",
    layers: int = STEP_LAYERS,
    tokens: int = TOKENS,
    *,
    packed: bool = False,
) -> LaunchCase:
    """Make the case of training steps of one process in bf16, four sequences in a micro-batch; if
    `packed`, each of two documents."""
    config = Config(
        model=model_config(model, num_hidden_layers=layers),
        train=LoopConfig(
            batch_size=4, micro_batch_size=4, sequence_length=tokens // 4, precision="bf16"
        ),
        moe=MoEConfig(),
        optim=optim_config(rule, **rule_options(rule)),
    )
    described = {
        "part": "step",
        "model": model,
        "rule": rule,
        "layers": layers,
        "tokens": tokens,
        "precision": "bf16",
        "packed": packed,
    }
    name = f"a training step, {layers} layers of {model}, {rule}" + (", packed" if packed else "")
    return LaunchCase(
        name,
        described,
        lambda counter: training_steps(counter, config, packed=packed),
        flops_of_step(config),
    )


def flops_of_step(config: Config) -> float:
    """Compute the model flops of a training step; documents count as one sequence."""
    model = build_model(config.model, None, torch.device("meta"))
    length = config.train.sequence_length
    return config.train.batch_size * length * flops_per_token(model, config.model, length)


def training_steps(counter: Counter, config: Config, *, packed: bool = False) -> Iterator[str]:
    """Run steps of a whole engine, each a row: one with first bases, one without, one with a
    refresh; or, of rules without bases, the first and the second. The stand-in's norm of gradients
    is 1, so that each step clips them."""
    counter.rows_of_expert = rows_of_expert(
        config.train.batch_size * config.train.sequence_length, config.model
    )
    engine = build_engine(config, Mesh.single(counter.device))
    step = TrainStep(
        engine, build_optimizer(config.optim, engine.parameters), config.train.max_grad_norm
    )
    batch = Batch.of_tokens(
        torch.zeros(config.train.batch_size, config.train.sequence_length + 1, dtype=torch.long)
    )
    if packed:
        begins_BS = torch.zeros_like(batch.inputs_BS, dtype=torch.bool)
        begins_BS[:, [0, begins_BS.shape[1] // 2]] = True
        batch = replace(batch, begins_BS=begins_BS)
    refreshes = hasattr(config.optim, "precondition_frequency")
    for name in STEPS.values() if refreshes else PLAIN_STEPS:
        counter.restart()
        step(batch, 1e-3)
        yield name
