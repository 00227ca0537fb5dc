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
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lather.config import config as config_module
from lather.config import optim as optim_config_module
from lather.config.config import Config
from lather.config.fields import field_names
from lather.config.optim import KindConfig, OptimConfig
from lather.config.toml_file import config_from_mapping, config_to_toml, load_config
from lather.data import config as data_config
from lather.errors import ConfigError, as_toml
from lather.formats import RUN
from lather.models import deepseek_v2, gpt_oss, lora, qwen3_moe, rotary
from lather.models.deepseek_v2 import DeepseekV2Config
from lather.models.hf import config_fields

AT_LEAST_1 = [0, -1]
"""Bad values of a size."""

OUT_OF_RANGE: dict[str, list[Any]] = {
    "run_dir": [""],
    "fork_from": [],
    "init_from": [],
    "seed": [-1, 2**64],
    **{
        f"model.{name}": AT_LEAST_1
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
            "n_routed_experts",
            "max_position_embeddings",
        )
    },
    "model.qk_rope_head_dim": [0, -2, 3],
    "model.num_experts_per_tok": [0, -1, 9],
    "model.first_k_dense_replace": [-1, 7],
    "model.n_shared_experts": [-1],
    "model.aux_loss_alpha": [-0.1],
    "model.routed_scaling_factor": [0.0, -1.0],
    "model.rope_theta": [0.0, -1.0],
    "model.rms_norm_eps": [0.0, -1e-6],
    "model.initializer_range": [0.0, -0.02],
    "model.model_type": ["llama"],
    "model.topk_method": ["best"],
    "model.n_group": [*AT_LEAST_1, 3],
    "model.topk_group": [*AT_LEAST_1, 2],
    "model.seq_aux": [],
    "model.rope_scaling.factor": [0.5],
    "model.rope_scaling.original_max_position_embeddings": AT_LEAST_1,
    "model.rope_scaling.beta_fast": [0.5],
    "model.rope_scaling.beta_slow": [0.0, -1.0],
    "model.rope_scaling.mscale": [-0.1],
    "model.rope_scaling.mscale_all_dim": [-0.1],
    "model.rope_scaling.attention_factor": [0.0, -1.0],
    "model.rope_scaling.truncate": [],
    "model.norm_topk_prob": [],
    "model.tie_word_embeddings": [],
    "data.path": [],
    "data.weights": [[1.0]],
    "data.validation": [],
    "data.packing": ["bins"],
    "data.source": [""],
    "data.pattern": [],
    "data.cache_dir": [""],
    "data.tokenizer": [],
    "data.end_of_text": [""],
    "data.holdout_every": [1, 0, -1],
    "data.packed_attention": [],
    "data.shard_tokens": AT_LEAST_1,
    "optim.name": ["sgd", "nowhere:Rule", "lather.optim:SOAP"],
    "optim.schedule": ["step"],
    "optim.warmup_steps": [-1],
    "optim.decay_fraction": [0.0, -0.1, 1.1],
    "optim.min_lr_ratio": [-0.1, 1.1],
    "moe.memory": ["plain"],
    "moe.balance_coefficient": [-0.1],
    "moe.balance_level": ["batch"],
    "moe.z_loss_coefficient": [-0.1],
    "moe.bias_update_rate": [-0.1],
    "train.steps": AT_LEAST_1,
    "train.batch_size": AT_LEAST_1,
    "train.micro_batch_size": [-1],
    "train.sequence_length": [*AT_LEAST_1, 2049],
    "lora.rank": [-1],
    "lora.alpha": [0.0, -1.0],
    "lora.targets": [[], ["attention", ""]],
    "train.max_grad_norm": [-1.0],
    "train.trainable": [["layers.0.*", ""]],
    "train.frozen": [[""]],
    "train.minutes": [-1.0, float("inf"), float("nan")],
    "train.max_skipped_steps": AT_LEAST_1,
    "train.validation_every": [-1],
    "train.validation_sequences": AT_LEAST_1,
    "train.recompute": [["router"]],
    "train.compile": [],
    "train.deterministic": [],
    "train.precision": ["fp16"],
    "train.rounded_weights": ["never"],
    "train.device": ["tpu"],
    "parallel.pp": [*AT_LEAST_1, 4],
    "parallel.ep": [*AT_LEAST_1, 3],
    "parallel.replicas": AT_LEAST_1,
    "parallel.partition": ["greedy"],
    "parallel.schedule": ["gpipe"],
    "parallel.schedule_memory": ["most", "least"],
    "parallel.poison": [],
    "parallel.timeout": [0.0, -1.0],
    "checkpoint.every": AT_LEAST_1,
    "checkpoint.keep_last": AT_LEAST_1,
    "checkpoint.keep_every": [-100, 150],
    "checkpoint.keep_best": [],
    "checkpoint.asynchronous": [],
    "log.every": AT_LEAST_1,
    "log.expert_load_every": [-1],
    "log.timeline_every": [-1],
    "log.memory_plan": ["sometimes"],
    "log.tensorboard": [],
    "log.picture": [],
    "log.wandb_project": [],
    "log.mlflow_experiment": [],
    "log.sample_prompt": [],
    "log.sample_tokens": [-1],
}
FIELDS = sorted(OUT_OF_RANGE)


def mapping_of(name: str, value: Any) -> dict[str, Any]:
    section, _, rest = name.partition(".")
    return {section: mapping_of(rest, value)} if rest else {section: value}


