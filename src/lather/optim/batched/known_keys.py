"""Tables of the keys that other programs leave in parameter groups, for
`lather.optim.batched.group_keys`.

The names are those of torch and its schedulers, of the trainers Megatron, DeepSpeed, fairseq,
timm, OLMo, Lightning and MMEngine, and of the optimizers Muon (Jordan's, torch's, nanochat's),
dion, Apex, HeavyBall and pytorch_optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from lather.optim.plain import as_count, plain
from lather.optim.rule import Rule

HARMLESS = {"foreach", "fused", "capturable", "step"}
"""torch's switches between implementations; `step` is where Apex and Megatron keep the count."""
HARMLESS |= {"initial_lr", "max_lr", "min_lr", "swa_lr", "lr_max", "scheduled_lr"}
HARMLESS |= {"base_momentum", "max_momentum", "initial_momentum"}
HARMLESS |= {"initial_weight_decay", "start_wd", "end_wd"}
"""Values that schedulers keep in groups."""
HARMLESS |= {"name", "names", "group_name", "param_group", "param_name", "label", "tag"}
HARMLESS |= {"description", "default_config", "bypass_duplicate"}
HARMLESS |= {"layer", "layer_id", "layer_idx", "layer_name", "layer_decay", "block_id", "depth"}
HARMLESS |= {"stage", "module", "module_name", "moe", "expert", "expert_parallel"}
HARMLESS |= {"no_weight_decay", "no_decay", "no_wd"}
"""Labels."""
HARMLESS |= {"sides"}
"""`parameter_groups` writes it for every optimizer; rules without bases have no sides."""

MULTIPLIERS = ("_mult", "_multiplier", "_scale", "_factor")
"""Suffixes of keys by which trainers multiply the rate or the decay of a group themselves."""

RULE_KEYS = {"algorithm", "algo", "optimizer", "optim", "opt", "update_rule"}
RULE_KEYS |= {"optimizer_type", "optimizer_name", "optim_type", "opt_type"}
RULE_KEYS |= {"optimizer_class", "optimizer_cls", "optim_class", "optim_cls", "opt_class"}
"""Keys whose value names a rule."""
LABELS_OR_RULES = {"kind", "type", "method", "group_type"}
"""Keys whose value names a rule, or is a label."""
NO_RULE = {"", "auto", "default", "main", "none"}
"""Values of `RULE_KEYS` that leave the rule to the optimizer."""
NO_WORDS = {"no", "non", "not", "without"}
"""Words of a value with which it names another optimizer than the group's."""

