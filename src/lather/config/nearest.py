"""The names that a user may have meant by one that there is not: what other trainers call the same, and the most similar ones."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from lather.config.optim import OptimConfig

OTHERS_NAMES = {
    "run_dir": "output_dir out_dir save_dir logging_dir",
    "init_from": "model_name_or_path pretrained pretrained_model load_from",
    "model.num_hidden_layers": "num_layers n_layers n_layer",
    "model.hidden_size": "d_model n_embd embed_dim",
    "model.num_attention_heads": "num_heads n_heads n_head",
    "model.num_experts_per_tok": "top_k topk moe_top_k num_experts_per_token",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules",
    "data.path": "dataset dataset_path data_path train_data",
    "data.source": "train_file train_files corpus",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_file",
    "data.packing": "sample_packing",
    "optim.name": "optimizer optimizer_name",
    "optim.lr": "learning_rate peak_lr max_lr base_lr",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_schedule scheduler",
    "optim.warmup_steps": "warmup num_warmup_steps lr_warmup_steps warmup_iters warmup_ratio",
    "optim.min_lr_ratio": "min_lr min_learning_rate",
    "weight_decay": "wd l2",
    "betas": "beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "eps": "epsilon adam_epsilon adam_eps",
    "train.steps": "max_steps num_steps train_steps num_train_steps num_training_steps max_iters train_iters total_steps",
    "train.batch_size": "global_batch_size train_batch_size total_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size per_device_batch_size gradient_accumulation_steps grad_accum_steps",
    "train.sequence_length": "seq_len seq_length max_seq_len max_seq_length max_length context_length block_size model_max_length",
    "train.max_grad_norm": "grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip_val max_norm",
    "train.validation_every": "eval_steps eval_every eval_interval",
    "train.recompute": "gradient_checkpointing activation_checkpointing",
    "train.precision": "bf16 fp16 dtype mixed_precision torch_dtype amp",
    "train.compile": "torch_compile",
    "parallel.pp": "pipeline_parallel_size pp_size",
    "parallel.ep": "expert_parallel_size ep_size",
    "checkpoint.every": "save_steps save_every save_interval checkpoint_every",
    "checkpoint.keep_last": "save_total_limit",
    "log.every": "logging_steps log_interval log_every",
    "log.wandb_project": "wandb",
    "log.mlflow_experiment": "mlflow mlflow_experiment_name",
}
"""Field, or option of a rule -> names for it in the Hugging Face Trainer, Megatron, torchtitan, nanoGPT and other trainers."""
LIKE = 0.7
"""How similar a name has to be to be taken for a slip, from 0 to 1."""
MOST = 3
OPTIM_FIELDS = {one.name for one in dataclasses.fields(OptimConfig)}


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """Up to three of the dotted names `known` that `name` may stand for, the likeliest first; none: nothing is like it."""
    section, _, last = name.lower().rpartition(".")
    known = list(dict.fromkeys(known))

    def likeness(other: str) -> float:
        """A field of the same section wins a tie, an option of a rule loses it."""
        other_section, _, other_last = other.rpartition(".")
        return _ratio(last, other_last) + 0.1 * (section == other_section) - 0.01 * _is_of_rule(other)

    def place(other: str) -> tuple[float, int, bool]:
        """How well the section fits, and the number of sections that it is below."""
        fit = _ratio(section, other.rpartition(".")[0])
        return fit if fit >= LIKE else 0.0, -other.count("."), not _is_of_rule(other)

    meant = [field for field, names in OTHERS_NAMES.items() if last in names.split()]
    ends = {last, *meant, *(field.rpartition(".")[2] for field in meant)}
    same = [one for one in known if one in meant or one in ends or one.rpartition(".")[2] in {last, *meant}]
    if same:
        nearest = max(place(one) for one in same)
        return [one for one in same if place(one) == nearest][:MOST]
    return [best] if known and likeness(best := max(known, key=likeness)) >= LIKE else []


def _is_of_rule(name: str) -> bool:
    section, _, last = name.rpartition(".")
    return section.startswith("optim") and last not in OPTIM_FIELDS


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
