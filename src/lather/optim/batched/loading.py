"""Checks a saved optimizer before it is loaded, and takes over the state of other optimizers.

torch.optim.Muon and Jordan's Muon keep the same momentum as Lather's rules with Muon's momentum, B
= mu B + (1 - mu) G, and nothing else: no step count, no rows' moments, no bases. (Groups of the
package muonium are translated first, by the module of that name.) Such a state is completed: what
is missing has its initial value. The options are translated, so that training continues with the
same update. Adam's state (torch.optim.AdamW) fits as it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lather.boxes import is_dtensor, local
from lather.optim.batched.formats import CODES, check_finite, pack
from lather.optim.batched.known_keys import QUINTIC, TORCH_SCALES, is_quintic
from lather.optim.batched.matrix_layout import NORM, Layout
from lather.optim.batched.muonium import from_muonium
from lather.optim.batched.optional_entries import with_optional
from lather.optim.batched.remainders import check_remainder
from lather.optim.batched.roster import plain_options
from lather.optim.batched.rule_groups import Groups, RuleGroups, whole_layout
from lather.optim.options import name_of, options_of
from lather.optim.plain import is_placeholder, plain
from lather.optim.rule import Rule

logger = logging.getLogger(__name__)

PLACES = ("ownership", "offload")
"""Options that say where state is, which a saved optimizer does not decide."""

MOMENTUM = "momentum_buffer"

TORCH_MUON = {"ns_coefficients", "ns_steps", "adjust_lr_fn"}
"""Options by which groups of torch.optim.Muon are known."""
FRESH = "Load the weights alone, and let the optimizer begin with a fresh state"
OTHER_STEPS = ("adamuon", "scion")
"""Rules with Muon's options that do not take its step."""
JORDANS_MUON = {"params", "param_names", "lr", "initial_lr", "momentum", "weight_decay", "use_muon"}
"""All keys that a group of Jordan's Muon may have (MuonWithAuxAdam)."""


def checked(saved: Mapping[str, Any], groups: Groups, rule_groups: RuleGroups) -> dict[str, Any]:
    """Return a saved optimizer in the form in which it is loaded into an optimizer with these
    groups, from which it gets `PLACES`, a `state_dtype` other than None, to which its state is
    converted, and the options that it lacks; entries that another Muon lacks have their initial
    values. Raises ValueError if it does not fit."""
    saved = from_muonium(saved)
    theirs = saved["param_groups"]
    lengths = [[len(group["params"]) for group in all_groups] for all_groups in (theirs, groups)]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"the saved optimizer has parameter groups of {lengths[0]} parameters, this one of "
            f"{lengths[1]}: they must be equal"
        )
    states, loaded, numbers = (
        dict(saved["state"]),
        list[dict[str, Any]](),
        iter(range(sum(lengths[0]))),
    )
    num_completed = num_converted = 0
    for group, saved_group in zip(groups, theirs, strict=True):
        rule = rule_groups.rules[group["rule"]]
        _check_momentum(saved_group, rule, len(loaded))
        loaded.append(_loaded_group(group, saved_group, rule))
        if loaded[-1]["rule"] != group["rule"]:
            raise ValueError(
                f"the saved group {len(loaded) - 1} has rule {loaded[-1]['rule']!r}, this "
                f"optimizer's has {group['rule']!r}: they must be equal"
            )
        made = _made_rule(loaded[-1], saved_group, rule, len(loaded) - 1)
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            number, state = next(numbers), states.get(key)
            spread = rule_groups.sharding.spread_of(p, group)
            layout = whole_layout(p, made, spread, f"parameter {number}")
            if state:
                if not _is_foreign(saved_group):
                    state = with_optional(layout, state)
                states[key] = _loaded_state(saved_group, layout, state, number)
                num_completed += "step" in states[key] and "step" not in state
                converted = layout.converted(states[key])
                num_converted += converted is not states[key] and not _is_foreign(saved_group)
                states[key] = converted
        rule_groups.unknown_in(loaded[-1], made, exempt=rule_groups.defaults)
    if num_completed:
        logger.warning(
            "momentum_buffer and options of another Muon were taken for %d parameters; step counts "
            "begin at 0, and all other entries at their initial values",
            num_completed,
        )
    if num_converted:
        logger.warning(
            "the saved state of %d parameters was converted to the state_dtype of this optimizer",
            num_converted,
        )
    return {**saved, "param_groups": loaded, "state": states}


