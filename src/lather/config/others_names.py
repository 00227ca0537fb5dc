"""Names that other trainers use for the fields of a configuration, and for what Lather has no
field.

The names are those of the Hugging Face Trainer and its descendants (trl, axolotl, LLaMA-Factory,
ms-swift), Megatron, DeepSpeed, torchtitan, Lightning, nanoGPT and torch's own optimizers.
"""

from __future__ import annotations

OTHERS_NAMES = {
    "run_dir": "output_dir out_dir save_dir logging_dir default_root_dir checkpoint_dir",
    "init_from": "model_name_or_path pretrained pretrained_model load_from base_model finetune",
    "fork_from": "resume_from resume_from_checkpoint load_checkpoint ckpt_path",
    "seed": "random_seed data_seed manual_seed global_seed",
    "model.num_hidden_layers": "num_layers n_layers n_layer",
    "model.hidden_size": "d_model n_embd embed_dim dim",
    "model.num_attention_heads": "num_heads n_heads n_head",
    "model.num_experts_per_tok": "top_k topk moe_top_k num_experts_per_token moe_router_topk",
    "model.n_routed_experts": "n_experts moe_num_experts",
    "model.num_experts": "n_experts moe_num_experts",
    "model.num_local_experts": "n_experts moe_num_experts",
    "model.rope_scaling.factor": "rope_scaling_factor rope_factor yarn_factor",
    "moe.balance_coefficient": "aux_loss_coef moe_aux_loss_coeff router_aux_loss load_balance_coef",
    "moe.z_loss_coefficient": "z_loss_coef moe_z_loss_coeff router_z_loss_coef",
    "lora.rank": "lora_r lora_rank r",
    "lora.alpha": "lora_alpha",
    "lora.targets": "target_modules lora_target_modules lora_target",
    "data.path": "dataset dataset_path data_path train_data datasets dataset_name",
    "data.source": "train_file train_files corpus",
    "data.validation": "eval_dataset validation_file valid_data eval_data",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_file tokenizer_name_or_path",
    "data.packing": "sample_packing pack_sequences group_by_length",
    "data.weights": "mix_probs interleave_probs data_weights mixture_weights",
    "optim.name": "optimizer optimizer_name optim_type",
    "optim.refresh_method": "use_eigh",
    "optim.weight_decay_method": "use_decoupled_weight_decay",
    "optim.lr": "learning_rate peak_lr max_lr base_lr init_lr",
    "optim.rest.lr": "embedding_lr embed_lr adam_lr adamw_lr",
    "optim.schedule": (
        "lr_scheduler lr_scheduler_type lr_schedule scheduler lr_decay_style decay_lr"
    ),
    "optim.warmup_steps": (
        "warmup num_warmup_steps lr_warmup_steps warmup_iters warmup_ratio lr_warmup_iters "
        "lr_warmup_fraction"
    ),
    "optim.min_lr_ratio": "min_lr min_learning_rate lr_min",
    "optim.decay_fraction": (
        "decay_steps lr_decay_steps lr_decay_iters wsd_decay_steps num_decay_steps"
    ),
    "weight_decay": "wd l2 weight_decay_rate",
    "betas": "beta1 beta2 beta_1 beta_2 adam_beta1 adam_beta2 adam_betas",
    "momentum": "beta1 beta_1 mu momentum_beta momentum_factor muon_momentum",
    "eps": "epsilon adam_epsilon adam_eps optimizer_eps",
    "steps": "ns_steps newton_schulz_steps num_ns_steps ns_iters ns_iterations backend_steps",
    "precondition_frequency": "precond_freq precond_frequency preconditioner_update_freq",
    "train.steps": (
        "max_steps num_steps train_steps num_train_steps num_training_steps max_iters train_iters "
        "total_steps epochs epoch num_epochs num_train_epochs max_epochs train_epochs "
        "max_tokens total_tokens train_tokens"
    ),
    "train.batch_size": (
        "global_batch_size train_batch_size total_batch_size batch effective_batch_size"
    ),
    "train.micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size gradient_accumulation_steps "
        "grad_accum_steps gradient_accumulation grad_accum accumulate_grad_batches "
        "local_batch_size "
        "accumulation_steps train_micro_batch_size_per_gpu"
    ),
    "train.sequence_length": (
        "seq_len seq_length max_seq_len max_seq_length max_length context_length block_size "
        "model_max_length cutoff_len sequence_len ctx_len context_size"
    ),
    "train.max_grad_norm": (
        "grad_clip clip_grad clip_grad_norm gradient_clipping gradient_clip gradient_clip_val "
        "max_norm max_gradient_norm grad_norm_clip grad_clip_norm"
    ),
    "train.validation_every": (
        "eval_steps eval_every eval_interval eval_strategy evaluation_strategy val_check_interval "
        "validation_steps val_interval"
    ),
    "train.validation_sequences": "eval_iters eval_batches limit_val_batches max_eval_samples",
    "train.recompute": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint ac_mode"
    ),
    "train.precision": "bf16 fp16 fp32 dtype mixed_precision torch_dtype amp autocast param_dtype",
    "train.compile": "torch_compile",
    "train.deterministic": "full_determinism deterministic_mode",
    "train.device": "device_type accelerator use_cpu no_cuda",
    "train.trainable": "trainable_parameters unfreeze",
    "train.frozen": "freeze freeze_layers frozen_parameters",
    "parallel.pp": (
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp_size pp_degree "
        "pipeline_model_parallel_size pipeline_stages"
    ),
    "parallel.ep": (
        "expert_parallel expert_parallel_size expert_parallel_degree ep_size ep_degree "
        "expert_model_parallel_size moe_expert_parallel_size"
    ),
    "parallel.replicas": (
        "hsdp dp_replicate data_parallel_replicate_degree replicate_size num_replicas"
    ),
    "parallel.schedule": "pipeline_schedule pp_schedule pipeline_parallel_schedule",
    "parallel.timeout": "ddp_timeout nccl_timeout comm_timeout",
    "checkpoint.every": (
        "save_steps save_every save_interval checkpoint_every save_strategy save_freq"
    ),
    "checkpoint.keep_last": "save_total_limit keep_latest_k save_top_k keep_checkpoints",
    "checkpoint.keep_best": "load_best_model_at_end save_best",
    "checkpoint.asynchronous": "async_save async_mode async_checkpoint",
    "log.every": "logging_steps log_interval log_every log_freq log_every_n_steps",
    "log.wandb_project": "wandb report_to use_wandb wandb_name",
    "log.mlflow_experiment": "mlflow mlflow_experiment_name",
    "log.tensorboard": "use_tensorboard enable_tensorboard tensorboard_dir",
}
"""Field, or option of a rule -> names for it in other trainers."""

