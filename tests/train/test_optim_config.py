"""`[optim]` and its sections: every option of every rule, by TOML and by command line; inheritance
and refusals."""

from __future__ import annotations

import pickle
import typing
from pathlib import Path
from typing import Any

import pytest
import torch

from lather.commands.train import read_arguments
from lather.config.kind_config import KINDS
from lather.config.optim import OptimConfig, optim_config
from lather.config.rule_fields import DECIDED, option_fields
from lather.config.toml_file import config_from_mapping, config_to_toml, load_config
from lather.engine.optimizer import build_optimizer
from lather.errors import ConfigError, as_toml
from lather.optim.options import options_of
from lather.optim.rules import RULES
from tiny_run import write_config

OTHER_VALUES: dict[Any, Any] = {
    bool: [True, False],
    int: [3],
    float: [0.25],
    str: ["row", "float64", "spectral"],
}
"""Values for options of each type: one of them is neither the default nor out of range."""


def other_value(rule: type, name: str) -> Any:
    """Return a value that the option may have, other than its default."""
    hint, default = option_fields(rule)[name]
    if typing.get_origin(hint) is tuple:
        return (0.5, 0.25)
    literal = typing.get_origin(hint) is typing.Literal
    parts = [hint] if literal else typing.get_args(hint) or [hint]
    allowed = options_of(rule)[name].range
    for part in parts:
        for value in (*typing.get_args(part), *OTHER_VALUES.get(part, [])):
            if value != default and allowed.holds(as_option(name, value)):  # type: ignore[union-attr]
                return value
    raise AssertionError(f"no value for {name}")


def as_option(name: str, value: Any) -> Any:
    """Convert a value to the rule's own form."""
    return getattr(torch, value, value) if name == "state_dtype" else value


NEEDED = {"weight_rms": {"keep_norm": True}}
"""Options without which an option is refused."""
EXCLUDING = ("offload", "relative_update", "radial_brake")
"""Options that exclude others."""


def optim_of(*arguments: str, **mapping: Any) -> OptimConfig:
    """Make the optimizer's configuration from a mapping, or from a command line."""
    if arguments:
        return read_arguments([*arguments])[0].optim
    return config_from_mapping({"optim": mapping}).optim


