"""State that other optimizers have saved: whose it is, and what a rule of Lather can take from it.

torch.optim.Muon and Jordan's Muon keep the same momentum as Lather's rules with Muon's momentum, B
= mu B + (1 - mu) G, and nothing else: no step count, no rows' moments, no bases. Such a state is
completed: what is missing has its initial value. The options are translated, so that the run goes
on with the same update. Adam's state (torch.optim.AdamW) fits as it is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from lather.optim.batched.known_keys import QUINTIC, TORCH_SCALES, is_quintic
from lather.optim.batched.matrix_layout import Layout
from lather.optim.batched.roster import plain_options
from lather.optim.options import name_of, options_of
from lather.optim.plain import is_placeholder, plain
from lather.optim.rule import Rule

logger = logging.getLogger(__name__)

MOMENTUM = "momentum_buffer"
ADAM = {"exp_avg", "exp_avg_sq"}

TORCH_MUON = {"ns_coefficients", "ns_steps", "adjust_lr_fn"}
"""Options by which groups of torch.optim.Muon are known."""
JORDANS_MUON = {"params", "param_names", "lr", "initial_lr", "momentum", "weight_decay", "use_muon"}
"""All keys that a group of Jordan's Muon may have (MuonWithAuxAdam)."""


def is_foreign(group: Mapping[str, Any]) -> bool:
    """Whether a saved group is not of an optimizer of Lather."""
    return "rule" not in group


def muon_options(group: Mapping[str, Any], rule: type[Rule]) -> dict[str, Any] | None:
    """Return the options of a rule with Muon's momentum that take the same step as a saved group
    of torch.optim.Muon or of Jordan's Muon; None if the group is of neither, or the rule is
    another. Raises ValueError if there are no such options."""
    is_muon = options_of(rule).keys() >= {"momentum", "coefficients", "scale"}
    if not is_muon or not is_foreign(group):
        return None
    same = {"coefficients": "quintic", "weight_decay_method": "decoupled"}
    own = {key: group[key] for key in ("lr", "weight_decay", "momentum") if key in group}
    if group.keys() >= TORCH_MUON:
        scale = plain(group["adjust_lr_fn"])
        if not is_quintic(group["ns_coefficients"]):
            raise ValueError(
                f"the saved optimizer is a torch.optim.Muon with ns_coefficients="
                f"{group['ns_coefficients']!r}; of these, Lather takes {QUINTIC} alone: "
                "begin with a fresh state, and coefficients='quintic' or 'polar_express'"
            )
        if scale not in TORCH_SCALES:
            known = ", ".join(map(repr, TORCH_SCALES))
            raise ValueError(f"the saved adjust_lr_fn={scale!r} is not one of {known}")
        return {
            **same,
            **own,
            "nesterov": group["nesterov"],
            "steps": group["ns_steps"],
            "scale": TORCH_SCALES[scale],
        }
    if group.get("use_muon") and group.keys() <= JORDANS_MUON:
        return {**same, **own, "nesterov": True, "steps": 5, "scale": "spectral"}
    return None


def as_own(own: Mapping[str, Any], group: Mapping[str, Any], rule: type[Rule]) -> dict[str, Any]:
    """Return a saved group with the options that it lacks, and `ownership`, taken from the
    optimizer's own group; all options are plain values. A group of another optimizer gets all keys
    that it lacks."""
    lacking = own if is_foreign(group) else options_of(rule)
    if (options := muon_options(group, rule)) is not None:
        group = {key: group[key] for key in group.keys() - TORCH_MUON - {"eps"}} | options
    missing = {key: own[key] for key in lacking if key != "params"}
    whole = {**missing, **_values_to_load(group, own), "ownership": own["ownership"]}
    return {**whole, **plain_options(whole, rule)}


def _values_to_load(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a saved group that are to be loaded into the group `own`. What is a
    function in one of the two is that of `own`, and names of parameters are loaded only if `own`
    has none and they fit.

    A flattened state dict has the names of the saved group that contained the first parameter; that
    may have been a group of another pipeline stage.
    """
    kept = [key for key in own if callable(own[key]) or is_placeholder(saved.get(key))]
    values = {key: value for key, value in saved.items() if not is_placeholder(value)}
    if "param_names" in own or len(saved.get("param_names", ())) != len(own["params"]):
        values.pop("param_names", None)  # torch puts those of `own` there
    return values | {key: own[key] for key in kept}


def taken(
    group: Mapping[str, Any],
    layout: Layout,
    state: Mapping[str, Any],
    what: str,
) -> Mapping[str, Any]:
    """Return the saved state of a parameter as state of its layout: as it is, or completed if it
    is that of another Muon.

    Raises ValueError if it does not fit. `group`: the group as it was saved.
    """
    names = {"step", *layout.entries}
    is_taken = state.keys() == {MOMENTUM} <= names
    if is_taken and muon_options(group, type(layout.rule)) is not None:
        state = _completed(layout, state)
    if is_foreign(group) and state.keys() != names:
        raise ValueError(
            f"{what} is {_whose(group, state)}, from which the rule {name_of(type(layout.rule))!r} "
            f"can take nothing: {_remedy(group, state)}"
        )
    layout.check_state(state, what)
    return state


def report_taken(count: int) -> None:
    """Log that the momentum of this number of parameters was taken from another Muon."""
    logger.warning(
        "momentum_buffer and options of another Muon were taken for %d parameters; step counts "
        "begin at 0, and all other entries at their initial values",
        count,
    )


def _completed(layout: Layout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter whose saved entry is the momentum alone, with all other
    entries at their initial values."""
    cpu = torch.device("cpu")
    whole: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=cpu)}
    for name, entry in layout.entries.items():
        whole[name] = entry.allocate(layout.batch, cpu).view(layout.shape_of(entry))
    return {**whole, **state}


def _whose(group: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return in words which optimizer saves such a group with such entries for a parameter."""
    if group.keys() >= TORCH_MUON:
        owner = "of torch.optim.Muon"
    elif state.keys() <= {MOMENTUM}:
        owner = "of torch.optim.SGD" if "dampening" in group else "of another Muon, or of SGD"
    elif state.keys() >= ADAM:
        owner = "of Adam or AdamW" + (" with amsgrad=True" if "max_exp_avg_sq" in state else "")
    else:
        owner = "of another optimizer"
    return f"{owner} ({', '.join(state)})"


def _remedy(group: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    same = "of the same parameters in the same order, or let the optimizer begin with a fresh state"
    if group.keys() >= TORCH_MUON:
        return f"load it into lather.optim.Muon or SOAPMuon {same}"
    if state.keys() == ADAM | {"step"}:
        return f'load it into lather.optim.AdamW, or into groups with "rule": "adamw", {same}'
    return "load the weights alone, and let the optimizer begin with a fresh state"