RANKS = (
    "ranks are started by --nproc N, by torchrun or by srun, and `lather plan` "
    "assumes --world N: there is no field for their number"
)
EPOCHS = (
    "an epoch has as many steps as the data set has tokens (lather data show), "
    "divided by train.batch_size * train.sequence_length"
)
DATA_RANKS = (
    "data ranks are all ranks that remain, ranks / (parallel.pp * parallel.ep): there is no field "
    "for "
    "them, and parameters are always sharded over them (FSDP2)"
)
OFFLOAD = "nothing is offloaded to the host's memory: docs/memory.md has what lowers memory instead"
TENSOR = (
    "the trainer has no tensor parallelism: parallel.ep divides experts, parallel.pp layers, and "
    "FSDP2 "
    "all other weights over the ranks that remain"
)
REGULARIZED = "the models are trained without dropout: leave it out"
ROPE_TYPE = (
    "[model.rope_scaling] is always YaRN, and needs no type: give "
    "its factor and original_max_position_embeddings"
)
QUANTIZED = "weights are not quantized: leave it out, or train adapters alone with lora.rank"

NOTES: dict[str, dict[str, str]] = {
    "train.steps": {
        "epochs epoch num_epochs num_train_epochs max_epochs train_epochs": EPOCHS,
        "max_tokens total_tokens train_tokens": (
            "a step has train.batch_size * train.sequence_length tokens"
        ),
    },
    "optim.warmup_steps": {"warmup_ratio lr_warmup_fraction": "the ratio times train.steps"},
    "optim.min_lr_ratio": {"min_lr min_learning_rate lr_min": "as a fraction of the peak"},
    "optim.decay_fraction": {
        "decay_steps lr_decay_steps lr_decay_iters wsd_decay_steps num_decay_steps": (
            "a fraction of the run, for the schedule wsd; other schedules decay over the whole run"
        ),
    },
    "betas": {
        "beta1 beta_1 adam_beta1": "two numbers, of which this is the first",
        "beta2 beta_2 adam_beta2": "two numbers, of which this is the second",
    },
    "train.micro_batch_size": {
        "per_device_train_batch_size per_device_batch_size local_batch_size "
        "train_micro_batch_size_per_gpu": (
            "train.batch_size counts the sequences of a step over all ranks"
        ),
        "gradient_accumulation_steps grad_accum_steps gradient_accumulation grad_accum "
        "accumulate_grad_batches accumulation_steps": (
            "a rank accumulates over the micro-batches of its share of train.batch_size"
        ),
    },
    "train.precision": {
        "bf16 amp autocast mixed_precision dtype torch_dtype param_dtype fp32": (
            "with the value 'fp32', 'bf16' or 'fp64'"
        ),
        "fp16": "with the value 'bf16': there is no training in fp16",
    },
    "train.validation_every": {"eval_strategy evaluation_strategy": "in steps"},
    "train.validation_sequences": {"eval_iters eval_batches limit_val_batches": "in sequences"},
    "checkpoint.every": {"save_strategy": "in steps"},
    "train.recompute": {
        "gradient_checkpointing activation_checkpointing activation_checkpoint ac_mode": (
            "with the parts to recompute: attention, experts, shared_experts"
        ),
    },
    "fork_from": {
        "resume_from resume_from_checkpoint load_checkpoint ckpt_path": (
            "to resume a run, leave it out: a run resumes from the newest checkpoint in its run_dir"
        ),
    },
    "data.packing": {"group_by_length": "with the value 'documents'"},
    "train.device": {"no_cuda use_cpu": "with the value 'cpu'"},
    "log.wandb_project": {
        "report_to": "for TensorBoard, log.tensorboard; for MLflow, log.mlflow_experiment"
    },
}
"""Field -> others' names for it -> how it differs."""

