"""torch's flattened state dicts (`flatten_optimizer_state_dict=True`), which torchtitan uses: they
load as nested ones do, whatever a group contains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optim_helpers import all_same, same_state, through_a_file
from ranks import run_ranks
from strangers import Shampoo
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from lather.optim import SOAP, AdamW, MatrixOptimizer, Muon, parameter_groups
from lather.optim.schedules import LinearFrequency

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
NESTED = StateDictOptions()
FORMS = {"flat": FLAT, "nested": NESTED}
forms = pytest.mark.parametrize("form", FORMS)


def every_second(step: int) -> int:
    return 2


class Calendar:
    """A callable that cannot be copied, as one that holds a lock or a process group."""

    def __call__(self, step: int) -> int:
        return 2

    def __deepcopy__(self, memo: object) -> Calendar:
        raise TypeError("a calendar is not copied")


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 5), nn.LayerNorm(5))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        net(torch.randn(3, 6, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for p, q in zip(source.parameters(), target.parameters(), strict=True):
            q.copy_(p)


State = dict[str, Any]


def through_dcp(state: State, room: State, folder: Path, **options: Any) -> State:
    """Save `state`, load it into `room`, and return this."""
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    dcp.load({"optimizer": room}, checkpoint_id=folder, **options)
    return room


def soap(net: nn.Module, frequency: Any) -> MatrixOptimizer:
    """Make an optimizer with four rules. As in torch, all groups have all defaults of the
    optimizer, also those whose rule has no interval."""
    groups: list[dict[str, Any]] = [
        {"params": [("0.weight", net[0].weight)]},
        {"params": [("2.weight", net[2].weight)], "rule": "muon"},
        {"params": [("3.weight", net[3].weight), ("3.bias", net[3].bias)], "rule": "adamw"},
        {"params": [("0.bias", net[0].bias), ("2.bias", net[2].bias)], "rule": Shampoo},
    ]
    groups[3]["precondition_frequency"] = frequency
    return SOAP(groups, lr=1e-2, precondition_frequency=frequency)


def reloaded(form: str, way: str, saved: Any, own: Any, folder: Path, **options: Any) -> list[Any]:
    """Train with the interval `saved`, load into an optimizer with the interval `own`, check that
    both go on alike, and return the intervals after the load."""
    net, other = Net(), Net()
    optimizer, resumed = soap(net, saved), soap(other, own)
    train(net, optimizer, range(3))
    state = get_optimizer_state_dict(net, optimizer, options=FORMS[form])
    if way == "dcp":
        room = get_optimizer_state_dict(other, resumed, options=FORMS[form])
        state = through_dcp(state, room, folder, **options)
    else:
        state = through_a_file(state)
    set_optimizer_state_dict(other, resumed, state, options=FORMS[form])
    copy_weights(net, other)
    mine, theirs = list(net.parameters()), list(other.parameters())
    assert same_state(optimizer, mine, resumed, theirs)
    train(net, optimizer, range(3, 6))
    train(other, resumed, range(3, 6))
    assert all_same(mine, theirs)
    return [group["precondition_frequency"] for group in resumed.param_groups]


CALENDAR = Calendar()
INTERVALS: dict[str, tuple[Any, Any]] = {
    "a lambda": (every_second, lambda step: 2),
    "an object": (every_second, CALENDAR),
    "a schedule": (every_second, LinearFrequency(2, 2, 1)),
    "a function where a number was saved": (2, every_second),
    "a number where a function was saved": (every_second, 2),
}


@forms
@pytest.mark.parametrize("way", ["file", "dcp"])
@pytest.mark.parametrize("name", INTERVALS)
def test_an_interval_is_the_loaders(name: str, form: str, way: str, tmp_path: Path) -> None:
    """A function is not copied. In its place a distributed checkpoint has nothing, for which torch
    asks if the loader has a number."""
    saved, own = INTERVALS[name]
    lacks = way == "dcp" and not callable(own)
    partly: State = {"planner": DefaultLoadPlanner(allow_partial_load=True)} if lacks else {}
    found = reloaded(form, way, saved, own, tmp_path, **partly)
    assert all(value is own for value in found)


@forms
def test_keys_of_others_may_be_functions_too(form: str, tmp_path: Path) -> None:
    net, other = Net(), Net()
    optimizer = AdamW([{"params": net.parameters(), "on_step": print}])
    resumed = AdamW([{"params": other.parameters(), "on_step": print}])
    train(net, optimizer, range(2))
    state = get_optimizer_state_dict(net, optimizer, options=FORMS[form])
    room = get_optimizer_state_dict(other, resumed, options=FORMS[form])
    room = through_dcp(state, room, tmp_path)
    set_optimizer_state_dict(other, resumed, room, options=FORMS[form])
    assert resumed.param_groups[0]["on_step"] is print
    plain = AdamW(Net().parameters(), lr=1e-2)
    plain.load_state_dict(optimizer.state_dict())
    assert "on_step" not in plain.param_groups[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "mapping": {"state_dtype": {"moments": torch.bfloat16}, "betas": (0.9, 0.9)},
    "empty mapping": {"state_dtype": {}},
    "dtype": {"state_dtype": torch.float64},
    "tensor": {"lr": torch.tensor(1e-2)},
    "None and text": {"max_state_bytes": None, "sides": "smaller", "bucket_bytes": 10_000},
}


@forms
@pytest.mark.parametrize("case", OPTIONS)
def test_values_of_every_kind_come_back(case: str, form: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"lr": 1e-2, **OPTIONS[case]}
    net, other = Net(), Net()
    optimizer = SOAP(parameter_groups(net), **options)
    resumed = SOAP(parameter_groups(other), **copy.deepcopy(options))
    train(net, optimizer, range(2))
    optimizer.param_groups[0]["weight_decay"] = 0.125
    state = get_optimizer_state_dict(net, optimizer, options=FORMS[form])
    room = get_optimizer_state_dict(other, resumed, options=FORMS[form])
    room = through_dcp(state, room, tmp_path)
    set_optimizer_state_dict(other, resumed, room, options=FORMS[form])
    for group, loaded in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        assert {**group, "params": ()} == {**loaded, "params": ()}
    assert same_state(optimizer, list(net.parameters()), resumed, list(other.parameters()))


# --- parts of a model, as pipeline stages have them -----------------------------------------------


def part(*names: str) -> nn.Module:
    layers = {name: nn.Linear(4, 4) for name in ("a", "b", "c")}
    return nn.ModuleDict({name: layers[name] for name in names})


def test_a_state_of_pipeline_stages_loads_into_other_stages() -> None:
    """Names in saved groups are those of another stage; a group keeps its own."""
    for cls in (SOAP, Muon):
        torch.manual_seed(0)
        saved: dict[str, Any] = {}
        states = {}
        for stage in (part("a", "b"), part("c")):
            optimizer = cls(stage.named_parameters(), lr=1e-2)
            for p in stage.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
            saved |= get_optimizer_state_dict(stage, optimizer, options=FLAT)
            states |= {name: optimizer.state[p] for name, p in stage.named_parameters()}
        for names in (("a", "b", "c"), ("b", "c"), ("a",)):
            stage = part(*names)
            optimizer = cls(stage.named_parameters(), lr=1e-2)
            set_optimizer_state_dict(stage, optimizer, dict(saved), options=FLAT)
            named = dict(stage.named_parameters())
            assert optimizer.param_groups[0]["param_names"] == list(named)
            for name, p in named.items():
                for key, x in optimizer.state[p].items():
                    assert torch.equal(x, states[name][key])
                p.grad = torch.ones_like(p)
            optimizer.step()


# --- what is missing ------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("missing", ["state.2.weight.", "state.2.weight.exp_avg_sq", "2.weight."])
def test_missing_state_is_named_and_the_remedy_works(missing: str, strict: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True, strict=strict)
    net, other = Net(), Net()
    optimizer, resumed = SOAP(net.parameters(), lr=1e-2), SOAP(other.parameters(), lr=1e-2)
    train(net, optimizer, range(3))
    state = get_optimizer_state_dict(net, optimizer, options=options)
    saved = {key: x for key, x in state.items() if missing not in key}
    load = partial(set_optimizer_state_dict, other, resumed, options=options)
    with pytest.raises(ValueError, match=r"no .*exp_avg_sq.* of parameter 2 .*strict") as error:
        load(optim_state_dict=dict(saved))
    assert "{**get_optimizer_state_dict(model, optimizer, options=options)" in str(error.value)
    load(optim_state_dict={**get_optimizer_state_dict(other, resumed, options=options), **saved})
    before, after = optimizer.state[net[0].weight], resumed.state[other[0].weight]
    assert torch.equal(before["exp_avg"], after["exp_avg"])
    fresh = resumed.state[other[2].weight]
    assert not fresh["exp_avg_sq"].any()
    assert int(fresh["step"]) == (0 if missing.endswith(".") else 3)
    train(other, resumed, range(2))


# --- on meshes ------------------------------------------------------------------------------------


@forms
def test_only_the_nested_form_changes_optimizers(form: str) -> None:
    """torch looks for every option of the optimizer that loads in a flattened state."""
    net, other = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    copy_weights(net, other)
    optimizer = torch.optim.Muon(net.parameters(), lr=1e-2)
    train(nn.Sequential(net), optimizer, range(2))
    ours = Muon(other.parameters(), lr=1e-2, scale="spectral")
    saved = get_optimizer_state_dict(net, optimizer, options=FORMS[form])
    load = partial(set_optimizer_state_dict, other, ours, saved, options=FORMS[form])
    if form == "flat":
        with pytest.raises(KeyError, match="param_groups"):
            load()
        return
    load()
    buffer = optimizer.state[net.weight]["momentum_buffer"]
    assert torch.equal(ours.state[other.weight]["momentum_buffer"], buffer)


def sharded(rank: int, world_size: int, folder: str, form: str) -> list[str]:
    """Name what differs from training without a save, for functions and all rules under FSDP2."""
    wrong = []
    makers: dict[str, Callable[[nn.Module], MatrixOptimizer]] = {
        "four rules": lambda net: soap(net, every_second),
        "groups": lambda net: SOAP(parameter_groups(net), precondition_frequency=every_second),
    }
    for name, make in makers.items():
        nets = [Net(), Net()]
        for net in nets:
            fully_shard(net)
        net, other = nets
        optimizer, resumed = make(net), make(other)
        train(net, optimizer, range(3), rank)
        state = get_optimizer_state_dict(net, optimizer, options=FORMS[form])
        room = get_optimizer_state_dict(other, resumed, options=FORMS[form])
        room = through_dcp(state, room, Path(folder, f"{name} on {world_size}"))
        set_optimizer_state_dict(other, resumed, room, options=FORMS[form])
        copy_weights(net, other)
        train(net, optimizer, range(3, 6), rank)
        train(other, resumed, range(3, 6), rank)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            if not torch.equal(p.full_tensor(), q.full_tensor()):  # type: ignore[attr-defined]
                wrong.append(f"{name} {tuple(p.shape)}")
        found = [group["precondition_frequency"] for group in resumed.param_groups]
        wrong += [name for function in found if function is not every_second]
    return wrong


@forms
def test_functions_and_rules_under_fsdp2(form: str, tmp_path: Path) -> None:
    assert run_ranks(sharded, 2, str(tmp_path), form) == [[], []]