def refusal(**mapping: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping({"optim": mapping})
    return str(caught.value)


# --- every option ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("optim"))


@pytest.mark.parametrize("name", RULES)
def test_every_option_of_every_rule_is_a_field_and_reaches_the_rule(
    name: str, tmp_path: Path
) -> None:
    """The exceptions are the options that the trainer decides."""
    rule, file = RULES[name], tmp_path / "written.toml"
    assert set(options_of(rule)) - set(option_fields(rule)) == set(DECIDED)
    for option in option_fields(rule):
        value = other_value(rule, option)
        plain = list(value) if isinstance(value, tuple) else value
        mapping = {"name": name, **NEEDED.get(option, {}), option: plain}
        config = config_from_mapping({"optim": mapping})
        expected = as_option(option, value)
        for of_rule in (config.optim.rule, config.optim.rule_of("matrices")):
            assert getattr(of_rule, option) == expected, option
        file.write_text(config_to_toml(config))
        assert getattr(load_config(file).optim, option) == value, option


@pytest.mark.parametrize("name", RULES)
def test_every_option_is_one_of_the_command_line(name: str, file: Path) -> None:
    rule, arguments = RULES[name], [str(file), "--optim.name", name]
    some = optim_of(*arguments, "--optim.offload", "--optim.relative-update")
    assert (some.offload, some.relative_update) == (True, True)  # type: ignore[attr-defined]
    some = optim_of(*arguments, "--optim.radial-brake", "0.5")
    assert some.radial_brake == 0.5  # type: ignore[attr-defined]
    fields = {key: x for key, x in option_fields(rule).items() if key not in EXCLUDING}
    for option, (_, default) in fields.items():
        value = other_value(rule, option)
        flag = option.replace("_", "-")
        if isinstance(default, bool):
            arguments.append(f"--optim.{'' if value else 'no-'}{flag}")
        else:
            words = value if isinstance(value, tuple) else (value,)
            arguments += [f"--optim.{flag}", *map(str, words)]
    optim = optim_of(*arguments)
    for option in fields:
        assert getattr(optim, option) == other_value(rule, option), option


@pytest.mark.parametrize("name", RULES)
def test_a_value_out_of_range_is_refused_by_field_value_and_constraint(name: str) -> None:
    rule = RULES[name]
    for option, value in {
        "lr": -1.0,
        "betas": [0.5, 1.0],
        "momentum": 1.5,
        "weight_decay": -0.1,
        "state_dtype": "int4",
        "steps": 0,
    }.items():
        if option in option_fields(rule):
            message = refusal(name=name, **{option: value})
            assert message.startswith(f"optim.{option} = {as_toml(value)} "), message
            assert "is not valid: give" in message
    for option, (hint, _) in option_fields(rule).items():
        wrong = "x" if str not in (typing.get_args(hint) or (hint,)) else 3.5j
        message = refusal(name=name, **{option: wrong})
        expected = f"optim.{option} = {as_toml(wrong)} is not valid: it must be"
        assert message.startswith(expected), message


@pytest.mark.parametrize("name", RULES)
def test_a_configuration_can_be_copied_and_written(name: str) -> None:
    optim = optim_config(name, experts={"rule": "muon", "lr": 0.125}, rest={"betas": (0.5, 0.6)})
    assert pickle.loads(pickle.dumps(optim)) == optim
    assert optim.resolved(1024).resolved(8192) == optim.resolved(1024)


# --- kinds ----------------------------------------------------------------------------------------


def values(rule: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(rule, name) for name in names)


def test_a_kind_of_the_rule_of_optim_has_its_options_and_another_its_own() -> None:
    kinds = {"experts": {"betas": [0.5, 0.6]}, "matrices": {"rule": "soap_muon"}}
    optim = optim_of(name="soap", eps=1e-3, weight_decay=0.3, keep_norm=True, **kinds)
    names = ("name", "eps", "weight_decay", "keep_norm")
    assert values(optim.rule_of("experts"), *names, "betas") == (
        "soap",
        1e-3,
        0.3,
        True,
        (0.5, 0.6),
    )
    assert values(optim.rule_of("matrices"), *names) == ("soap_muon", 1e-8, 0.3, True)
    rest = optim.rule_of("rest")
    assert values(rest, *names, "betas") == ("adamw", 1e-8, 0.3, False, (0.9, 0.95))


CONTROLLED = {"keep_norm": True, "weight_rms": 0.5, "cautious_decay": True, "row_floor": 0.25}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_experts_and_matrices_alone_inherit_controls(name: str) -> None:
    """The rest has another rule than Muon's matrices, and the same as AdamW's. Another rule of the
    experts changes nothing: they are matrices."""
    kinds = {"experts": {"rule": "soap"}, "router": {"rule": name}}
    for optim in (optim_of(name=name, **CONTROLLED), optim_of(name=name, **CONTROLLED, **kinds)):
        for again in (optim, optim.resolved(1024)):
            for kind in ("experts", "matrices"):
                expected = tuple(CONTROLLED.values())
                assert values(again.rule_of(kind), *CONTROLLED) == expected
            for kind in ("rest", "router"):
                assert not any(values(again.rule_of(kind), *CONTROLLED)), kind


def test_a_router_inherits_the_controls_of_the_rest() -> None:
    optim = optim_of(name="muon", rest=CONTROLLED)
    assert values(optim.rule_of("router"), *CONTROLLED) == tuple(CONTROLLED.values())
    assert not any(values(optim.rule_of("matrices"), *CONTROLLED))
    optim = optim_of(rest=CONTROLLED, router={"rule": "adamw"})
    assert not any(values(optim.rule_of("router"), *CONTROLLED))


def test_a_kind_without_kept_norm_has_no_radius() -> None:
    free = {"keep_norm": False}
    optim = optim_of(**CONTROLLED, experts=free, rest=CONTROLLED, router=free)
    for kind in ("experts", "router"):
        expected = (False, None, True, 0.25)
        assert values(optim.rule_of(kind), *CONTROLLED) == expected
        assert values(optim.resolved(1024).rule_of(kind), *CONTROLLED) == expected


def test_a_router_is_a_part_of_the_rest_until_it_names_a_rule() -> None:
    rest = {"lr_factor": 3.0, "betas": [0.5, 0.6], "eps": 1e-3}
    for router, rate, expected in [
        ({"eps": 1e-4}, 1.5, {"betas": (0.5, 0.6), "eps": 1e-4}),
        ({"rule": "adamw"}, 0.5, {"betas": (0.9, 0.95)}),
        ({"rule": "muon"}, 0.5, {"momentum": 0.8}),
    ]:
        optim = optim_of(name="muon", lr=0.5, momentum=0.8, rest=rest, router=router)
        assert optim.lr_of("router") == rate
        assert values(optim.rule_of("router"), *expected) == tuple(expected.values())


@pytest.mark.parametrize("name", RULES)
def test_rates_of_kinds(name: str) -> None:
    optim = optim_of(name=name, lr=0.5)
    of_rest = {
        **{"adamw": 16.0, "muon": 2.0, "soap_muon": 2.0, "soap": 8.0},
        **{"shampoo": 8.0, "psgd_kron": 16.0, "adamuon": 1.6, "scion": 1.6},
    }.get(name, 1.0)
    factors = {"experts": 1.0, "matrices": 1.0, "rest": of_rest, "router": of_rest}
    assert {kind: optim.lr_of(kind) for kind in KINDS} == {
        kind: 0.5 * factor for kind, factor in factors.items()
    }
    kinds = {"experts": {"lr_factor": 4.0}, "matrices": {"lr": 0.25}, "rest": {"lr": 2.0}}
    optim = optim_of(name=name, lr=0.5, **kinds)
    rates = {"experts": 2.0, "matrices": 0.25, "rest": 2.0, "router": 2.0}
    assert {kind: optim.lr_of(kind) for kind in KINDS} == rates
    words = f"{name} at 2 for experts; {name} at 0.25 for matrices; adamw at 2 for router and rest"
    if name == "adamw":
        words = "adamw at 2 for experts and router and rest; adamw at 0.25 for matrices"
    assert optim.describe_rates() == words
    words = f"{name} at 0.25 for matrices; adamw at 2 for rest"
    assert optim.describe_rates(has_experts=False) == words


@pytest.mark.parametrize("name", RULES)
def test_a_rate_that_is_left_out_follows_the_tokens_of_a_step(name: str) -> None:
    """It follows their fourth root between the sizes that were measured, and not beyond them; a
    rate that is given stays."""
    optim = optim_of(name=name, rest={"lr_factor": 2.0})
    rates = {tokens: optim.resolved(tokens).peak_lr for tokens in (1, 1024, 4096, 8192, 2**22)}
    least = optim.peak_lr
    factors = {1: 1, 1024: 1, 4096: 4**0.25, 8192: 8**0.25, 2**22: 8**0.25}
    expected = {tokens: least * factor for tokens, factor in factors.items()}
    assert rates == pytest.approx(expected, rel=5e-3)
    assert optim.resolved(8192).lr_of("rest") == 2 * rates[8192]  # type: ignore[attr-defined]
    assert optim_of(name=name, lr=0.5).resolved(8192).lr == 0.5


def test_kinds_on_the_command_line(file: Path) -> None:
    rest = ["--optim.rest.lr-factor", "4", "--optim.rest.betas", "0.9", "0.99"]
    experts = ["--optim.experts.rule=muon", "--optim.experts.momentum=0.8"]
    optim = optim_of(str(file), *rest, *experts, "--optim.experts.nesterov", "False")
    assert optim.lr_of("rest") == 4 * optim.peak_lr
    assert values(optim.rule_of("rest"), "betas") == ((0.9, 0.99),)
    names = ("name", "momentum", "nesterov")
    assert values(optim.rule_of("experts"), *names) == ("muon", 0.8, False)


def test_resolved_says_what_follows_from_defaults() -> None:
    for changes, expected in [
        ({}, {"rule": "adamw", "lr_factor": 2.0, "betas": (0.9, 0.95), "weight_decay": None}),
        (
            {"rest": {"rule": "embedding_soap"}},
            {"rule": "embedding_soap", "lr_factor": 1.6, "sides": "smaller"},
        ),
    ]:
        rest = optim_of(name="muon", **changes).resolved(1024).section("rest")
        assert values(rest, *expected) == tuple(expected.values())


# --- starts that are fractions of the run ---------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "steps"), [("0.3", 90), ("0.001", 1), ("0.999", 300), ("7", 7), ("0", 0)]
)
def test_a_start_is_a_number_of_steps_or_a_fraction_of_the_run(
    file: Path, start: str, steps: int
) -> None:
    options = ["--train.steps", "300", "--optim.name", "muon"]
    config = read_arguments([str(file), *options, "--optim.slow-momentum-start", start])[0]
    if "." in start:
        with pytest.raises(ValueError, match=rf"slow_momentum_start = {start} is a fraction"):
            build_optimizer(config.optim, [])
    assert config.resolved().optim.rule_of("experts").slow_momentum_start == steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", [0.0, 1.0, 1.5, -1, -0.5])
