"""Tables of the keys that other programs leave in parameter groups, for
`lather.optim.batched.group_keys`.

The names are those of torch and its schedulers, of the trainers Megatron, DeepSpeed, fairseq,
timm, OLMo, Lightning and MMEngine, and of the optimizers Muon (Jordan's, torch's, nanochat's),
dion, Apex, HeavyBall and pytorch_optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lather.optim.plain import as_count, plain
from lather.optim.rule import Rule


def _words(*lines: str) -> set[str]:
    return {word for line in lines for word in line.split()}


HARMLESS = _words(
    # torch's switches between implementations; Apex and Megatron keep the count in `step`
    "foreach fused capturable step",
    # values that schedulers, and optimizers around this one, keep in groups
    "initial_lr max_lr min_lr swa_lr lr_max scheduled_lr weight_sum weight_decay_at_y",
    "base_momentum max_momentum initial_momentum initial_weight_decay start_wd end_wd",
    # labels
    "name names group_name param_group param_name label tag description default_config",
    "bypass_duplicate layer layer_id layer_idx layer_name layer_decay block_id depth stage",
    "module module_name moe expert expert_parallel no_weight_decay no_decay no_wd",
    # `parameter_groups` writes it for every optimizer; rules without bases have no sides
    "sides",
)
"""Keys that change no number."""

MULTIPLIERS = ("_mult", "_multiplier", "_scale", "_factor")
"""Suffixes of keys by which trainers multiply the rate or the decay of a group themselves."""

RULE_KEYS = _words(
    "algorithm algo optimizer optim opt update_rule",
    "optimizer_type optimizer_name optim_type opt_type",
    "optimizer_class optimizer_cls optim_class optim_cls opt_class",
)
"""Keys whose value names a rule."""
LABELS_OR_RULES = {"kind", "type", "method", "group_type"}
"""Keys whose value names a rule, or is a label."""
NO_RULE = {"", "auto", "default", "main", "none"}
"""Values of `RULE_KEYS` that leave the rule to the optimizer."""

FALL_BACK = _words("muon normuon adamuon soap shampoo dion dion2 kron psgd")
"""Optimizers of matrices: where others' `use_X` is false for these, a group takes Adam's step."""
OPTIMIZERS = FALL_BACK | _words(
    "adam adamw lion sgd lamb lars sophia adafactor rmsprop adagrad adadelta adamax nadam radam",
    "adan adopt ademamix adabelief lbfgs galore madgrad prodigy scion",
)
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
NAMES_OF_STEPS = "ns_steps newton_schulz_steps num_ns_steps ns_iters ns_iterations backend_steps"

TORCH_ADAM = _words("lr betas eps weight_decay amsgrad maximize")
TORCH_ADAM |= _words("foreach capturable differentiable fused")
"""Options that every group of torch.optim.Adam and AdamW has."""

TORCH_SCALES = {None: "spectral", "original": "spectral", "match_rms_adamw": "match_rms_adamw"}
"""`adjust_lr_fn` of torch.optim.Muon, with the `scale` that multiplies an update by the same."""

Hints = tuple[tuple[str, str], ...]


def _mean(names: str, *options: str, **hints: str) -> dict[str, Hints]:
    """Return the hints for names of options: those of our options that they may mean, and of
    `hints` (option -> hint)."""
    pairs = [(option, f"did you mean {option!r}?") for option in options]
    return dict.fromkeys(names.split(), (*pairs, *hints.items()))


_BETAS = "give betas=(beta1, beta2)"

EQUIVALENTS: dict[str, Hints] = {
    **_mean(
        "momentum",
        betas="the decay rate of the momentum is betas[0]: give betas=(momentum, beta2)",
    ),
    **dict.fromkeys(
        ("beta1", "beta_1", "adam_beta1"),
        (("betas", _BETAS), ("momentum", "did you mean 'momentum'?")),
    ),
    **dict.fromkeys(
        ("beta2", "beta_2", "adam_beta2"), (("betas", _BETAS), ("beta2", "did you mean 'beta2'?"))
    ),
    **_mean("betas adam_betas", "betas", momentum="give betas[0] as momentum"),
    **_mean("beta3", "shampoo_beta"),
    **_mean("nesterov", "use_nesterov"),
    **_mean("use_nesterov", "nesterov"),
    **_mean(NAMES_OF_STEPS, "steps"),
    **_mean(
        "ns_coefficients ns_coeffs",
        coefficients="give coefficients='quintic' or 'polar_express'",
    ),
    **_mean(
        "adjust_lr_fn adjust_lr use_adjusted_lr",
        scale="give scale='spectral' or 'match_rms_adamw'",
    ),
    **_mean("bias_correction adam_debias", "correct_bias"),
    **_mean(
        "decoupled_weight_decay weight_decouple adam_w_mode decouple decoupled",
        weight_decay_method="give weight_decay_method='decoupled' or 'l2'",
    ),
    **_mean(
        "precond_freq precondition_freq preconditioner_update_freq update_freq",
        "precondition_frequency",
    ),
    **_mean("normalize_grads", "normalize_preconditioned_grads"),
    **_mean("one_sided", sides="give sides='smaller'"),
}
"""Names of options -> options of the same meaning, the first of which that a rule has is meant,
each with a hint."""

Happens = Callable[[Any, Rule], bool]
"""Whether the value of a key asks for what the rule does anyway."""


def is_quintic(value: Any) -> bool:
    """Whether these are Jordan's coefficients, alone or as the only ones of a list, up to the
    rounding of fp32, in which tensors have them."""
    numbers = plain(value.tolist() if hasattr(value, "tolist") else value)
    if isinstance(numbers, list | tuple) and len(numbers) == 1:
        numbers = plain(numbers[0])
    return (
        isinstance(numbers, list | tuple)
        and len(numbers) == len(QUINTIC)
        and all(isinstance(x, int | float) for x in numbers)
        and all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(numbers, QUINTIC, strict=True))
    )


def _decouples(value: Any, rule: Rule) -> bool:
    return not rule.couples_decay if value else rule.couples_decay or not rule.decay(1.0)


def _sets(option: str, wanted: Any = True) -> Happens:
    """The key is true where an option of the rule has the wanted value."""
    return lambda value, rule: bool(value) == (getattr(rule, option, not wanted) == wanted)


def _scales(scales: dict[Any, Any]) -> Happens:
    """The key's value stands for the `scale` of the rule (`scales`: value -> scale)."""
    return lambda value, rule: scales.get(plain(value)) == getattr(rule, "scale", "none")


