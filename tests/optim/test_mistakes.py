"""Calls that an optimizer refuses or warns of, and what it says: `mistakes.txt` is reviewed like a
page.

    PYTHONPATH=tests:tests/optim python tests/optim/test_mistakes.py

writes what is said now into the file; review the difference.

An entry is lines of Python and, indented, what its last line raises or warns of. The names are
those of `names_of_an_entry`. A refused call changes nothing: no weight, state, group or counter,
nor the steps that follow."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strangers
import torch
from corpus import Recorded, entries, record
from optim_helpers import (
    Run,
    all_same,
    give_gradients,
    parameter,
    parameters,
    run,
    run_both,
    through_a_file,
)
from torch import Tensor, nn

from lather import optim
from lather.optim import MatrixOptimizer, Rule, constructor, schedules
from lather.optim.batched.known_keys import EQUIVALENTS, OTHER_NAMES
from lather.optim.optimizers import OPTIMIZER_OF
from lather.optim.options import options_of
from lather.optim.rules import RULES

CORPUS = Path(__file__).with_name("mistakes.txt")
LISTS = re.compile(r"(Known options: |Its arguments are |known options: ).*?(?=$| \(param)")
"""The names of all options, which entries do not repeat."""

Made = Callable[..., MatrixOptimizer]


CLASSES = tuple(OPTIMIZER_OF.values())


class OwnLion(MatrixOptimizer):
    """An optimizer of somebody's own, with the options of its rule by name."""

    rule = strangers.Lion

    @constructor(strangers.Lion)
    def __init__(self, params: Any, rule: Rule) -> None:
        super().__init__(params, rule)


def names_of_an_entry(source: str) -> dict[str, Any]:
    """Return the names; those of optimizers in lower case are trained ones."""
    return {
        **{name: getattr(optim, name) for name in dir(optim) if not name.startswith("_")},
        **vars(schedules),
        **{"torch": torch, "nn": nn, "np": np, "nan": torch.nan, "inf": torch.inf},
        **{"Lion": strangers.Lion, "OwnLion": OwnLion, "parameter": parameter},
        **{"p": parameter(4, 4), "q": parameter(4, 4, seed=1), "vector": parameter(3)},
        **{"stack": parameter(2, 4, 4), "filters": parameter(2, 2, 2, 2)},
        **{"meta": nn.Parameter(torch.empty(4096, 4096, device="meta"))},
        **{"in_group": in_group, "kept_in_group": kept_in_group},
        **{"trained": trained, "saved": saved, "without": without},
        **{cls.__name__.lower(): trained(cls) for cls in CLASSES if cls.__name__.lower() in source},
    }


def trained(made: Made, *shapes: tuple[int, ...], **options: Any) -> Any:
    """Return an optimizer of parameters of these shapes that has taken two steps, and has gradients
    for the third."""
    params = parameters(shapes or [(4, 6), (5, 5)])
    optimizer = made(params, **{"lr": 1e-2, **options})
    run(optimizer, params, range(2))
    give_gradients(params, 2)
    return optimizer


def saved(made: Made, *shapes: tuple[int, ...], **options: Any) -> Any:
    """Return the state of an optimizer that has taken two steps."""
    return trained(made, *shapes, **options).state_dict()


