"""Options may be numbers and sequences of any library: they are taken, and kept and saved as plain
Python values. (What is refused is in `mistakes.txt`.)"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import CLASSES, all_same, clones, parameter, run_both, run_of, through_a_file

from lather.optim import (
    SOAP,
    AdamW,
    Entry,
    Matrix,
    MatrixOptimizer,
    Muon,
    Rule,
    State,
    parameter_groups,
    schedules,
    state_bytes,
)
from lather.optim.options import options_of
from lather.optim.plain import converted, plain, saveable
from scripts import printed_by


class Listed(Sequence[Any]):
    """A sequence of a class of its own, like OmegaConf's ListConfig, which is no list."""

    def __init__(self, *elements: Any) -> None:
        self.elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)


class Mapped(Mapping[str, Any]):
    """A mapping of a class of its own."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Counter:
    """An integer by `__index__` alone."""

    def __index__(self) -> int:
        return 3


class Scale(StrEnum):
    SPECTRAL = "spectral"


NUMBERS: list[Any] = [
    *(cls(0.25) for cls in (np.float32, np.float64, np.float16, np.longdouble)),
    *(np.array(0.25), np.array([0.25]), Fraction(1, 4)),
    *(torch.tensor(0.25), torch.tensor([0.25], dtype=torch.bfloat16)),
]
COUNTS: list[Any] = [np.int64(3), np.uint8(3), np.array([3]), torch.tensor(3), Counter()]
PAIRS: list[Any] = [
    *([0.5, 0.75], Listed(0.5, 0.75), Listed(np.float32(0.5), Fraction(3, 4))),
    *(np.array([0.5, 0.75]), torch.tensor([0.5, 0.75]), (np.float64(0.5), torch.tensor(0.75))),
]
FLAGS: list[Any] = [np.bool_(False), np.array(False), torch.tensor(False)]
MUON, SOAPS, COUNTED = (
    ("momentum", "weight_decay", "beta2", "scale"),
    ("eps", "shampoo_beta", "adaptive_update_tolerance"),
    ("precondition_frequency", "adam_warmup_steps", "max_precond_dim", "num_streams"),
)
TAKEN: list[tuple[Any, tuple[str, ...], Any, Any]] = [
    *((Muon, MUON, number, 0.25) for number in NUMBERS),
    *((SOAP, SOAPS, number, 0.25) for number in NUMBERS),
    *((SOAP, (*COUNTED, "power_iter_steps", "bucket_bytes"), count, 3) for count in COUNTS),
    *((Muon, ("steps",), count, 3) for count in COUNTS),
    *((cls, ("betas",), pair, (0.5, 0.75)) for cls in (SOAP, AdamW) for pair in PAIRS),
    *((Muon, ("nesterov", "keep_norm", "maximize"), flag, False) for flag in FLAGS),
    (Muon, ("scale",), Scale.SPECTRAL, "spectral"),
    (Muon, ("coefficients",), np.str_("polar_express"), "polar_express"),
    (SOAP, ("state_dtype",), Mapped(bases="bfloat16"), {"bases": torch.bfloat16}),
    (Muon, ("lr", "scale", "weight_decay"), 2, 2.0),
]
"""Class, options, a value and what it becomes."""


def same_plain(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and value == expected


@pytest.mark.parametrize("way", ["argument", "group"])
def test_values_of_any_library_become_plain_ones(way: str) -> None:
    for cls, names, value, expected in TAKEN:
        given = dict.fromkeys(names, value)
        p = parameter(3, 4)
        optimizer = cls([p], **given) if way == "argument" else cls([{"params": [p], **given}])
        (group,) = optimizer.param_groups
        assert all(same_plain(group[name], expected) for name in names), (cls, names, value)


@pytest.mark.parametrize("name", CLASSES)
def test_rates(name: str) -> None:
    """A rate becomes a float, but a tensor stays the tensor: its owner may change it in place."""
    for rate in NUMBERS:
        for optimizer in (
            CLASSES[name]([parameter(3, 4)], lr=rate),
            CLASSES[name]([{"params": [parameter(3, 4)], "lr": rate}], lr=1.0),
        ):
            lr = optimizer.param_groups[0]["lr"]
            assert lr is rate if isinstance(rate, torch.Tensor) else same_plain(lr, 0.25)
            saved = optimizer.state_dict()["param_groups"][0]["lr"]
            assert type(saved) is (torch.Tensor if isinstance(rate, torch.Tensor) else float)


# --- values that are written into groups later ----------------------------------------------------

LATER: dict[str, dict[str, tuple[Any, Any]]] = {
    "numpy": {
        "lr": (np.float32(0.125), 0.125),
        "weight_decay": (np.float64(0.25), 0.25),
        "betas": (np.array([0.5, 0.75]), (0.5, 0.75)),
        "correct_bias": (np.bool_(False), False),
        "bucket_bytes": (np.int64(4096), 4096),
    },
    "tensors": {
        "lr": (torch.tensor(0.125), 0.125),
        "weight_decay": (torch.tensor([0.25]), 0.25),
        "betas": (torch.tensor([0.5, 0.75]), (0.5, 0.75)),
    },
    "configuration": {
        "betas": (Listed(0.5, 0.75), (0.5, 0.75)),
        "weight_decay": (0, 0.0),
        "lr": (Fraction(1, 8), 0.125),
    },
    "array": {"lr": (np.array([0.125]), 0.125), "betas": ([np.float32(0.5), 0.75], (0.5, 0.75))},
}


@pytest.mark.parametrize("values", LATER.values(), ids=LATER)
def test_values_that_are_written_later_work_at_once_and_after_a_thaw(
    values: dict[str, tuple[Any, Any]],
) -> None:
    """They are those of an optimizer that got plain values; groups hold plain values from the next
    step on."""
    a, b = run_of(AdamW, [(3, 4), (5,)]), run_of(AdamW, [(3, 4), (5,)])
    for one in (a, b):
        one.params[1].requires_grad_(False)
    only = [(one.optimizer, one.params[:1]) for one in (a, b)]
    run_both(*only, range(2))
    for name, (given, expected) in values.items():
        a.groups[0][name], b.groups[0][name] = given, expected
    run_both(*only, range(2, 4))
    for one in (a, b):
        one.params[1].requires_grad_(True)
    for name, (given, _) in values.items():
        if name != "lr" and not isinstance(given, bool):
            a.groups[0][name] = given  # once more: equal to what is known
    run_both(a, b, range(4, 6))
    assert all_same(a.params, b.params)
    others = [(name, expected) for name, (_, expected) in values.items() if name != "lr"]
    assert all(same_plain(a.groups[0][name], expected) for name, expected in others)
    resumed = AdamW(clones(a.params))
    resumed.load_state_dict(through_a_file(a.optimizer.state_dict()))
    assert resumed.param_groups[0]["betas"] == b.groups[0]["betas"]


def test_a_rate_of_a_schedule_is_used_and_saved_as_a_float() -> None:
    a, b = run_of(Muon, [(3, 4)]), run_of(Muon, [(3, 4)])
    for step, rate in enumerate(np.linspace(0.1, 0.2, 4, dtype=np.float32)):
        a.groups[0]["lr"], b.groups[0]["lr"] = rate, float(rate)
        a.groups[0]["initial_lr"] = rate
        run_both(a, b, [step])
    assert all_same(a.params, b.params)
    saved = through_a_file(a.optimizer.state_dict())["param_groups"][0]
    assert {type(saved["lr"]), type(saved["initial_lr"])} == {float}


def test_a_frequency_may_be_given_as_any_integer() -> None:
    a = run_of(SOAP, [(3, 4)], precondition_frequency=lambda t: np.int64(2))
    b = run_of(SOAP, [(3, 4)], precondition_frequency=2)
    run_both(a, b, range(5))
    assert all_same(a.params, b.params)
    for cls in (schedules.LinearFrequency, schedules.CosineFrequency, schedules.StepFrequency):
        given: Any = cls(np.int64(1), torch.tensor(8), np.array(4), start_step=Counter())
        plain_one = cls(1, 8, 4, start_step=3)
        assert given == plain_one
        assert all(same_plain(given(np.int64(step)), plain_one(step)) for step in range(1, 12))


def test_saved_groups_may_hold_values_of_any_library() -> None:
    """A state that came through JSON or NumPy has lists, words and scalars."""
    a = run_of(AdamW, [(3, 4)], betas=(0.5, 0.75))
    a.steps(range(2))
    saved = a.optimizer.state_dict()
    saved["param_groups"][0] |= {
        "betas": [0.5, 0.75],
        "weight_decay": np.float32(0.25),
        "maximize": np.bool_(False),
    }
    saved["state"][0]["step"] = np.int64(2)
    others = clones(a.params)
    resumed = AdamW(others)
    resumed.load_state_dict(saved)
    a.groups[0]["weight_decay"] = 0.25
    assert same_plain(resumed.param_groups[0]["betas"], (0.5, 0.75))
    assert same_plain(resumed.param_groups[0]["weight_decay"], 0.25)
    run_both(a, (resumed, others), range(2, 4))
    assert all_same(a.params, others)


def test_helpers_take_them_too() -> None:
    sizes: Any = np.int64(3), np.int32(4)
    assert same_plain(
        state_bytes(sizes, SOAP, max_precond_dim=np.int64(3)),
        state_bytes((3, 4), SOAP, max_precond_dim=3),
    )
    named, rate = [("norm", parameter(3))], torch.tensor(0.25)
    (group,) = parameter_groups(named, adam_names=Listed("norm"), rest_lr=np.float32(0.25))
    assert same_plain(group["lr"], 0.25)
    assert parameter_groups(named, rest_lr=rate)[0]["lr"] is rate


@dataclass(frozen=True)
class Foreign(Rule):
    """A rule of somebody else, with options of other types and without ranges."""

    weight_decay: float = 0.0
    decays: tuple[float, ...] = (0.9,)
    sizes: list[int] | None = None
    anything: Any = None

    def state(self, matrix: Matrix) -> dict[str, Entry]:
        return {}

    def update(self, g: torch.Tensor, s: State, t: int) -> torch.Tensor:
        return g


def test_options_of_others_rules() -> None:
    given: dict[str, Any] = {
        "decays": Listed(1, np.float32(0.5), 0.25),
        "sizes": (np.int64(3), 4),
        "weight_decay": np.int64(1),
    }
    rule = Foreign(np.float32(0.5), **given)
    assert same_plain(rule.decays, (1.0, 0.5, 0.25))
    assert same_plain(rule.sizes, [3, 4])
    assert same_plain(rule.weight_decay, 1.0)
    marker = object()
    assert Foreign(1e-2, anything=marker).anything is marker
    optimizer = MatrixOptimizer([parameter(2, 2)], Foreign(1e-2, anything=np.float32(0.5)))
    assert same_plain(optimizer.state_dict()["param_groups"][0]["anything"], 0.5)


def test_values_of_no_known_type_stay_and_those_of_one_element_are_numbers() -> None:
    for value in (b"bytes", {1, 2}, object(), torch.zeros(2), len):
        assert plain(value) is value
        assert converted(value, float) is value
    assert plain(Mapped(a=np.int64(1), b=Listed(np.float32(0.5)))) == {"a": 1, "b": [0.5]}
    for value in (torch.tensor(False), torch.tensor([False]), torch.tensor([[[False]]])):
        assert same_plain(plain(value), False)
        assert plain({"a": [value]}) == {"a": [False]}
        assert saveable(value) is value


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_arrays_are_saved_as_lists_before_a_step_has_made_them_plain(cls: Any) -> None:
    a = run_of(cls, [(3, 4)])
    a.steps(range(2))
    group = a.groups[0]
    group["zorp"] = {"a": np.array([1.0, 2.0]), "b": (np.array([[1], [2]]), np.int64(3))}
    group |= {"betas": np.array([0.5, 0.75])} if "betas" in group else {}
    group["weight_decay"] = np.array([0.25])
    saved = through_a_file(a.optimizer.state_dict())
    assert saved["param_groups"][0]["zorp"] == {"a": [1.0, 2.0], "b": ([[1], [2]], 3)}
    assert same_plain(saved["param_groups"][0]["weight_decay"], 0.25)
    b = run_of(cls, [(3, 4)])
    with pytest.warns(UserWarning, match="zorp"):
        b.optimizer.load_state_dict(saved)
    b.steps(range(1))
    assert "betas" not in group or same_plain(b.groups[0]["betas"], (0.5, 0.75))


def test_an_array_in_the_place_of_a_value_is_refused_with_the_range() -> None:
    for cls in CLASSES.values():
        for name in options_of(cls.rule).keys() - {"lr", "betas"}:
            with pytest.raises(ValueError, match=f"^{name}=array.* is not valid: give "):
                cls([parameter(3, 4)], **{"lr": 1e-2, name: np.array([1.0, 2.0])})


def test_the_optimizers_import_no_numpy_of_their_own() -> None:
    """torch imports NumPy if it is there; Lather's optimizers work where it cannot be imported."""
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from lather.optim import SOAP\n"
        "p = torch.nn.Parameter(torch.ones(2, 2)); p.grad = torch.ones(2, 2)\n"
        "SOAP([p], betas=[0.5, 0.75]).step(); print('stepped')"
    )
    assert "stepped" in printed_by(program)
