"""Options may be numbers and sequences of any library: they are taken, and kept and saved as plain
Python values."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from optim_helpers import (
    CLASSES,
    all_same,
    clones,
    give_gradients,
    parameter,
    parameters,
    run,
    run_both,
)
from test_state import through_a_file

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


class Listed(Sequence[Any]):
    """A sequence of a class of its own, like OmegaConf's ListConfig, which is no list."""

    def __init__(self, *elements: Any) -> None:
        self.elements = elements

    def __getitem__(self, index: Any) -> Any:
        return self.elements[index]

    def __len__(self) -> int:
        return len(self.elements)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Listed) and self.elements == other.elements

    def __hash__(self) -> int:
        return hash(self.elements)


class Mapped(Mapping[str, Any]):
    """A mapping of a class of its own."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Any:
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
    np.float32(0.25),
    np.float64(0.25),
    np.float16(0.25),
    np.longdouble(0.25),
    np.array(0.25),
    np.array([0.25]),
    torch.tensor(0.25),
    torch.tensor([0.25], dtype=torch.bfloat16),
    Fraction(1, 4),
]
COUNTS: list[Any] = [
    np.int64(3),
    np.uint8(3),
    np.array(3),
    np.array([3]),
    torch.tensor(3),
    Counter(),
]
PAIRS: list[Any] = [
    [0.5, 0.75],
    Listed(0.5, 0.75),
    Listed(np.float32(0.5), Fraction(3, 4)),
    np.array([0.5, 0.75]),
    torch.tensor([0.5, 0.75]),
    (np.float64(0.5), torch.tensor(0.75)),
]


def same_plain(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and value == expected


def named(value: object) -> str:
    """Return a name of a case, the same in every process."""
    return f"{type(value).__module__}.{type(value).__name__}"


@pytest.mark.parametrize("number", NUMBERS, ids=named)
def test_numbers(number: Any) -> None:
    group = Muon(
        [parameter(3, 4)],
        momentum=number,
        weight_decay=number,
        beta2=number,
        scale=number,
    )
    for name in ("momentum", "weight_decay", "beta2", "scale"):
        assert same_plain(group.param_groups[0][name], 0.25)
    group = SOAP(
        [
            {
                "params": [parameter(3, 4)],
                "eps": number,
                "shampoo_beta": number,
                "adaptive_update_tolerance": number,
            }
        ]
    )
    for name in ("eps", "shampoo_beta", "adaptive_update_tolerance"):
        assert same_plain(group.param_groups[0][name], 0.25)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("rate", NUMBERS, ids=named)
def test_rates(name: str, rate: Any) -> None:
    """A rate becomes a float, but a tensor stays the tensor: its owner may change it in place."""
    for optimizer in (
        CLASSES[name]([parameter(3, 4)], lr=rate),
        CLASSES[name]([{"params": [parameter(3, 4)], "lr": rate}], lr=1.0),
    ):
        lr = optimizer.param_groups[0]["lr"]
        assert lr is rate if isinstance(rate, torch.Tensor) else same_plain(lr, 0.25)


@pytest.mark.parametrize("count", COUNTS, ids=named)
def test_counts(count: Any) -> None:
    assert same_plain(Muon([parameter(3, 4)], steps=count).param_groups[0]["steps"], 3)
    names = (
        "precondition_frequency",
        "adam_warmup_steps",
        "max_precond_dim",
        "num_streams",
        "power_iter_steps",
        "bucket_bytes",
    )
    group = SOAP([parameter(3, 4)], **dict.fromkeys(names, count)).param_groups[0]
    assert all(same_plain(group[name], 3) for name in names)


@pytest.mark.parametrize("pair", PAIRS, ids=named)
def test_sequences(pair: Any) -> None:
    for cls in (SOAP, AdamW):
        assert same_plain(cls([parameter(3, 4)], betas=pair).param_groups[0]["betas"], (0.5, 0.75))


def test_switches_words_and_mappings() -> None:
    flags = {
        "nesterov": np.bool_(False),
        "keep_norm": np.array(True),
        "maximize": torch.tensor(True),
    }
    group = Muon(
        [parameter(3, 4)],
        **flags,
        scale=Scale.SPECTRAL,
        coefficients=np.str_("polar_express"),
    ).param_groups[0]
    assert [group[name] for name in flags] == [False, True, True]
    assert {type(group[name]) for name in flags} == {bool}
    assert same_plain(group["scale"], "spectral")
    assert same_plain(group["coefficients"], "polar_express")
    group = SOAP([parameter(3, 4)], state_dtype=Mapped(bases="bfloat16")).param_groups[0]
    assert same_plain(group["state_dtype"], {"bases": torch.bfloat16})


def test_whole_numbers_are_numbers_and_truth_is_no_number() -> None:
    group = Muon([parameter(3, 4)], lr=1, weight_decay=0, scale=2).param_groups[0]
    assert all(
        same_plain(group[name], value)
        for name, value in {
            "lr": 1.0,
            "weight_decay": 0.0,
            "scale": 2.0,
        }.items()
    )
    for value in (
        True,
        np.bool_(True),
        "0.1",
        1j,
        np.array([0.1, 0.2]),
        [0.1],
        float("nan"),
        np.float32("inf"),
        10**400,
    ):
        with pytest.raises(ValueError, match=r"weight_decay=.* is not valid: give a number >= 0"):
            Muon([parameter(3, 4)], weight_decay=value)
    for value in (
        True,
        np.bool_(True),
        2.0,
        np.float64(2),
        "2",
        torch.tensor(2.0),
        np.array([2, 2]),
    ):
        with pytest.raises(ValueError, match=r"steps=.* is not valid: give an integer >= 1"):
            Muon([parameter(3, 4)], steps=value)
    for value in (0.5, "ab", b"ab", {0.5, 0.7}, np.array([[0.5, 0.7]]), Listed(0.5), (0.5, True)):
        with pytest.raises(ValueError, match=r"betas=.* is not valid: give two numbers"):
            AdamW([parameter(3, 4)], betas=value)
    for value in (1, np.int64(1), 1.0):
        with pytest.raises(ValueError, match=r"nesterov=.* is not valid: give True or False"):
            Muon([parameter(3, 4)], nesterov=value)


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
    params = parameters([(3, 4), (5,)])
    others = clones(params)
    ours, plain_one = AdamW(params), AdamW(others)
    for p in (params[1], others[1]):
        p.requires_grad_(False)
    run_both((ours, params[:1]), (plain_one, others[:1]), range(2))
    for name, (given, expected) in values.items():
        ours.param_groups[0][name], plain_one.param_groups[0][name] = given, expected
    run_both((ours, params[:1]), (plain_one, others[:1]), range(2, 4))
    for p in (params[1], others[1]):
        p.requires_grad_(True)
    for name, (given, _) in values.items():
        if name != "lr" and not isinstance(given, bool):
            ours.param_groups[0][name] = given  # once more: equal to what is known
    run_both((ours, params), (plain_one, others), range(4, 6))
    assert all_same(params, others)
    group = ours.param_groups[0]
    assert all(
        same_plain(group[name], expected)
        for name, (
            _,
            expected,
        ) in values.items()
        if name != "lr"
    )
    saved = through_a_file(ours.state_dict())
    resumed = AdamW(clones(params))
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["betas"] == plain_one.param_groups[0]["betas"]


def test_a_rate_of_a_schedule_is_used_and_saved_as_a_float() -> None:
    params = parameters([(3, 4)])
    others = clones(params)
    ours, plain_one = Muon(params), Muon(others)
    for step, rate in enumerate(np.linspace(0.1, 0.2, 4, dtype=np.float32)):
        ours.param_groups[0]["lr"], plain_one.param_groups[0]["lr"] = rate, float(rate)
        ours.param_groups[0]["initial_lr"] = rate
        run_both((ours, params), (plain_one, others), range(step, step + 1))
    assert all_same(params, others)
    saved = through_a_file(ours.state_dict())["param_groups"][0]
    assert {type(saved["lr"]), type(saved["initial_lr"])} == {float}


@pytest.mark.parametrize(
    "rate",
    [True, "0.1", np.array([0.1, 0.2]), np.float32("nan"), None],
    ids=named,
)
def test_a_rate_that_is_none_is_refused_before_anything_changes(rate: Any) -> None:
    params = parameters([(3, 4)])
    optimizer = Muon(params)
    run(optimizer, params, range(2))
    before = params[0].detach().clone()
    optimizer.param_groups[0]["lr"] = rate
    give_gradients(params, 2)
    with pytest.raises(ValueError, match=r"lr=.* is not valid: give a number >= 0"):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert int(optimizer.state[params[0]]["step"]) == 2


def test_a_frequency_may_be_given_as_any_integer() -> None:
    params = parameters([(3, 4)])
    others = clones(params)
    ours = SOAP(params, precondition_frequency=lambda t: np.int64(2))
    run_both((ours, params), (SOAP(others, precondition_frequency=2), others), range(5))
    assert all_same(params, others)
    for cls in (schedules.LinearFrequency, schedules.CosineFrequency, schedules.StepFrequency):
        given = cls(np.int64(1), torch.tensor(8), np.array(4), start_step=Counter())
        assert given == cls(1, 8, 4, start_step=3)
        for step in range(1, 12):
            assert same_plain(given(np.int64(step)), cls(1, 8, 4, start_step=3)(step))
    with pytest.raises(ValueError, match="min_frequency=True is not valid"):
        schedules.LinearFrequency(True, 3, 3)


def test_saved_groups_may_hold_values_of_any_library() -> None:
    """A state that came through JSON or NumPy has lists, words and scalars."""
    params = parameters([(3, 4)])
    optimizer = AdamW(params, betas=(0.5, 0.75))
    run(optimizer, params, range(2))
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {
        "betas": [0.5, 0.75],
        "weight_decay": np.float32(0.25),
        "maximize": np.bool_(False),
    }
    saved["state"][0]["step"] = np.int64(2)
    others = clones(params)
    resumed = AdamW(others)
    resumed.load_state_dict(saved)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    assert same_plain(resumed.param_groups[0]["betas"], (0.5, 0.75))
    assert same_plain(resumed.param_groups[0]["weight_decay"], 0.25)
    run_both((optimizer, params), (resumed, others), range(2, 4))
    assert all_same(params, others)


def test_helpers_take_them_too() -> None:
    assert state_bytes(
        (np.int64(3), np.int32(4)),
        SOAP,
        max_precond_dim=np.int64(3),
    ) == state_bytes((3, 4), SOAP, max_precond_dim=3)
    assert type(state_bytes((np.int64(3), np.int64(4)))) is int
    groups = parameter_groups(
        [("norm", parameter(3))],
        adam_names=Listed("norm"),
        rest_lr=np.float32(0.25),
    )  # type: ignore[arg-type]
    assert same_plain(groups[0]["lr"], 0.25)
    with pytest.raises(ValueError, match=r"partition_dim=0 of .* needs tp_group"):
        SOAP([{"params": [parameter(3, 4)], "partition_dim": np.int64(0)}])


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
    rule = Foreign(
        np.float32(0.5),
        decays=Listed(1, np.float32(0.5), 0.25),
        sizes=(np.int64(3), 4),
        weight_decay=np.int64(1),
    )  # type: ignore[arg-type]
    assert same_plain(rule.decays, (1.0, 0.5, 0.25))
    assert same_plain(rule.sizes, [3, 4])
    assert same_plain(rule.weight_decay, 1.0)
    marker = object()
    assert Foreign(1e-2, anything=marker).anything is marker
    optimizer = MatrixOptimizer([parameter(2, 2)], Foreign(1e-2, anything=np.float32(0.5)))
    assert same_plain(optimizer.state_dict()["param_groups"][0]["anything"], 0.5)


def test_values_of_no_known_type_stay() -> None:
    for value in (b"bytes", {1, 2}, object(), torch.zeros(2), len):
        assert plain(value) is value
        assert converted(value, float) is value
    assert plain(Mapped(a=np.int64(1), b=Listed(np.float32(0.5)))) == {"a": 1, "b": [0.5]}


def test_tensors_with_one_element_are_numbers_but_a_rate_stays_a_tensor() -> None:
    for value in (torch.tensor(False), torch.tensor([False]), torch.tensor([[[False]]])):
        assert same_plain(plain(value), False)
        assert plain({"a": [value]}) == {"a": [False]}
        assert saveable(value) is value
    rate = torch.tensor(0.25)
    groups = parameter_groups([("norm", parameter(3))], rest_lr=rate)  # type: ignore[arg-type]
    assert groups[0]["lr"] is rate
    optimizer = AdamW([parameter(3, 4)], lr=rate)
    assert optimizer.param_groups[0]["lr"] is rate
    assert isinstance(optimizer.state_dict()["param_groups"][0]["lr"], torch.Tensor)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=CLASSES)
def test_arrays_are_saved_as_lists_before_a_step_has_made_them_plain(cls: Any) -> None:
    params = parameters([(3, 4)])
    optimizer = cls(params, lr=1e-2)
    run(optimizer, params, range(2))
    group = optimizer.param_groups[0]
    group["zorp"] = {"a": np.array([1.0, 2.0]), "b": (np.array([[1], [2]]), np.int64(3))}
    if "betas" in group:
        group["betas"] = np.array([0.5, 0.75])
    group["weight_decay"] = np.array([0.25])
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["zorp"] == {"a": [1.0, 2.0], "b": ([[1], [2]], 3)}
    assert same_plain(saved["param_groups"][0]["weight_decay"], 0.25)
    resumed = cls(clones(params), lr=1e-2)
    with pytest.warns(UserWarning, match="zorp"):
        resumed.load_state_dict(saved)
    run(resumed, resumed.param_groups[0]["params"], range(1))
    if "betas" in group:
        assert same_plain(resumed.param_groups[0]["betas"], (0.5, 0.75))


def test_an_array_in_the_place_of_a_value_is_refused_with_the_range() -> None:
    array = np.array([1.0, 2.0])
    for cls in CLASSES.values():
        for name in options_of(cls.rule):
            if name in ("lr", "betas", "state_dtype"):
                continue
            with pytest.raises(ValueError, match=f"^{name}=array.* is not valid: give "):
                cls([parameter(3, 4)], **{"lr": 1e-2, name: array})
        with pytest.raises(ValueError, match=r"^state_dtype=array.* is not valid: give torch"):
            cls([parameter(3, 4)], lr=1e-2, state_dtype=array)


def test_the_optimizers_import_no_numpy_of_their_own() -> None:
    """torch imports NumPy if it is there; Lather's optimizers work where it cannot be imported."""
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "import torch; from lather.optim import SOAP\n"
        "p = torch.nn.Parameter(torch.ones(2, 2)); p.grad = torch.ones(2, 2)\n"
        "SOAP([p], betas=[0.5, 0.75]).step(); print('stepped')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "stepped" in result.stdout, result.stderr