def hint_of(name: str) -> Any:
    """Return the type of the field in the first family that has it."""
    hint: Any = Config
    for part in name.split("."):
        hint = typing.get_type_hints(
            next(cls for cls in members(hint) if part in typing.get_type_hints(cls))
        )[part]
    return members(hint)[0]


def members(hint: Any) -> list[Any]:
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return [arg for arg in typing.get_args(hint) if arg is not type(None)] if is_union else [hint]


def wrong_types(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is Literal:
        return [3, True]
    if typing.get_origin(hint) is tuple:
        return [0.9, "0.9, 0.9", [0.9, "x"], [0.9, True]]
    if typing.get_origin(hint) is dict:
        return [3, "a", ["a"]]
    return {
        int: [True, 1.5, "3", [1]],
        float: [True, "0.1", [0.1]],
        str: [3, True, ["a"]],
        bool: [1, 0, "true"],
    }[hint]


def refusal(mapping: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        config_from_mapping(mapping)
    return str(caught.value)


def assert_names_field_value_and_constraint(message: str, name: str, value: Any) -> None:
    shown = [as_toml(value), *(map(as_toml, value) if isinstance(value, list) else ())]
    assert re.match(re.escape(name) + r"\b", message), message
    assert any(text in message for text in shown), message
    assert_has_no_python(message)
    assert re.search(r"is not valid: (it must be|give) \S", message), message


def assert_has_no_python(message: str) -> None:
    """Values in messages are written as in TOML."""
    python = r"\bTrue\b|\bFalse\b|\bNone\b|\w\(\w+=|<class|Path\(|torch\.|= \(|datetime"
    assert not re.search(python, message), message


def test_every_field_has_its_bad_values_here() -> None:
    """The other families' fields have theirs in tests/models/test_family_configs.py, rules' options
    in test_optim_config.py."""
    others = {name for name in field_names(Config) if name.startswith("model.")} - set(
        field_names(DeepseekV2Config, "model.")
    )
    others |= {name for name in field_names(Config) if name.startswith("optim.")} - set(
        field_names(OptimConfig, "optim.")
    ) | {"optim.lr"}
    assert sorted(set(field_names(Config)) - others) == FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_out_of_range_is_refused_by_field_value_and_constraint(name: str) -> None:
    for value in OUT_OF_RANGE[name]:
        assert_names_field_value_and_constraint(refusal(mapping_of(name, value)), name, value)


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_refused_by_field_value_and_constraint(name: str) -> None:
    for value in wrong_types(hint_of(name)):
        assert_names_field_value_and_constraint(refusal(mapping_of(name, value)), name, value)


@pytest.mark.parametrize("name", [name for name in FIELDS if hint_of(name) is float])
def test_a_number_that_is_not_finite_is_refused(name: str) -> None:
    values = (
        [float("nan")] if name == "train.max_grad_norm" else [float("nan"), float("inf")]
    )  # an infinite norm clips nothing
    for value in values:
        assert_names_field_value_and_constraint(refusal(mapping_of(name, value)), name, value)


def test_a_key_of_another_family_says_whose_it_is() -> None:
    message = refusal({"model": {"model_type": "qwen3_moe", "n_routed_experts": 3}})
    assert message == (
        "unknown key 'model.n_routed_experts'; it is a key of "
        "model_type 'deepseek_v2', not of 'qwen3_moe'"
    )


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


def test_a_section_that_is_a_value_is_refused() -> None:
    assert "[optim]" in refusal({"optim": 3})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("train.setps", "train.steps"),
        ("optim.shedule", "optim.schedule"),
        ("run_dri", "run_dir"),
        ("train.lr", "optim.lr"),
        ("model.sequence_length", "train.sequence_length"),
        ("steps", "train.steps"),
        ("train.tensorboard", "log.tensorboard"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(name: str, nearest: str) -> None:
    message = refusal(mapping_of(name, 1))
    assert repr(name) in message
    assert f"did you mean {nearest!r}" in message


@pytest.mark.parametrize(
    ("typo", "section"),
    [("optm", "optim"), ("trian", "train"), ("checkpoints", "checkpoint"), ("modle", "model")],
)
def test_an_unknown_section_names_the_nearest_section(typo: str, section: str) -> None:
    message = refusal({typo: {"every": 1}})
    assert repr(typo) in message
    assert f"did you mean '{section}'" in message


def test_an_unknown_key_like_nothing_lists_the_keys_of_its_section() -> None:
    in_section, at_top = refusal({"checkpoint": {"zzzzzz": 1}}), refusal({"zzzzzz": 1})
    assert "'checkpoint.zzzzzz'" in in_section
    assert "known keys: checkpoint.every, checkpoint.keep_last" in in_section
    assert "known keys: run_dir, init_from, fork_from, seed, model" in at_top


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"seed = ", "not valid TOML"),
        (b"seed = 1\nseed = 2", "not valid TOML"),
        (b"\xff\xfes\x00", "not valid TOML"),
    ],
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, contents: bytes, reason: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(path))}: {reason}"):
        load_config(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("absent.toml", "no such file"), ("", "cannot be read"), ("file/x.toml", "cannot be read")],
)
def test_a_path_that_is_no_file_is_named(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path / name))}: {reason}"):
        load_config(tmp_path / name)


def test_a_bad_value_in_a_file_names_file_and_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[train]\nsteps = 0\n")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: train\.steps = 0 "):
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
        config_fields,
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
