"""Runs that were started before `[optim]` had the options of each rule and a section for each kind
of parameters, or before defaults of models were changed.

The config.toml of the former has no `[optim.rest]`. They continue with their original optimizer, to
the bit: routers count as matrices, all parameters have one learning rate, and "adamw" is torch's
AdamW. Their `[optim]` is written back in its old form, so that the next start recognizes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from lather.config.optim import KINDS, OptimConfig
from lather.errors import RunError, as_toml
from lather.models.families import ModelConfig


@dataclass(frozen=True)
class OldOptimConfig(OptimConfig):
    """The old form of `[optim]`."""

    name: str = "soap"
    lr: float = 6e-3
    betas: tuple[float, float] = (0.95, 0.95)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    shampoo_beta: float = -1.0
    precondition_frequency: int = 10
    precondition_warmup_steps: int = 0
    adam_warmup_steps: int = 1
    second_moment: Literal["permute", "rotate"] = "rotate"
    use_eigh: bool = False
    use_adaptive_criteria: bool = False
    async_refresh: bool = False
    max_precond_dim: int = 8192
    max_update_rms: float = 0.0


EARLIER_DEFAULTS = {"aux_loss_alpha": 0.001, "router_aux_loss_coef": 0.001}
"""Fields of models whose defaults have changed, and the defaults before."""

OLD_KEYS = {one.name for one in fields(OldOptimConfig)}
SHARED_KEYS = {one.name for one in fields(OptimConfig)} | {"eps", "weight_decay"}
"""Old keys that applied to both rules; all others except adam_betas applied to "soap" only."""


def is_old(config: Mapping[str, Any]) -> bool:
    """Return whether a saved configuration has the old form of `[optim]`."""
    return "rest" not in config.get("optim", {})


def in_new_keys(optim: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an old `[optim]` to today's keys: `adam_betas` become the betas of the rest, or of
    everything under "adamw". Options of SOAP had no effect under "adamw" and are dropped."""
    new = dict(optim)
    if new.pop("use_eigh", False):
        new["refresh_method"] = "eigh"
    betas = new.pop("adam_betas", None)
    if new.get("name") == "adamw":
        new = {
            key: value for key, value in new.items() if key in SHARED_KEYS or key not in OLD_KEYS
        }
        return new if betas is None else {**new, "betas": betas}
    return new if betas is None else {**new, "rest": {"betas": betas, **new.get("rest", {})}}


def with_earlier_defaults(saved: ModelConfig, asked: ModelConfig) -> ModelConfig:
    """Return `asked`, in which the fields that it leaves at today's defaults have their earlier
    defaults if the run was begun with these."""
    earlier: dict[str, Any] = {
        name: before
        for name, before in EARLIER_DEFAULTS.items()
        if getattr(saved, name, None) == before
        and getattr(asked, name, None) == getattr(type(asked), name, before)
    }
    return replace(asked, **earlier) if type(saved) is type(asked) else asked


def going_on(saved: OldOptimConfig, asked: OptimConfig, run_dir: str) -> OldOptimConfig:
    """Return `asked` in the old form of `[optim]`. A field that `asked` leaves at today's default
    gets its old default, or its saved value if that equals today's default or has no effect.

    Raises RunError if `asked` sets an option that the old form does not have.
    """
    if isinstance(asked, OldOptimConfig):
        return asked
    if asked.name != saved.name:
        return replace(
            saved, name=asked.name
        )  # the caller compares both and reports the difference
    given = {
        name: value
        for name, value in asdict(asked).items()
        if value != getattr(type(asked), name, None)
    }
    for kind in KINDS:
        given |= {
            f"{kind}.{key}": value
            for key, value in given.pop(kind, {}).items()
            if value not in (None, "")
        }
    betas = given.pop("rest.betas", None) or (
        given.pop("betas", None) if asked.name == "adamw" else None
    )
    if betas is not None:
        given["adam_betas"] = betas
    for key in given.keys() - OLD_KEYS:
        raise RunError(
            f"run_dir = {run_dir!r} was started before optim.{key} (= {as_toml(given[key])}) "
            "existed, and continues with its old options: "
            f"leave out optim.{key}, or give another --run-dir"
        )
    then = asdict(OldOptimConfig()) | {"name": asked.name} | given
    for name in then.keys() - given.keys():
        is_default = getattr(type(asked), name, None) == getattr(saved, name)
        has_effect = asked.name == "soap" or name in (*SHARED_KEYS, "adam_betas")
        if is_default or not has_effect:
            then[name] = getattr(saved, name)
    return OldOptimConfig(**then)