def without(state_dict: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a saved state without one of its entries."""
    states = state_dict["state"].items()
    fewer = {i: {key: x for key, x in state.items() if key != name} for i, state in states}
    return {**state_dict, "state": fewer}


OPTIONS = ("rule", "coefficients", "weight_decay_method", "lr")
"""Options in the groups of `in_group`; what else is given there is refused."""


def in_group(made: Any, **keys: Any) -> None:
    """Raise what an optimizer says about keys of a group: the same from its constructor, from
    `add_param_group`, from a step after somebody has written them into the group, and from
    `load_state_dict`. Without the keys the run goes on as if nothing had been."""
    if issubclass(made, Rule):
        made = _optimizer_of(made)
    options = {key: value for key, value in keys.items() if key in OPTIONS}
    asking = {key: value for key, value in keys.items() if key not in OPTIONS}
    optimizer, twin = (made([{"params": parameters([(4, 4)]), **options}]) for _ in range(2))
    for one in (optimizer, twin):
        run(one, one.param_groups[0]["params"], range(2))
    loaded = copy.deepcopy(optimizer.state_dict())
    loaded["param_groups"][0] |= {**asking, "lr": 0.5}
    calls: dict[str, Callable[[], Any]] = {
        "constructor": lambda: made([{"params": [parameter(4, 4)], **keys}]),
        "add_param_group": lambda: optimizer.add_param_group({"params": [parameter(3, 3)], **keys}),
        "step": optimizer.step,
        "load_state_dict": lambda: optimizer.load_state_dict(loaded),
    }
    errors = {}
    for name, call in calls.items():
        optimizer.param_groups[0].update(asking if name == "step" else {})
        with pytest.raises(ValueError, match="parameter group") as raised:
            call()
        errors[name] = raised.value
        for key in asking if name == "step" else ():
            del optimizer.param_groups[0][key]
    assert len(optimizer.param_groups) == 1
    assert len({_without_group(str(error)) for error in errors.values()}) == 1, errors
    assert outcome(optimizer) == outcome(twin)
    raise errors["constructor"]


OF_STEPS = ["lr", "rule", "betas", "normalize", "scale", "steps"]
OF_STEPS += ["weight_decay", "weight_decay_method"]
"""Options that the keys of `kept_in_group` may hold."""


def kept_in_group(made: Any, **keys: Any) -> None:
    """Check that a group takes the step that it takes without these keys, also if they come later
    or change, and after it was saved and loaded."""
    if issubclass(made, Rule):
        made = _optimizer_of(made)
    options = {key: keys[key] for key in OF_STEPS if key in keys}
    if options.get("rule") == "adamw" and "eps" in keys:
        options["eps"] = keys["eps"]
    shapes = [(4, 4), (5, 3)]
    a, b, c = (
        Run(made([{"params": params, **given}]), params)
        for given in (keys, options, options)
        for params in [parameters(shapes)]
    )
    run_both(a, b, range(2))
    for p, q in zip(a.params, c.params, strict=True):
        q.data.copy_(p.data)
    c.optimizer.load_state_dict(through_a_file(a.optimizer.state_dict()))
    run_both(c, b, range(2, 4))
    (group,) = c.groups
    assert all(unpacked(group[key]) == unpacked(value) for key, value in keys.items())
    group |= {"swa_lr": 0.7, "lr_scale": 7.0, "foreach": True}
    run_both(c, b, range(4, 6))
    assert all_same(b.params, c.params)
    assert group["lr_scale"] == 7.0


def unpacked(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _optimizer_of(rule: type[Rule]) -> Made:
    return lambda params, **options: MatrixOptimizer(params, rule(1e-2, **options))


def _without_group(text: str) -> str:
    return re.sub(r" \(parameter group .*\)$", "", text)


def outcome(optimizer: MatrixOptimizer) -> list[Any]:
    """Take a step with good gradients; return everything that it has changed, or what it says."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    give_gradients(params, 9)
    try:
        optimizer.step()
    except (TypeError, ValueError) as error:
        return [str(error)]
    return seen(optimizer)


def seen(value: Any) -> Any:
    """Return everything of an optimizer or a tensor that a refused call could have changed, in a
    form that can be compared."""
    if isinstance(value, MatrixOptimizer):
        groups = [{**group, "params": len(group["params"])} for group in value.param_groups]
        params = [p for group in value.param_groups for p in group["params"]]
        states = [[(name, seen(x)) for name, x in value.state.get(p, {}).items()] for p in params]
        return [list(map(seen, params)), states, repr(groups), value.counters]
    if isinstance(value, Tensor) and not value.is_meta:
        return value.shape, value.dtype, value.detach().to_dense().double().nan_to_num(7.0).tolist()
    return None


def answer_to(mistake: Recorded) -> str:
    """Return what is said to a call; one that is refused must be refused alike at a second try."""
    names = names_of_an_entry(f"{mistake.setup} {mistake.call}")
    exec(mistake.setup, names)
    optimizers = [x for x in names.values() if isinstance(x, MatrixOptimizer)]
    before = {name: seen(x) for name, x in names.items()}
    twins = copy.deepcopy(optimizers)
    answers = set()
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                exec(mistake.call, names)
            except (TypeError, ValueError) as error:
                answers.add(f"{type(error).__name__}: {error}")
                continue
        texts = [f"{one.category.__name__}: {one.message}" for one in caught]
        return " | ".join(texts) or "nothing is said"
    assert len(answers) == 1, f"{mistake.call}: {answers}"
    assert {name: seen(names[name]) for name in before} == before, mistake.call
    for optimizer, twin in zip(optimizers, twins, strict=True):
        assert outcome(optimizer) == outcome(twin), mistake.call
    return LISTS.sub(r"\1...", answers.pop()).replace("\n", " ")


ALL = list(entries(CORPUS.read_text("utf-8")))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mistake", ALL, ids=str)
def test_a_mistake_is_answered_with_a_remedy_and_changes_nothing(mistake: Recorded) -> None:
    assert answer_to(mistake) == mistake.answer


def test_every_option_with_a_range_has_a_value_that_is_refused() -> None:
    options = {
        option.name: option for rule in RULES.values() for option in options_of(rule).values()
    }
    refused = {
        match[1]
        for one in ALL
        if (match := re.match(r"ValueError: (\w+)=.* is not valid: give", one.answer))
    }
    assert {name for name, option in options.items() if option.range is not None} <= refused


def test_the_names_of_all_arguments_are_in_the_message() -> None:
    for cls in (optim.SOAP, optim.Muon):
        with pytest.raises(TypeError, match="Its arguments are params, lr") as raised:
            cls([parameter(2, 2)], xyzzy=1)
        assert all(f" {name}" in str(raised.value) for name in options_of(cls.rule))


@pytest.mark.parametrize("cls", CLASSES)
def test_every_optimizer_hints_only_at_arguments_that_it_has(cls: type[MatrixOptimizer]) -> None:
    own = inspect.signature(cls).parameters
    for name in {*EQUIVALENTS, *OTHER_NAMES, "learning_rat", "weightdecay"} - own.keys():
        with pytest.raises(TypeError) as raised:
            cls([parameter(3, 3)], **{name: 1})
        hint = str(raised.value).partition(". Its arguments are")[0]
        assert {meant.partition("'")[0] for meant in hint.split("did you mean '")[1:]} <= own.keys()


def test_equivalents_are_options() -> None:
    known = {name for rule in RULES.values() for name in options_of(rule)}
    assert {option for pairs in EQUIVALENTS.values() for option, _ in pairs} <= known


if __name__ == "__main__":
    record(CORPUS, answer_to)