NO_FIELD = {
    "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
    "tensor_model_parallel_size model_parallel_size": TENSOR,
    "sequence_parallel": TENSOR,
    "cp cp_size context_parallel context_parallel_size context_parallel_degree ring_attention "
    "sequence_parallel_size": (
        "the trainer has no context parallelism: a sequence is on one rank; shorten "
        "train.sequence_length, or recompute with train.recompute"
    ),
    "dp dp_size dp_degree data_parallel data_parallel_size dp_shard data_parallel_shard_degree "
    "fsdp fsdp_size fsdp_config sharding_strategy zero zero_stage deepspeed "
    "zero_optimization": DATA_RANKS,
    "offload cpu_offload offload_optimizer offload_param offload_params": OFFLOAD,
    "nproc nproc_per_node num_gpus n_gpus gpus num_processes devices world_size num_nodes nnodes "
    "local_rank": RANKS,
    "dropout attention_dropout hidden_dropout resid_pdrop attn_pdrop lora_dropout": REGULARIZED,
    "label_smoothing label_smoothing_factor": "the loss is plain cross-entropy: leave it out",
    "load_in_8bit load_in_4bit quantization quantization_config bnb_4bit_quant_type": QUANTIZED,
    "fp8": "there is no training in fp8: train.precision is 'fp32', 'bf16' or 'fp64'",
    "attn_implementation use_flash_attn flash_attention flash_attention_2 flash_attn": (
        "attention is torch's scaled_dot_product_attention, which chooses its kernel: leave it out"
    ),
    "num_workers dataloader_num_workers dataloader_pin_memory preprocessing_num_workers": (
        "tokens are read from mapped files, without workers: leave it out (lather data make has "
        "--workers)"
    ),
    "model.rope_scaling.type model.rope_scaling.rope_type rope_scaling_type rope_type": ROPE_TYPE,
    "push_to_hub hub_model_id": "lather export writes a folder of Hugging Face, for you to upload",
    "chat_template": "lather data make takes conversations and their template",
    "num_cycles lr_scheduler_kwargs": "optim.schedule has one cycle: leave it out",
    "early_stopping_patience": "a run ends at train.steps: checkpoint.keep_best keeps the best",
    "trust_remote_code": "no code is loaded with a model: leave it out",
    "ema ema_decay": "no average of weights is kept: leave it out",
}
"""Names -> why there is no field for them, and what to do."""