def with_packed_factors(state: Mapping[str, Any], layout: Layout) -> Mapping[str, Any]:
    """Return a saved state with its factors packed; older versions have saved them whole."""
    factors = dict[str, Tensor]()
    for name, form in layout.formats.items():
        x = state.get(name)
        if form.is_packed and isinstance(x, Tensor) and x.shape[-2:] == form.entry.shape:
            factors[name] = pack(x.full_tensor() if is_dtensor(x) else x)
    return {**state, **factors} if factors else state


def without_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved optimizer without state and functions: torch would cast the state and keep
    both it and the result, and copy functions."""
    groups = [
        {key: value for key, value in group.items() if not callable(value)}
        for group in saved["param_groups"]
    ]
    return {**saved, "param_groups": groups, "state": {}}


def _is_foreign(group: Mapping[str, Any]) -> bool:
    """Whether a saved group is not of an optimizer of Lather."""
    return "rule" not in group


def _takes_muons_step(rule: type[Rule]) -> bool:
    is_muon = options_of(rule).keys() >= {"momentum", "coefficients", "scale"}
    return is_muon and name_of(rule) not in OTHER_STEPS


def _muon_options(group: Mapping[str, Any], rule: type[Rule]) -> dict[str, Any] | None:
    """Return the options of a rule with Muon's momentum that take the same step as a saved group
    of torch.optim.Muon or of Jordan's Muon; None if the group is of neither, or the rule is
    another. Raises ValueError if there are no options for the same step."""
    if not _takes_muons_step(rule) or not _is_foreign(group):
        return None
    same = {key: group[key] for key in ("lr", "weight_decay", "momentum") if key in group}
    same |= {"coefficients": "quintic", "weight_decay_method": "decoupled"}
    if group.keys() >= TORCH_MUON:
        scale = plain(group["adjust_lr_fn"])
        coefficients = group["ns_coefficients"]  # a name in those of `from_muonium`
        if isinstance(coefficients, str):
            same |= {"coefficients": coefficients}
        elif not is_quintic(coefficients):
            raise ValueError(
                f"the saved optimizer is a torch.optim.Muon with ns_coefficients="
                f"{coefficients!r}; of these, Lather takes {QUINTIC} alone: "
                "begin with a fresh state, and coefficients='quintic' or 'polar_express'"
            )
        if scale not in TORCH_SCALES:
            known = ", ".join(map(repr, TORCH_SCALES))
            raise ValueError(f"the saved adjust_lr_fn={scale!r} is not one of {known}")
        same |= {"nesterov": group["nesterov"], "steps": group["ns_steps"]}
        return same | {"scale": TORCH_SCALES[scale]}
    if group.get("use_muon") and group.keys() <= JORDANS_MUON:
        return same | {"nesterov": True, "steps": 5, "scale": "spectral"}
    return None


def _check_momentum(saved: Mapping[str, Any], rule: type[Rule], number: int) -> None:
    """Raise ValueError for the group of another optimizer whose momentum has another meaning than
    the rule's; without state (SGD without momentum has none) nothing else would show it."""
    if "momentum" not in saved or not _takes_muons_step(rule) or not _is_foreign(saved):
        return
    if _muon_options(saved, rule) is None:
        keys = ", ".join(sorted(map(str, saved.keys() - {"params"})))
        raise ValueError(
            f"the saved group {number} (with {keys}) is of another optimizer than torch.optim.Muon "
            "and Jordan's and muonium's Muon, whose momentum alone "
            f"{name_of(rule)!r} takes. {FRESH}"
        )


