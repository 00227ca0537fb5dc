"""Writes the adapters of a model in PEFT's format: `adapter_config.json` and
`adapter_model.safetensors`.

PEFT (tested with 0.21) adapts linear modules (`target_modules`) and parameters
(`target_parameters`). In transformers 5 the experts of a block are two parameters with three dims,
gate_up_proj and down_proj. The other feed-forward layers are listed as parameters, too: PEFT would
mistake their module names for those of experts in transformers 4.

    attention              q_proj.lora_A.weight (r, I)           q_proj.lora_B.weight (O, r)
    dense, shared          gate_proj.lora_A.weight (r, I)        gate_proj.lora_B.weight (O, r)
    experts, down          experts.lora_A.weight (E r, I)        experts.lora_B.weight (O, r E):
                           B[o, k E + e]
    experts, gate and up   the same, below experts.base_layer if down is adapted as well, because
                           PEFT nests the two layers

Letters: I input and O output size, E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lather.errors import ExchangeError
from lather.files import StrPath, complete_folder, write_json
from lather.models.adapted import adaptable, adapted, factor_names
from lather.models.entry_names import entry_shapes
from lather.models.families import ModelConfig, build_model, family_of
from lather.models.hf.key_map import Shape, replaced
from lather.models.hf.model_folder import weight_shapes
from lather.models.lora import LoraConfig
from lather.safetensors_file import DTYPES, TensorSource, TensorToWrite, write_safetensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def save_peft(
    source: TensorSource,
    config: ModelConfig,
    lora: LoraConfig,
    folder: StrPath,
    *,
    base: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Write the adapters among the tensors of a checkpoint as a folder that
    `PeftModel.from_pretrained` loads; without those of blocks of multi-token prediction, which
    transformers does not build.

    Args:
        source: the tensors of a checkpoint, an entry per expert.
        folder: must not exist, or be empty; it appears when it is complete.
        base: name or folder of the adapted model, for adapter_config.json.
        dtype: dtype of the written adapters; None: that of the source.

    Raises ExchangeError, before anything is written, if the source lacks an adapter of
    `lora`, or if `folder` holds something."""
    model = build_model(config, None, torch.device("meta"))
    shapes, family = weight_shapes(config), family_of(config)
    names = [
        name for name in adapted(model, lora) if int(name.split(".")[1]) < config.num_hidden_layers
    ]
    renamed = {
        name: name
        if name in shapes
        else replaced(f"{name}.weight", family.renamed).removesuffix(".weight")
        for name in adaptable(model)
    }
    factors = list(_factors(names, renamed, shapes, source, dtype))
    groups = {renamed[name]: group for name, group in adaptable(model).items()}
    chosen = [renamed[name] for name in names]
    with complete_folder(Path(folder)) as aside:
        write_safetensors(aside / WEIGHTS_FILE, factors)
        write_json(aside / CONFIG_FILE, _config(chosen, groups, lora, base))


def _factors(
    names: list[str],
    renamed: Mapping[str, str],
    shapes: Mapping[str, Shape],
    source: TensorSource,
    dtype: torch.dtype | None,
) -> Iterator[TensorToWrite]:
    """Yield A and B of each adapter in PEFT's format, where `renamed` has transformers' names.
    Raises ExchangeError if the source lacks any."""
    for name in names:
        stack_shape = shapes.get(name)
        entries = [
            factor_names(entry)
            for entry in entry_shapes(
                {f"{name}.weight": ()} if stack_shape is None else {name: stack_shape}
            )
        ]
        if missing := [entry for pair in entries for entry in pair if entry not in source.tensors]:
            raise ExchangeError(
                f"{missing[0]!r} is not among the weights, but [lora] needs it: give the "
                "configuration that they were trained with"
            )
        module = f"base_model.model.model.{renamed[name]}"
        if stack_shape is not None:
            owner, _, part = module.rpartition(".")
            is_inside = part == "gate_up_proj" and f"{name.rpartition('.')[0]}.down_proj" in names
            module = f"{owner}.base_layer" if is_inside else owner
        a, b = (source.tensors[entry] for entry in entries[0])
        each_a, each_b = (map(source.read, factors) for factors in zip(*entries, strict=True))
        number = len(entries)
        yield TensorToWrite(
            f"{module}.lora_A.weight",
            dtype or DTYPES[a.dtype],
            (number * a.shape[0], a.shape[1]),
            each_a,
        )
        pieces = each_b if stack_shape is None else _side_by_side(each_b)
        yield TensorToWrite(
            f"{module}.lora_B.weight",
            dtype or DTYPES[b.dtype],
            (b.shape[0], number * b.shape[1]),
            pieces,
        )


def _side_by_side(experts: Iterable[Tensor]) -> Iterator[Tensor]:
    """Stack the matrices of all experts over a last dim, when the result is asked for."""
    yield torch.stack(list(experts), dim=-1)


def _config(
    names: list[str], groups: dict[str, str], lora: LoraConfig, base: str
) -> dict[str, Any]:
    modules = {name for name in names if groups[name] == "attention"}
    parameters = {
        name if groups[name] == "experts" else f"{name}.weight"
        for name in names
        if name not in modules
    }
    others = [
        name if group in ("attention", "experts") else f"{name}.weight"
        for name, group in groups.items()
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": _shortest(modules, others, of_module=True),
        "target_parameters": _shortest(parameters, others) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def _shortest(names: Iterable[str], all_names: list[str], *, of_module: bool = False) -> list[str]:
    """Return the shortest targets that match exactly these names: the part after the layer's number
    if all layers are included."""
    chosen = set(names)
    targets: dict[str, None] = {}
    for name in all_names:
        if name in chosen:
            _, _, rest = name.split(".", 2)
            same = [other for other in all_names if other.split(".", 2)[2] == rest]
            short = rest.rpartition(".")[2] if of_module else rest
            targets[short if chosen.issuperset(same) else name] = None
    return list(targets)
