"""The fields of `config.json` that no configuration has, and that mean the same for every family:
those that change nothing, and those that say that a model computes something else.

Source: the configuration classes of transformers 4.33 to 5.24, the published folders of the
families, and the fields that tools for tuning, merging and serving add. The fields of a `Family`
come first. A field in neither is read by no code for the family, so it cannot change the model;
whoever reads the file reports it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_INFLUENCE = (
    # where the model comes from, and which tool wrote it
    _names("""
    _commit_hash _name_or_path auto_map finetuning_task model_name name_or_path
    transformers_version keys_to_ignore_at_inference transformers.js_config unsloth_fixed
    unsloth_version
    """)
    # the tokens of a text
    | _names("""
    bos_token_id decoder_start_token_id eos_token_id pad_token_id prefix sep_token_id
    tokenizer_class model_max_length unk_token_id
    """)
    # how the model is run
    | _names("""
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    attn_implementation _experts_implementation _experts_implementation_internal
    experts_implementation _flash_attn_2_enabled use_flash_attn use_flash_attention
    use_flash_attention_2 use_liger_kernel chunk_size_feed_forward dtype ep_size
    fusion_config gradient_checkpointing is_decoder pretraining_tp torch_dtype torchscript
    tp_size use_bfloat16 use_cache
    """)
    # what a call returns
    | _names("""
    output_attentions output_hidden_states output_router_logits output_scores return_dict
    return_dict_in_generate use_return_dict
    """)
    # other tasks than text
    | _names("""
    classifier_dropout id2label label2id num_labels problem_type task_specific_params
    """)
    # how text is generated
    | _names("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """)
)
"""Fields of any family without influence on the trained function. Dropout and tied encoders do not
belong here."""

SILU = ("silu", "swish")
"""Two names of the same function."""
WRITTEN: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {"hidden_act": SILU, "attention_dropout": (0.0,)}
)
"""Fields of any family that are supported only with these values, of which the first is written."""

DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {"initializer_range": 0.02, "tie_word_embeddings": False}
)
"""Fields of any family that may be left out, and their values in that case."""

OFF: tuple[Any, ...] = (False, 0, "", [], {})
"""Values, besides null, with which a field says that something is not there."""

ONLY_OFF = (
    # attention and masks
    _names("""
    alibi attention_chunk_size attention_out_bias attention_value_scale
    attn_logit_softcapping attn_output_gate attn_temperature_tuning clip_qkv index_topk
    parallel_attn per_layer_config pruned_heads qk_layernorm qk_norm qkv_bias
    query_pre_attn_scalar sliding_window use_attention_gate use_bidirectional_attention
    use_gated_attention use_qk_norm use_qkv_bias use_sliding_window
    """)
    # rotary embedding
    | _names("""
    layer_rope_theta mrope_section no_rope_layers rope_interleave rope_local_base_freq
    """)
    # other feed-forward layers and experts
    | _names("""
    add_bias_linear bias first_k_dense_replace mlp_bias moe_router_logit_softcapping
    moe_num_experts moe_shared_expert_intermediate_size n_routed_experts n_shared_experts
    num_experts num_local_experts num_shared_experts shared_expert_intermediate_size
    shared_intermediate_size swiglu_alpha swiglu_limit
    use_bias use_expert_bias zero_expert_num
    """)
    # norms and head
    | _names("""
    final_logit_softcapping lm_head_bias logits_soft_cap use_parallel_residual
    use_post_norm use_sandwich_norm
    """)
    # noise in training
    | _names("""
    activation_dropout attention_probs_dropout_prob attn_pdrop dropout embd_pdrop
    embedding_dropout hidden_dropout hidden_dropout_prob input_jitter_noise layerdrop
    mlp_dropout resid_pdrop residual_dropout router_jitter_noise
    """)
    # encoders
    | _names("""
    add_cross_attention cross_attention_hidden_size
    """)
    # weights in other files
    | _names("""
    transformers_weights
    """)
)
"""Fields of other models, which no model of the families has: they must be off."""

ONLY_ONE = _names("""
    attention_multiplier attn_scale embedding_multiplier embedding_scale lm_head_multiplier
    logit_scale logits_scaling residual_multiplier routed_scaling_factor router_scaling_factor
    route_scale scale_depth scale_emb partial_rotary_factor rotary_pct moe_layer_freq
    moe_layer_interval n_group num_expert_group topk_group
""")
"""Fields of other models that are a factor or a number of groups: they must be 1, or off."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {
        **dict.fromkeys(ONLY_OFF, OFF),
        **dict.fromkeys(ONLY_ONE, (1, *OFF)),
        **dict.fromkeys(("activation_function", "hidden_activation", "mlp_hidden_act"), SILU),
        **dict.fromkeys(("is_encoder_decoder", "tie_encoder_decoder"), (False,)),
        "is_causal": (True,),
        "scoring_func": ("softmax",),
        "expert_selection_fn": ("softmax",),
        "topk_method": ("greedy",),
    }
)
"""Fields that may have these values or be null, and are not written."""
