"""Translates a saved optimizer of the package muonium (0.2) to the form of torch.optim.Muon and
AdamW, which `loading` takes over.

Its momentum is B = mu B + G and its step W -= lr r (U + d W) with r = sqrt(max(1, m / n)). The
momentum of Lather's rules, mu B + (1 - mu) G, is 1 - mu times that. The step is the same with
scale="spectral", but for the decay of matrices that are longer than wide, which Lather does not
multiply by r."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lather.optim.batched.known_keys import QUINTIC

logger = logging.getLogger(__name__)

COEFFICIENTS = {"newton_schulz": QUINTIC, "polar_express": "polar_express"}
"""Values of `orthogonalization_strategy`, with ours of `ns_coefficients`."""
KEYS = {"algorithm", "use_muon", "wd"}
"""Keys by which its groups are known."""
OF_MUON = {"use_cautious_wd", "orthogonalization_strategy", "flatten", "split_sizes", "foreach"}
OF_ADAM = {"decoupled_weight_decay", "has_complex"}


def from_muonium(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a saved optimizer with those of its groups translated that are muonium's. Raises
    ValueError for a group whose step no rule takes."""
    states, groups = dict(saved["state"]), []
    for number, group in enumerate(saved["param_groups"]):
        if not group.keys() >= KEYS:
            groups.append(group)
        elif group["use_muon"]:
            groups.append(_of_muon(group, f"the saved group {number} of muonium"))
            scale, tall = 1 - group["momentum"], 0
            for key in group["params"]:
                if state := states.get(key):
                    states[key] = {"momentum_buffer": state["momentum_buffer"] * scale}
                    tall += group["wd"] > 0 and float(state["lr_ratio"]) > 1
            if tall:
                logger.warning(
                    "muonium multiplies the decay of matrices that are longer than wide by "
                    "sqrt(rows / columns); for %d parameters it is lower here",
                    tall,
                )
        else:
            groups.append(_of_adam(group, f"the saved group {number} of muonium"))
    return {**saved, "param_groups": groups, "state": states}


def _of_muon(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    begin = "begin with a fresh state"
    if group["algorithm"] != "muon":
        raise ValueError(
            f"{what} has algorithm={group['algorithm']!r}, of which Lather takes 'muon' alone: "
            f"{begin}, for normuon with normalize='row'"
        )
    if group.get("split_sizes"):
        raise ValueError(
            f"{what} has split_sizes={group['split_sizes']!r}: {begin}, with head_rows"
        )
    strategy = group.get("orthogonalization_strategy", "polar_express")  # not in old states
    return {key: value for key, value in group.items() if key not in KEYS | OF_MUON} | {
        "lr": float(group["lr"]),
        "weight_decay": group["wd"],
        "cautious_decay": bool(group.get("use_cautious_wd", True)),
        "ns_coefficients": COEFFICIENTS[strategy],
        "adjust_lr_fn": "original",
    }


def _of_adam(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    if group["amsgrad"]:
        raise ValueError(f"{what} has amsgrad=True: begin with a fresh state")
    return {key: value for key, value in group.items() if key not in KEYS | OF_ADAM} | {
        "lr": float(group["lr"]),
        "weight_decay": group["wd"],
        "weight_decay_method": "decoupled" if group["decoupled_weight_decay"] else "l2",
    }