@pytest.mark.parametrize("kind", ["", "experts"])
def test_other_starts_are_refused(kind: str, start: float) -> None:
    option = {"slow_momentum_start": start}
    assert refusal(**({kind: option} if kind else option)) == (
        f"optim.{kind and f'{kind}.'}slow_momentum_start = {start} is not valid: it must be an "
        "integer >= 0, or a fraction of the run in (0, 1)"
    )


def test_a_section_has_a_start_of_its_own_or_none() -> None:
    optim = {"name": "muon", "slow_momentum_start": 0.25, "experts": {"slow_momentum_start": 0}}
    matrices = {"rule": "soap_muon", "slow_momentum_start": 0.5}
    mapping = {"optim": {**optim, "matrices": matrices}, "train": {"steps": 8}}
    resolved = config_from_mapping(mapping).resolved().optim
    starts = [resolved.rule_of(kind).slow_momentum_start for kind in ("experts", "matrices")]  # type: ignore[attr-defined]
    assert (resolved.rule.slow_momentum_start, *starts) == (2, 0, 4)  # type: ignore[attr-defined]


# --- what is not there ----------------------------------------------------------------------------


def test_another_rule_leaves_out_what_the_files_rule_has_alone(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[optim]\nname = "soap"\nlr = 0.5\nprecondition_frequency = '
        "3\n[optim.experts]\nuse_nesterov = true\nlr_factor = 2.0\n"
    )
    options = {"optim.name": "muon", "optim.rest.rule": "klsoap"}
    optim = load_config(tmp_path / "a.toml", options).optim
    assert (optim.name, optim.lr, optim.rule_of("rest").name) == ("muon", 0.5, "klsoap")
    assert optim.lr_of("experts") == 1.0
    (tmp_path / "b.toml").write_text("[optim]\nprecondition_frequenzy = 3\n")
    with pytest.raises(ConfigError, match="precondition_frequenzy"):
        load_config(tmp_path / "b.toml", {"optim.name": "muon"})


def test_an_option_that_optim_has_for_itself_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="has an option 'schedule', which \\[optim\\] has already"
    ):
        optim_config("lion_rule:Scheduled")


def test_an_option_without_a_default_has_to_be_given() -> None:
    with pytest.raises(
        ConfigError,
        match=r"optim\.strength is not given, .* no default for it: give optim\.strength",
    ):
        optim_config("lion_rule:Strong")
    assert optim_config("lion_rule:Strong", strength=0.5).rule_of("experts").strength == 0.5  # type: ignore[attr-defined]