LEAVE_OUT = "no rule of Lather has that; leave the key out"
SCALE = 'give a group of muon or soap_muon "scale": "spectral" or "match_rms_adamw" in its place'
METHOD = 'give the group a "weight_decay_method" in its place: "decoupled", "l2" or "independent"'
COEFFICIENTS = 'give a group of muon or soap_muon "coefficients": "quintic" or "polar_express"'
STEPS = "did you mean 'steps', an option of muon and soap_muon?"
NORMALIZE = "did you mean 'normalize_preconditioned_grads', an option of soap?"
MULTIPLY = "no rule multiplies its rate: multiply lr yourself, and give the group the product"

PROPERTIES: dict[str, tuple[Happens, str]] = {
    "amsgrad ams_bound differentiable adanorm rectify centered stable_adamw cautious caution "
    "use_gc grad_averaging dampening lr_decay momentum_decay "
    "qk_clip grokfast quantize mars merge_dims use_fallback": (
        lambda value, rule: not value,
        LEAVE_OUT,
    ),
    "cautious_wd cautious_weight_decay": (
        _sets("cautious_decay"),
        "did you mean 'cautious_decay'?",
    ),
    "normalize_grads": (_sets("normalize_preconditioned_grads"), NORMALIZE),
    "lr_factor": (lambda value, rule: value == 1, MULTIPLY),
    "decoupled_weight_decay weight_decouple adam_w_mode decouple use_decoupled_weight_decay": (
        _decouples,
        METHOD,
    ),
    "use_eigh": (
        lambda value, rule: not value or getattr(rule, "refresh_method", "") == "eigh",
        'give the group "refresh_method": "eigh" in its place',
    ),
    "fixed_decay": (_sets("weight_decay_method", "independent"), METHOD),
    "adjust_lr_fn": (_scales(TORCH_SCALES), SCALE),
    "adjust_lr": (_scales({None: 1.0, "rms_norm": "match_rms_adamw"}), SCALE),
    "use_adjusted_lr": (_scales({True: "match_rms_adamw", False: "spectral"}), SCALE),
    "ns_coefficients ns_coeffs": (
        lambda value, rule: getattr(rule, "coefficients", "") == "quintic" and is_quintic(value),
        COEFFICIENTS,
    ),
    "ns_method": (
        lambda value, rule: value == "newton_schulz" and hasattr(rule, "coefficients"),
        LEAVE_OUT,
    ),
    "use_polar_express": (_sets("coefficients", "polar_express"), COEFFICIENTS),
    NAMES_OF_STEPS: (
        lambda value, rule: as_count(value) == getattr(rule, "steps", None),
        STEPS,
    ),
    "bias_correction adam_debias": (
        lambda value, rule: bool(value) == getattr(rule, "correct_bias", bool(value)),
        "did you mean 'correct_bias'?",
    ),
}
WHAT_HAPPENS = {name: row for names, row in PROPERTIES.items() for name in names.split()}
"""Keys that tell a property of the step: whether the value asks for what the rule does anyway, and
the remedy if it does not."""

ASKING = WHAT_HAPPENS.keys() | RULE_KEYS | LABELS_OR_RULES
"""Keys that may be refused, depending on their values, as may `use_X` and `is_X`."""