FALL_BACK = {"muon", "normuon", "adamuon", "soap", "shampoo", "dion", "dion2", "kron", "psgd"}
"""Optimizers of matrices: where others' `use_X` is false for these, a group takes Adam's step."""
OPTIMIZERS = {"adam", "adamw", "lion", "sgd", "lamb", "lars", "sophia", "adafactor", "rmsprop"}
OPTIMIZERS |= {"adagrad", "adadelta", "adamax", "nadam", "radam", "adan", "adopt", "ademamix"}
OPTIMIZERS |= {"adabelief", "lbfgs", "galore", "madgrad", "prodigy", "scion", *FALL_BACK}
"""Words that name an optimizer in keys and values."""
ALIASES = {"adam": "adamw", "fusedadam": "adamw", "fusedadamw": "adamw", "normuon": "muon"}

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients of the Newton-Schulz iteration."""

OTHER_NAMES = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    **dict.fromkeys(("momentum_beta", "momentum_factor", "mu"), "momentum"),
    **dict.fromkeys(("beta1", "beta_1"), "betas"),
    **dict.fromkeys(("epsilon", "adam_epsilon", "adam_eps"), "eps"),
}
"""Names that other libraries use for options, with our names."""
OTHER_NAMES_OF_STEPS = (
    "ns_steps",
    "newton_schulz_steps",
    "num_ns_steps",
    "ns_iters",
    "ns_iterations",
    "backend_steps",
)
COEFFICIENTS_OF = "give coefficients='quintic' or 'polar_express'"
SCALES = "give scale='spectral' or 'match_rms_adamw'"

_FIRST_BETA = "the decay rate of the momentum is betas[0]: give betas=({0}, beta2)"
_METHOD = "give weight_decay_method='decoupled' or 'l2'"
_FREQUENCY = "did you mean 'precondition_frequency'?"

EQUIVALENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "momentum": (("betas", _FIRST_BETA.format("momentum")),),
    **dict.fromkeys(
        ("beta1", "beta_1", "adam_beta1"),
        (
            ("betas", "give betas=(beta1, beta2)"),
            ("momentum", "did you mean 'momentum'?"),
        ),
    ),
    **dict.fromkeys(
        ("beta2", "beta_2", "adam_beta2"),
        (("betas", "give betas=(beta1, beta2)"), ("beta2", "did you mean 'beta2'?")),
    ),
    **dict.fromkeys(
        ("betas", "adam_betas"),
        (("betas", "did you mean 'betas'?"), ("momentum", "give betas[0] as momentum")),
    ),
    "beta3": (("shampoo_beta", "did you mean 'shampoo_beta'?"),),
    "nesterov": (("use_nesterov", "did you mean 'use_nesterov'?"),),
    "use_nesterov": (("nesterov", "did you mean 'nesterov'?"),),
    **dict.fromkeys(OTHER_NAMES_OF_STEPS, (("steps", "did you mean 'steps'?"),)),
    **dict.fromkeys(("ns_coefficients", "ns_coeffs"), (("coefficients", COEFFICIENTS_OF),)),
    **dict.fromkeys(("adjust_lr_fn", "adjust_lr", "use_adjusted_lr"), (("scale", SCALES),)),
    **dict.fromkeys(
        ("bias_correction", "adam_debias"), (("correct_bias", "did you mean 'correct_bias'?"),)
    ),
    **dict.fromkeys(
        ("decoupled_weight_decay", "weight_decouple", "adam_w_mode", "decouple", "decoupled"),
        (("weight_decay_method", _METHOD),),
    ),
    **dict.fromkeys(
        ("precond_freq", "precondition_freq", "preconditioner_update_freq", "update_freq"),
        (("precondition_frequency", _FREQUENCY),),
    ),
    "normalize_grads": (
        ("normalize_preconditioned_grads", "did you mean 'normalize_preconditioned_grads'?"),
    ),
    "one_sided": (("sides", "give sides='smaller'"),),
}
"""Names of options -> options of the same meaning, the first of which that a rule has is meant,
each with a hint."""

TORCH_ADAM = {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}
TORCH_ADAM |= {"foreach", "capturable", "differentiable", "fused"}
"""Options that every group of torch.optim.Adam and AdamW has."""


def _is_off(value: Any, rule: Rule) -> bool:
    return not value


def _decouples(value: Any, rule: Rule) -> bool:
    return not rule.couples_decay if value else rule.couples_decay or not rule.decay(1.0)


def _uses_eigh(value: Any, rule: Rule) -> bool:
    return not value or getattr(rule, "refresh_method", "") == "eigh"


def is_quintic(value: Any) -> bool:
    """Whether these are Jordan's coefficients, alone or as the only ones of a list, up to the
    rounding of fp32, in which tensors have them."""
    numbers = _listed(value)
    if isinstance(numbers, list) and len(numbers) == 1:
        numbers = _listed(numbers[0])
    is_triple = isinstance(numbers, list) and len(numbers) == len(QUINTIC)
    return is_triple and all(map(_is_nearly, numbers, QUINTIC))


def _listed(value: Any) -> Any:
    value = plain(value.tolist() if hasattr(value, "tolist") else value)
    return list(value) if isinstance(value, tuple) else value


def _is_nearly(value: Any, expected: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-6)


def _has_quintic(value: Any, rule: Rule) -> bool:
    return getattr(rule, "coefficients", "") == "quintic" and is_quintic(value)


def _has_steps(value: Any, rule: Rule) -> bool:
    return as_count(value) == getattr(rule, "steps", None)


def _is_newton_schulz(value: Any, rule: Rule) -> bool:
    return value == "newton_schulz" and hasattr(rule, "coefficients")


def _normalizes(value: Any, rule: Rule) -> bool:
    return bool(value) == getattr(rule, "normalize_preconditioned_grads", False)


def _corrects_bias(value: Any, rule: Rule) -> bool:
    return bool(value) == getattr(rule, "correct_bias", bool(value))


def _is_scale(scales: Sequence[tuple[Any, Any]]) -> Callable[[Any, Rule], bool]:
    return lambda value, rule: (plain(value), getattr(rule, "scale", "none")) in scales


TORCH_SCALES = {None: "spectral", "original": "spectral", "match_rms_adamw": "match_rms_adamw"}
"""`adjust_lr_fn` of torch.optim.Muon, with the `scale` that multiplies an update by the same."""

LEAVE_OUT = "no rule of Lather has that; leave the key out"
SCALE = 'give a group of muon or soap_muon "scale": "spectral" or "match_rms_adamw" in its place'
METHOD = 'give the group a "weight_decay_method" in its place: "decoupled", "l2" or "independent"'
COEFFICIENTS = 'give a group of muon or soap_muon "coefficients": "quintic" or "polar_express"'
BIAS = "did you mean 'correct_bias'?"
STEPS = "did you mean 'steps', an option of muon and soap_muon?"

NORMALIZE = "did you mean 'normalize_preconditioned_grads', an option of soap?"
MULTIPLY = "no rule multiplies its rate: multiply lr yourself, and give the group the product"

WHAT_HAPPENS: dict[str, tuple[Callable[[Any, Rule], bool], str]] = {
    **dict.fromkeys(
        (
            "amsgrad",
            "ams_bound",
            "differentiable",
            "adanorm",
            "rectify",
            "centered",
            "stable_adamw",
        ),
        (_is_off, LEAVE_OUT),
    ),
    **dict.fromkeys(
        ("cautious", "caution", "cautious_wd", "cautious_weight_decay", "use_gc", "grad_averaging"),
        (_is_off, LEAVE_OUT),
    ),
    **dict.fromkeys(
        ("dampening", "lr_decay", "momentum_decay", "qk_clip", "grokfast", "quantize", "mars"),
        (_is_off, LEAVE_OUT),
    ),
    **dict.fromkeys(("merge_dims", "use_fallback"), (_is_off, LEAVE_OUT)),
    "normalize_grads": (_normalizes, NORMALIZE),
    "lr_factor": (lambda value, rule: value == 1, MULTIPLY),
    **dict.fromkeys(
        ("decoupled_weight_decay", "weight_decouple", "adam_w_mode", "decouple"),
        (_decouples, METHOD),
    ),
    "use_decoupled_weight_decay": (_decouples, METHOD),
    "use_eigh": (_uses_eigh, 'give the group "refresh_method": "eigh" in its place'),
    "fixed_decay": (
        lambda value, rule: bool(value) == (rule.weight_decay_method == "independent"),
        METHOD,
    ),
    "adjust_lr_fn": (_is_scale([*TORCH_SCALES.items()]), SCALE),
    "adjust_lr": (_is_scale([(None, 1.0), ("rms_norm", "match_rms_adamw")]), SCALE),
    "use_adjusted_lr": (_is_scale([(True, "match_rms_adamw"), (False, "spectral")]), SCALE),
    **dict.fromkeys(("ns_coefficients", "ns_coeffs"), (_has_quintic, COEFFICIENTS)),
    "ns_method": (_is_newton_schulz, LEAVE_OUT),
    "use_polar_express": (
        lambda value, rule: bool(value) == (getattr(rule, "coefficients", "") == "polar_express"),
        COEFFICIENTS,
    ),
    **dict.fromkeys(OTHER_NAMES_OF_STEPS, (_has_steps, STEPS)),
    **dict.fromkeys(("bias_correction", "adam_debias"), (_corrects_bias, BIAS)),
}
"""Keys that tell a property of the step: whether the value asks for what the rule does anyway, and
the remedy if it does not."""

ASKING = WHAT_HAPPENS.keys() | RULE_KEYS | LABELS_OR_RULES
"""Keys whose values decide whether they are kept; so do those of `use_X` and `is_X`."""