def _loaded_group(
    group: Mapping[str, Any], saved: Mapping[str, Any], rule: type[Rule]
) -> dict[str, Any]:
    """Return a saved group with plain values, and with the options of `group`, into which it is
    loaded, that it lacks; a group of another optimizer gets all keys that it lacks. `PLACES`,
    `state_dtype` unless it is None, and an option that is a function in either group, are those of
    `group`. So are names of parameters, if it has any: a flattened state dict has the names of the
    saved group that contained the first parameter, which may have been a group of another pipeline
    stage.
    """
    lacking = group if _is_foreign(saved) else options_of(rule)
    if (options := _muon_options(saved, rule)) is not None:
        saved = {key: saved[key] for key in saved.keys() - TORCH_MUON - {"eps"}} | options
    values = {key: value for key, value in saved.items() if not is_placeholder(value)}
    if "param_names" in group or len(saved.get("param_names", ())) != len(group["params"]):
        values.pop("param_names", None)
    missing = {key: group[key] for key in lacking if key != "params"}
    functions = {
        key: x for key, x in group.items() if callable(x) or is_placeholder(saved.get(key))
    }
    loaded = missing | values | functions | {key: group[key] for key in PLACES}
    if group["state_dtype"] is not None:
        loaded["state_dtype"] = group["state_dtype"]
    return loaded | plain_options(loaded, rule)


def _made_rule(
    group: Mapping[str, Any], saved: Mapping[str, Any], rule: type[Rule], number: int
) -> Rule:
    """Make the rule with the options of loaded group `number`, which was `saved`. Raises ValueError
    if they are another optimizer's and not valid."""
    try:
        return rule(**{name: group[name] for name in options_of(rule)})
    except (TypeError, ValueError) as error:
        if not _is_foreign(saved):
            raise
        raise ValueError(
            f"the saved group {number} is of another optimizer, whose options the rule "
            f"{name_of(rule)!r} cannot take: {error}. {FRESH}"
        ) from None


def _loaded_state(
    group: Mapping[str, Any], layout: Layout, state: Mapping[str, Any], number: int
) -> Mapping[str, Any]:
    """Return the saved state of parameter `number`, completed if it is that of another Muon. Raises
    ValueError if it does not fit. `group`: the group as it was saved."""
    if missing := [key for key, value in state.items() if is_placeholder(value)]:
        raise ValueError(
            f"the saved optimizer has no {', '.join(missing)} of parameter {number} with shape "
            f"{layout.shape}. In a flattened state dict, torch puts an empty dict in the place "
            "of what is missing, also with strict=False. Take that from this optimizer instead: "
            "set_optimizer_state_dict(model, optimizer, {**get_optimizer_state_dict(model, "
            "optimizer, options=options), **saved}, options=options)"
        )
    rule, is_momentum = layout.rule, state.keys() == {MOMENTUM} <= layout.formats.keys()
    if is_momentum and _muon_options(group, type(rule)) is not None:
        cpu = torch.device("cpu")
        initial = {
            name: x.view(layout.shape_of(layout.entries[name]))
            for name, x in layout.allocate(cpu).items()
            if name not in layout.formats[MOMENTUM].stored
        }
        state = {"step": torch.zeros((), dtype=torch.float32, device=cpu), **initial, **state}
    state = with_packed_factors(state, layout)
    what = f"the saved state of parameter {number} with shape {layout.shape}"
    is_complete = {NORM, *state} == {NORM, "step", *layout.stored_in(state)}
    if _is_foreign(group) and not is_complete:
        raise ValueError(
            f"{what} is of another optimizer ({', '.join(map(str, state))}), from which the rule "
            f"{name_of(type(rule))!r} can take nothing: give the group the rule of that optimizer "
            "(muon or soap_muon for torch's, Jordan's and muonium's Muon, adamw for Adam), with "
            "the same parameters in the same order, or load the weights alone and let the "
            "optimizer begin with a fresh state"
        )
    layout.check_state(state, what)
    check_remainder(state, layout.shape, what)
    for name, form in layout.formats.items():
        if form.dtype in CODES and form.key not in state:
            check_finite(local(state[name]), f"{name} in {what}")
    return state
