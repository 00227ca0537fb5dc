"""Suggestions for a name that is no field: the field that another trainer calls so, or that has
the most similar name; or why there is no such field.

The names of other trainers are those of the Hugging Face Trainer and its descendants (trl, axolotl,
LLaMA-Factory, ms-swift), Megatron, DeepSpeed, torchtitan, Lightning, nanoGPT and torch's own
optimizers.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable
from typing import NamedTuple

from lather.config.optim import OptimConfig

SLIP = 0.7
"""Least similarity, from 0 to 1, of a name to a field of the same section that it misspells."""
SLIP_ELSEWHERE = 0.85
"""Least similarity to a field of another section."""
OPTIM_FIELDS = {field.name for field in dataclasses.fields(OptimConfig)}


class Name(NamedTuple):
    """Names that other trainers have for a field."""

    field: str
    """Dotted field, or option of a rule; empty: there is no such field."""
    names: str
    """Names, separated by spaces."""
    note: str = ""
    """How the field differs; without a field, what to do."""

    def means(self, field: str) -> bool:
        """Return whether the dotted name `field` is this field, this option of a rule in a section
        of `[optim]`, or, in a command without sections, an option of the same name."""
        section, _, last = field.rpartition(".")
        is_option = "." not in self.field and section.startswith("optim") and last == self.field
        same_name = not section and last == self.field.rpartition(".")[2]
        return field == self.field or is_option or same_name


NAMES = (
    Name("run_dir", "output_dir out_dir save_dir logging_dir default_root_dir checkpoint_dir"),
    Name("init_from", "model_name_or_path pretrained pretrained_model load_from base_model"),
    Name("init_from", "finetune"),
    Name(
        "fork_from",
        "resume_from resume_from_checkpoint load_checkpoint ckpt_path",
        "to resume a run, leave it out: a run resumes from the newest checkpoint in its run_dir",
    ),
    Name("seed", "random_seed data_seed manual_seed global_seed"),
    Name("model.num_hidden_layers", "num_layers n_layers n_layer"),
    Name("model.hidden_size", "d_model n_embd embed_dim dim"),
    Name("model.num_attention_heads", "num_heads n_heads n_head"),
    Name("model.num_experts_per_tok", "top_k topk moe_top_k num_experts_per_token moe_router_topk"),
    Name("model.n_routed_experts", "n_experts moe_num_experts"),
    Name("model.num_experts", "n_experts moe_num_experts"),
    Name("model.num_local_experts", "n_experts moe_num_experts"),
    Name("model.rope_scaling.factor", "rope_scaling_factor rope_factor yarn_factor"),
    Name("moe.balance_coefficient", "aux_loss_coef moe_aux_loss_coeff router_aux_loss"),
    Name("moe.balance_coefficient", "load_balance_coef"),
    Name("moe.z_loss_coefficient", "z_loss_coef moe_z_loss_coeff router_z_loss_coef"),
    Name("lora.rank", "lora_r lora_rank r"),
    Name("lora.alpha", "lora_alpha"),
    Name("lora.targets", "target_modules lora_target_modules lora_target"),
    Name("data.path", "dataset dataset_path data_path train_data datasets dataset_name"),
    Name("data.source", "train_file train_files corpus"),
    Name("data.validation", "eval_dataset validation_file valid_data eval_data"),
    Name("data.tokenizer", "tokenizer_path tokenizer_name tokenizer_file tokenizer_name_or_path"),
    Name("data.packing", "sample_packing pack_sequences"),
    Name("data.packing", "group_by_length", "with the value 'documents'"),
    Name("data.weights", "mix_probs interleave_probs data_weights mixture_weights"),
    Name("optim.name", "optimizer optimizer_name optim_type"),
    Name("optim.refresh_method", "use_eigh"),
    Name("optim.weight_decay_method", "use_decoupled_weight_decay"),
    Name("optim.lr", "learning_rate peak_lr max_lr base_lr init_lr"),
    Name("optim.rest.lr", "embedding_lr embed_lr adam_lr adamw_lr"),
    Name("optim.schedule", "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style"),
    Name("optim.schedule", "decay_lr wsd_decay_style lr_wsd_decay_style decay_type"),
    Name("optim.decay_power", "poly_power polynomial_power lr_power"),
    Name("optim.warmup_steps", "warmup num_warmup_steps lr_warmup_steps warmup_iters"),
    Name("optim.warmup_steps", "lr_warmup_iters"),
    Name("optim.warmup_steps", "warmup_ratio lr_warmup_fraction", "below 1: a fraction of the run"),
    Name("optim.min_lr_ratio", "min_lr min_learning_rate lr_min", "as a fraction of the peak"),
    Name(
        "optim.decay_fraction",
        "decay_steps lr_decay_steps lr_decay_iters wsd_decay_steps num_decay_steps",
        "a fraction of the run, for wsd, 1-sqrt and power; linear and cosine decay over all of it",
    ),
    Name("weight_decay", "wd l2 weight_decay_rate"),
    Name("betas", "adam_betas"),
    Name("betas", "beta1 beta_1 adam_beta1", "two numbers, of which this is the first"),
    Name("betas", "beta2 beta_2 adam_beta2", "two numbers, of which this is the second"),
    Name("momentum", "beta1 beta_1 mu momentum_beta momentum_factor muon_momentum"),
    Name("eps", "epsilon adam_epsilon adam_eps optimizer_eps"),
    Name("steps", "ns_steps newton_schulz_steps num_ns_steps ns_iters ns_iterations backend_steps"),
    Name("precondition_frequency", "precond_freq precond_frequency preconditioner_update_freq"),
    Name("train.steps", "max_steps num_steps train_steps num_train_steps num_training_steps"),
    Name("train.steps", "max_iters train_iters total_steps"),
    Name("train.epochs", "epochs epoch num_epochs num_train_epochs max_epochs train_epochs"),
    Name(
        "train.steps",
        "max_tokens total_tokens train_tokens",
        "a step has train.batch_size * train.sequence_length tokens",
    ),
    Name("train.batch_size", "global_batch_size train_batch_size total_batch_size batch"),
    Name("train.batch_size", "effective_batch_size"),
    Name("train.first_batch_size", "initial_batch_size start_batch_size rampup_batch_size"),
    Name("train.batch_growth_steps", "batch_warmup_steps batch_size_warmup_steps batch_rampup"),
    Name(
        "train.micro_batch_size",
        (
            "per_device_train_batch_size per_device_batch_size local_batch_size "
            "train_micro_batch_size_per_gpu"
        ),
        "train.batch_size counts the sequences of a step over all ranks",
    ),
    Name(
        "train.micro_batch_size",
        (
            "gradient_accumulation_steps grad_accum_steps gradient_accumulation grad_accum "
            "accumulate_grad_batches accumulation_steps"
        ),
        "a rank accumulates over the micro-batches of its share of train.batch_size",
    ),
    Name("train.sequence_length", "seq_len seq_length max_seq_len max_seq_length max_length"),
    Name("train.sequence_length", "context_length block_size model_max_length cutoff_len"),
    Name("train.sequence_length", "sequence_len ctx_len context_size"),
    Name("train.max_grad_norm", "grad_clip clip_grad clip_grad_norm gradient_clipping"),
    Name("train.max_grad_norm", "gradient_clip gradient_clip_val max_norm max_gradient_norm"),
    Name("train.max_grad_norm", "grad_norm_clip grad_clip_norm"),
    Name("train.qk_clip", "qk_clip_threshold muon_clip qk_clip_tau"),
    Name("log.attention_logits_every", "log_max_attention_logit log_attention_logits"),
    Name("train.validation_every", "eval_steps eval_every eval_interval val_check_interval"),
    Name("train.validation_every", "validation_steps val_interval"),
    Name("train.validation_every", "eval_strategy evaluation_strategy", "in steps"),
    Name("train.validation_sequences", "max_eval_samples"),
    Name("train.validation_sequences", "eval_iters eval_batches limit_val_batches", "in sequences"),
    Name(
        "train.recompute",
        "gradient_checkpointing activation_checkpointing activation_checkpoint ac_mode",
        "with the parts to recompute: attention, experts, shared_experts",
    ),
    Name(
        "train.precision",
        "bf16 amp autocast mixed_precision dtype torch_dtype param_dtype fp32",
        "with the value 'fp32', 'bf16' or 'fp64'",
    ),
    Name("train.precision", "fp16", "with the value 'bf16': there is no training in fp16"),
    Name("train.compile", "torch_compile"),
    Name("train.deterministic", "full_determinism deterministic_mode"),
    Name("train.device", "device_type accelerator"),
    Name("train.device", "no_cuda use_cpu", "with the value 'cpu'"),
    Name("train.trainable", "trainable_parameters unfreeze"),
    Name("train.frozen", "freeze freeze_layers frozen_parameters"),
    Name("parallel.pp", "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree"),
    Name("parallel.pp", "pp_size pp_degree pipeline_model_parallel_size pipeline_stages"),
    Name("parallel.ep", "expert_parallel expert_parallel_size expert_parallel_degree ep_size"),
    Name("parallel.ep", "ep_degree expert_model_parallel_size moe_expert_parallel_size"),
    Name("parallel.replicas", "hsdp dp_replicate data_parallel_replicate_degree replicate_size"),
    Name("parallel.replicas", "num_replicas"),
    Name("parallel.schedule", "pipeline_schedule pp_schedule pipeline_parallel_schedule"),
    Name("parallel.timeout", "ddp_timeout nccl_timeout comm_timeout"),
    Name("checkpoint.every", "save_steps save_every save_interval checkpoint_every save_freq"),
    Name("checkpoint.every", "save_strategy", "in steps"),
    Name("checkpoint.keep_last", "save_total_limit keep_latest_k save_top_k keep_checkpoints"),
    Name("checkpoint.keep_best", "load_best_model_at_end save_best"),
    Name("train.patience", "early_stopping_patience early_stopping"),
    Name("checkpoint.asynchronous", "async_save async_mode async_checkpoint"),
    Name("log.every", "logging_steps log_interval log_every log_freq log_every_n_steps"),
    Name("log.wandb_project", "wandb use_wandb wandb_name"),
    Name(
        "log.wandb_project",
        "report_to",
        "for TensorBoard, log.tensorboard; for MLflow, log.mlflow_experiment",
    ),
    Name("log.mlflow_experiment", "mlflow mlflow_experiment_name"),
    Name("log.tensorboard", "use_tensorboard enable_tensorboard tensorboard_dir"),
    Name(
        "",
        (
            "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
            "tensor_model_parallel_size model_parallel_size sequence_parallel"
        ),
        (
            "the trainer has no tensor parallelism: parallel.ep divides experts, parallel.pp "
            "layers, and FSDP2 all other weights over the ranks that remain"
        ),
    ),
    Name("parallel.cp", "cp cp_size context_parallel context_parallel_size"),
    Name("parallel.cp", "context_parallel_degree ring_attention sequence_parallel_size"),
    Name(
        "",
        (
            "dp dp_size dp_degree data_parallel data_parallel_size dp_shard "
            "data_parallel_shard_degree fsdp fsdp_size fsdp_config sharding_strategy zero "
            "zero_stage deepspeed zero_optimization"
        ),
        (
            "data ranks are all ranks that remain, ranks / (parallel.pp * parallel.cp * "
            "parallel.ep): there is no field for them, and parameters are always sharded over them "
            "(FSDP2)"
        ),
    ),
    Name("offload", "cpu_offload offload_optimizer offload_optimizer_state optimizer_offload"),
    Name(
        "",
        "offload_param offload_params",
        "optim.offload keeps optimizer state, and train.offload_frozen frozen weights, on the host",
    ),
    Name(
        "",
        (
            "nproc nproc_per_node num_gpus n_gpus gpus num_processes devices world_size num_nodes "
            "nnodes local_rank"
        ),
        (
            "ranks are started by --nproc N, by torchrun or by srun, and `lather plan` assumes "
            "--world N: there is no field for their number"
        ),
    ),
    Name(
        "",
        "dropout attention_dropout hidden_dropout resid_pdrop attn_pdrop lora_dropout",
        "the models are trained without dropout: leave it out",
    ),
    Name(
        "",
        "label_smoothing label_smoothing_factor",
        "the loss is plain cross-entropy: leave it out",
    ),
    Name(
        "",
        "load_in_8bit load_in_4bit quantization quantization_config bnb_4bit_quant_type",
        "weights are not quantized: leave it out, or train adapters alone with lora.rank",
    ),
    Name("train.fp8", "fp8", "of routed experts, with train.precision bf16"),
    Name("train.fp8", "use_fp8 fp8_recipe fp8_format float8", "block, with train.precision bf16"),
    Name(
        "",
        "attn_implementation use_flash_attn flash_attention flash_attention_2 flash_attn",
        "attention is torch's scaled_dot_product_attention, which chooses its kernel: leave it out",
    ),
    Name(
        "",
        "num_workers dataloader_num_workers dataloader_pin_memory preprocessing_num_workers",
        (
            "tokens are read from mapped files, without workers: leave it out (lather data make "
            "has --workers)"
        ),
    ),
    Name(
        "",
        "model.rope_scaling.type model.rope_scaling.rope_type rope_scaling_type rope_type",
        (
            "[model.rope_scaling] needs no type, because a family has one (llama: llama3, others: "
            "YaRN): give its factor and original_max_position_embeddings"
        ),
    ),
    Name(
        "",
        "push_to_hub hub_model_id",
        "lather export writes a folder of Hugging Face, for you to upload",
    ),
    Name("", "chat_template", "lather data make takes conversations and their template"),
    Name("", "num_cycles lr_scheduler_kwargs", "optim.schedule has one cycle: leave it out"),
    Name("", "trust_remote_code", "no code is loaded with a model: leave it out"),
    Name(
        "train.average_timescale",
        "ema ema_decay average_decay",
        "the time constant of the average as a part of the run's steps",
    ),
)


def suggestion(name: str, fields: Iterable[str], write: Callable[[str], str] = repr) -> str:
    """Return a sentence that names the fields that `name` may mean, each written by `write`, or
    says why there is no such field; empty if nothing is like it."""
    rows = _rows_of(name)
    without_field = [row.note for row in rows if not row.field]
    if without_field:
        return without_field[0]
    nearest = nearest_fields(name, fields)
    if not nearest:
        return ""
    note = next((f" ({row.note})" for row in rows if row.note and row.means(nearest[0])), "")
    return f"did you mean {' or '.join(map(write, nearest))}?{note}"


def nearest_fields(name: str, fields: Iterable[str]) -> list[str]:
    """Return the dotted `fields` that `name` may mean: those that other trainers call so; else
    those with this name in another section; else those with a similar name in the same section;
    else those with almost the same name in another section."""
    section, _, last = name.lower().rpartition(".")
    fields = list(dict.fromkeys(fields))
    sections = {field.rpartition(".")[0] for field in fields}
    if section not in sections:
        section = next(iter(difflib.get_close_matches(section, sections, 1, SLIP)), section)
    if rows := _rows_of(name):
        meant = [field for field in fields if any(row.field == field for row in rows)]
        meant = meant or [field for field in fields if any(row.means(field) for row in rows)]
        return _in_nearest_section(section, meant)
    if elsewhere := [field for field in fields if field.rpartition(".")[2] == last]:
        return _in_nearest_section(section, elsewhere)
    siblings = [field for field in fields if field.rpartition(".")[0] == section]
    for group, least in ((siblings, SLIP), (fields, SLIP_ELSEWHERE)):
        names = dict.fromkeys(field.rpartition(".")[2] for field in group)
        for match in difflib.get_close_matches(last, names, 1, least):
            same = [field for field in group if field.rpartition(".")[2] == match]
            return _in_nearest_section(section, same)
    return []


def _rows_of(name: str) -> list[Name]:
    whole = name.lower()
    last = whole.rpartition(".")[2]
    return [row for row in NAMES if {whole, last} & {*row.names.split()}]


def _in_nearest_section(section: str, fields: list[str]) -> list[str]:
    """Return the fields whose section is most like `section`; of several, those in the fewest
    sections, and of these a field of the trainer before an option of a rule."""

    def rank(field: str) -> tuple[float, int, bool, bool]:
        its_section, _, last = field.rpartition(".")
        similarity = difflib.SequenceMatcher(None, section, its_section).ratio()
        of_rule = its_section.startswith("optim") and last not in OPTIM_FIELDS
        return (
            similarity if section and similarity >= SLIP else 0.0,
            -field.count("."),
            not of_rule,
            its_section == "optim.rest",  # the router inherits from it
        )

    best = max(map(rank, fields), default=None)
    return [field for field in fields if rank(field) == best]
