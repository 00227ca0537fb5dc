"""The configuration: values that are refused and their messages; and that TOML carries it without
loss."""

import ast
import dataclasses
import inspect
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.config.config import Config
from lather.config.fields import fields_of
from lather.config.kind_config import KindConfig
from lather.config.toml_file import config_from_mapping, config_to_toml, load_config
from lather.errors import ConfigError
from lather.formats import RUN
from lather.models import rotary
from lather.optim.options import documentation_of


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
    hints = typing.get_type_hints(Config).values()
    classes = [cls for hint in hints for cls in typing.get_args(hint) or (hint,)]
    sections = filter(dataclasses.is_dataclass, classes)
    for cls in (Config, *sections, rotary.YarnConfig, KindConfig):
        assert ast.get_docstring(ast.parse(inspect.getsource(cls)).body[0]), cls
        names = [name for name, field in fields_of(cls).items() if not field.sections]
        texts = documentation_of(cls)
        assert [name for name in names if not texts.get(name)] == [], cls


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_example_configurations_load(path: Path) -> None:
    assert isinstance(load_config(path), Config)
