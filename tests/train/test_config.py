"""The configuration: values that are refused and their messages; and that TOML carries it without
loss."""

import ast
import dataclasses
import inspect
import re
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.config import config as config_module
from lather.config import optim as optim_config_module
from lather.config.config import Config
from lather.config.optim import KindConfig
from lather.config.toml_file import config_from_mapping, config_to_toml, load_config
from lather.data import config as data_config
from lather.errors import ConfigError
from lather.formats import RUN
from lather.models import family_config, lora, rotary
from lather.models.families import deepseek_v2, gpt_oss, qwen3_moe


def members(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return [arg for arg in typing.get_args(hint) if arg is not type(None)] if is_union else [hint]


def refusal(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping)
    return str(caught.value)


def from_toml(text: str) -> Config:
    """Return the configuration that a file written for a run has."""
    mapping = tomllib.loads(text)
    assert mapping.pop("format") == RUN.number
    return config_from_mapping(mapping)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_the_model_section_is_the_family_that_it_names(model_type: str) -> None:
    config = config_from_mapping(
        {"model": {"model_type": model_type, "rope_scaling": {"factor": 2.0}}}
    )
    assert config.model.model_type == model_type
    assert config.model.rope_scaling is not None
    assert from_toml(config_to_toml(config)) == config


def test_an_integer_beyond_float_is_refused() -> None:
    assert refusal({"optim": {"lr": 10**400}}).startswith("optim.lr ")


def test_an_integer_is_taken_for_a_float_and_nothing_else_is_converted() -> None:
    lr = config_from_mapping({"optim": {"lr": 1}}).optim.lr
    assert (lr, type(lr)) == (1.0, float)


@pytest.mark.parametrize("contents", [b"seed = ", b"seed = 1\nseed = 2", b"\xff\xfes\x00"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: not valid TOML"):
        load_config(path)


POSITIVE = st.floats(min_value=1e-300, allow_infinity=False)
BETAS = st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2).map(list)
MAPPINGS = st.fixed_dictionaries(
    {},
    optional={
        "run_dir": st.text(min_size=1),
        "seed": st.integers(0, 2**63 - 1),
        "model": st.fixed_dictionaries(
            {}, optional={"q_lora_rank": st.integers(1, 999), "rope_theta": POSITIVE}
        ),
        "data": st.fixed_dictionaries(
            {}, optional={"source": st.text(min_size=1), "shard_tokens": st.integers(1, 2**40)}
        ),
        "optim": st.fixed_dictionaries(
            {"name": st.sampled_from(["soap", "klsoap", "adamw"])},
            optional={
                "lr": st.one_of(st.floats(1e-300, 1e290), st.integers(0, 9)),
                "betas": BETAS,
                "eps": POSITIVE,
                "keep_norm": st.booleans(),
                "experts": st.fixed_dictionaries(
                    {}, optional={"betas": BETAS, "lr_factor": st.floats(0, 9)}
                ),
                "rest": st.fixed_dictionaries(
                    {}, optional={"eps": POSITIVE, "rule": st.sampled_from(["", "adamw", "soap"])}
                ),
            },
        ),
        "log": st.fixed_dictionaries(
            {}, optional={"sample_prompt": st.text(min_size=1), "tensorboard": st.booleans()}
        ),
    },
)


@given(MAPPINGS)
@settings(deadline=None, max_examples=60)
def test_toml_gives_the_same_configuration_back(mapping: dict[str, Any]) -> None:
    config = config_from_mapping(mapping)
    assert from_toml(config_to_toml(config)) == config


@pytest.mark.parametrize("rank", [None, 5])
def test_a_file_gives_the_same_configuration_back(tmp_path: Path, rank: int | None) -> None:
    changes = {} if rank is None else {"q_lora_rank": rank}
    config = config_from_mapping({"model": changes, "log": {"sample_prompt": 'a\r\n\t"é\\'}})
    (tmp_path / "config.toml").write_text(config_to_toml(config), "utf-8")
    loaded = load_config(tmp_path / "config.toml")
    assert loaded == config
    assert loaded.model.q_lora_rank == rank


def test_every_field_has_a_docstring() -> None:
    """A section is documented by its class's docstring."""
    documented = set()
    for module in (
        config_module,
        family_config,
        data_config,
        optim_config_module,
        lora,
        deepseek_v2,
        qwen3_moe,
        gpt_oss,
        rotary,
    ):
        for cls in (
            node
            for node in ast.parse(inspect.getsource(module)).body
            if isinstance(node, ast.ClassDef)
        ):
            for statement, following in zip(cls.body, cls.body[1:], strict=False):
                is_string = isinstance(following, ast.Expr) and isinstance(
                    following.value, ast.Constant
                )
                if (
                    isinstance(statement, ast.AnnAssign)
                    and is_string
                    and str(following.value.value).strip()
                ):
                    documented.add((cls.name, ast.unparse(statement.target)))
    sections = [
        cls
        for hint in typing.get_type_hints(Config).values()
        for cls in members(hint)
        if dataclasses.is_dataclass(cls)
    ]
    sections += [rotary.YarnConfig, KindConfig]
    assert all(ast.get_docstring(ast.parse(inspect.getsource(cls)).body[0]) for cls in sections)
    for cls in (Config, *sections):
        names = [f.name for f in dataclasses.fields(cls) if hint_is_value(cls, f.name)]
        assert [
            name
            for name in names
            if not any((base.__name__, name) in documented for base in cls.__mro__)
        ] == [], cls


def hint_is_value(cls: type, name: str) -> bool:
    return not any(
        dataclasses.is_dataclass(one) for one in members(typing.get_type_hints(cls)[name])
    )


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


def test_there_are_example_configurations() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_example_configurations_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)
