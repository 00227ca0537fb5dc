"""Runs that were begun before `[optim]` had a rule's own options and a section for each kind of parameters.

Their config.toml has no `[optim.rest]`. They go on with the optimizer of that time, to the bit: routers are matrices, everything has one
learning rate, and for "adamw" it is torch's AdamW. What their `[optim]` was is kept as it was, so that they can be told the next time, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from lather.config.optim import KINDS, OptimConfig
from lather.errors import RunError


@dataclass(frozen=True)
class OldOptimConfig(OptimConfig):
    """The `[optim]` of that time."""

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


OLD_KEYS = {one.name for one in fields(OldOptimConfig)}
SHARED_KEYS = {one.name for one in fields(OptimConfig)} | {"eps", "weight_decay"}
"""Keys of both rules of that time; all others but adam_betas were SOAP's, and without effect under "adamw"."""


def is_old(config: Mapping[str, Any]) -> bool:
    """Whether a saved configuration is of that time."""
    return "rest" not in config.get("optim", {})


def in_new_keys(optim: Mapping[str, Any]) -> dict[str, Any]:
    """An `[optim]` that was written at that time: `adam_betas` are the betas of the rest, and under "adamw" of everything; there keys of
    SOAP had no effect."""
    new = dict(optim)
    betas = new.pop("adam_betas", None)
    if new.get("name") == "adamw":
        new = {key: value for key, value in new.items() if key in SHARED_KEYS or key not in OLD_KEYS}
        return new if betas is None else {**new, "betas": betas}
    return new if betas is None else {**new, "rest": {"betas": betas, **new.get("rest", {})}}


def going_on(saved: OldOptimConfig, asked: OptimConfig, run_dir: str) -> OldOptimConfig:
    """`asked` as an `[optim]` of that time. What it leaves at its default of today is what it was by default then, or what was saved.

    Raises RunError if it asks for something that there was not.
    """
    if isinstance(asked, OldOptimConfig):
        return asked
    if asked.name != saved.name:
        return replace(saved, name=asked.name)  # whoever compares the two says so
    given = {name: value for name, value in asdict(asked).items() if value != getattr(type(asked), name, None)}
    for kind in KINDS:
        given |= {f"{kind}.{key}": value for key, value in given.pop(kind, {}).items() if value not in (None, "")}
    betas = given.pop("rest.betas", None) or (given.pop("betas", None) if asked.name == "adamw" else None)
    if betas is not None:
        given["adam_betas"] = betas
    for key in given.keys() - OLD_KEYS:
        raise RunError(
            f"run_dir = {run_dir!r} was begun before there was optim.{key} (= {given[key]!r}), and goes on as it was begun: "
            "leave that out, or give another --run-dir"
        )
    then = asdict(OldOptimConfig()) | {"name": asked.name} | given
    for name in then.keys() - given.keys():
        is_default = getattr(type(asked), name, None) == getattr(saved, name)
        has_effect = asked.name == "soap" or name in (*SHARED_KEYS, "adam_betas")
        if is_default or not has_effect:
            then[name] = getattr(saved, name)
    return OldOptimConfig(**then)
