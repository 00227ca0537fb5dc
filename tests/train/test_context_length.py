"""Sequences longer than those that a published model was trained with: what is given, at import, in
files and on command lines, what follows from it, and what transformers computes from the export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lather.cli import main
from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.toml_file import load_config, load_run
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.errors import ConfigError
from lather.models.families import FAMILIES
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face
from lather.models.rotary import Llama3RopeConfig, YarnConfig
from lather.train.initial_weights import find_weights, notes_on_weights
from models.tiny import error, tiny_family_config, tiny_family_model
from tiny_run import run, write_config

LENGTH = 16
SCALINGS: dict[str, Any] = {
    "deepseek_v2": YarnConfig(2.0, 8, 4.0, 0.5, mscale=0.7, mscale_all_dim=0.8),
    "gpt_oss": YarnConfig(2.0, 8, 4.0, 0.5, truncate=False),
    "llama": Llama3RopeConfig(2.0, 8, 0.5, 2.0),
}
"""Scalings of published models; those of other families have none."""
ALWAYS = ("deepseek_v2", "gpt_oss", "qwen3_moe", "qwen3_next", "llama")
EVERY_FAMILY = [
    pytest.param(family, marks=[pytest.mark.grid] * (family not in ALWAYS))
    for family in FAMILIES
    if family != "kimi_k2"  # is deepseek_v3; transformers has no class of this name
]
Base = Callable[..., Path]


@pytest.fixture
def base(tmp_path: Path) -> Base:
    """Make the folder of a published model that was trained with 16 positions."""

    def make(family: str = "qwen3_moe", **changes: Any) -> Path:
        sizes = {
            **{"vocab_size": 300, "max_position_embeddings": LENGTH, "rope_theta": 100.0},
            **{"rope_scaling": SCALINGS.get(family), **changes},
        }
        tokenizer = tmp_path / "tokenizer.json"
        train_tokenizer(iter(["def f(x): return x\n"] * 9), 300, END_OF_TEXT).save(str(tokenizer))
        model = tiny_family_model(family, **sizes)
        config = tiny_family_config(family, **sizes)
        save_hugging_face(model, config, tmp_path / "base", tokenizer=tokenizer)
        return tmp_path / "base"

    return make


def logits_of(model: nn.Module, length: int) -> Tensor:
    tokens = torch.randint(300, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output = model(tokens)
    return output.logits_BSV if hasattr(output, "logits_BSV") else output.logits


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_transformers_computes_the_same_from_an_export_beyond_the_original_length(
    family: str, base: Base, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from models.published import read_back

    folder, factor = base(family), 8.0 if family in SCALINGS else 4.0
    imported = ["import", folder, tmp_path / "run", "--rope-scaling.factor", factor]
    assert main([*map(str, imported)]) == 0
    assert main(["export", *map(str, (tmp_path / "run", tmp_path / "out")), "--dtype", "fp32"]) == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    fields = written.get(FAMILIES[family].text_field or "text_config", written)
    scaling = fields["rope_scaling"]
    expected = ("llama3" if family == "llama" else "yarn", factor, 8 if factor == 8 else 16)
    names = "rope_type", "factor", "original_max_position_embeddings"
    assert tuple(scaling[name] for name in names) == expected
    assert fields["max_position_embeddings"] == 4 * LENGTH
    longer, config = model_from_hugging_face(tmp_path / "out")
    assert config == load_run(tmp_path / "run").model
    ours, theirs = (logits_of(each, 4 * LENGTH) for each in (longer, read_back(tmp_path / "out")))
    assert error(ours, theirs) < 1e-5
    before = logits_of(model_from_hugging_face(folder)[0], 4 * LENGTH)
    assert error(before, theirs) > 1e-3


def parsed(*arguments: object) -> Config:
    return read_arguments([*map(str, arguments)])[0]


FACTOR = "--model.rope-scaling.factor"
ORIGINAL = "--model.rope-scaling.original-max-position-embeddings"


@pytest.mark.parametrize(
    ("family", "options", "scaling", "longest"),
    [
        ("qwen3_moe", {FACTOR: 4}, YarnConfig(4.0, 16), 64),
        ("qwen3_moe", {FACTOR: 4, ORIGINAL: 12}, YarnConfig(4.0, 12), 48),
        ("qwen3_moe", {FACTOR: 4, "--model.max-position-embeddings": 50}, YarnConfig(4.0, 16), 50),
        ("qwen3_moe", {FACTOR: 1.25}, YarnConfig(1.25, 16), 20),
        (
            "deepseek_v2",
            {FACTOR: 8},
            YarnConfig(8.0, 8, 4.0, 0.5, mscale=0.7, mscale_all_dim=0.8),
            64,
        ),
        ("gpt_oss", {FACTOR: 8}, YarnConfig(8.0, 8, 4.0, 0.5, truncate=False), 64),
        ("llama", {FACTOR: 8}, Llama3RopeConfig(8.0, 8, 0.5, 2.0), 64),
        ("qwen3_moe", {"--model.max-position-embeddings": 50}, None, 50),
    ],
)
def test_the_length_follows_the_scaling(
    family: str, options: dict[str, Any], scaling: Any, longest: int, base: Base, tmp_path: Path
) -> None:
    """On the command line, in a file beside `init_from`, and at import."""
    folder = base(family)
    words = [str(word) for pair in options.items() for word in pair]
    model = parsed("--init-from", folder, *words).model
    assert (model.rope_scaling, model.max_position_embeddings) == (scaling, longest)
    keys = {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}
    lines = [f"init_from = '{folder}'", *(f"{key} = {value}" for key, value in keys.items())]
    (tmp_path / "my.toml").write_text("\n".join(lines))
    assert parsed(tmp_path / "my.toml").model == load_config(tmp_path / "my.toml").model == model
    at_import = [word.replace("--model.", "--") for word in words]
    assert main(["import", str(folder), str(tmp_path / "run"), *at_import]) == 0
    assert load_run(tmp_path / "run").model == model


def test_a_complete_model_keeps_its_length_and_is_the_original(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[model]\nmax_position_embeddings = 64\n[model.rope_scaling]\nfactor = 4.0")
    model = load_config(file, {"train.sequence_length": 64}).model
    assert model.rope_scaling is not None
    assert model.rope_scaling.original_max_position_embeddings == 64
    assert model.max_position_embeddings == 64
    longer = load_config(file, {"model.rope_scaling.factor": 8.0, "train.sequence_length": 64})
    assert longer.model.max_position_embeddings == 512


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_length_follows_a_scaling_of_the_file_alone(family: str, tmp_path: Path) -> None:
    file, names = tmp_path / "my.toml", f"[model]\nmodel_type = '{family}'\n[model.rope_scaling]\n"
    file.write_text(f"{names}factor = 8.0")
    default = FAMILIES[family].config().max_position_embeddings
    assert load_config(file).model.max_position_embeddings == 8 * default
    other = {"llama": "low_freq_factor", "qwen3_moe": "beta_fast"}[family]
    file.write_text(f"{names}{other} = 1.0")
    longer = load_config(file, {"model.rope_scaling.factor": 4.0}).model
    assert longer.max_position_embeddings == 4 * default
    for factor in ("0.0", "1e308"):
        file.write_text(f"{names}factor = {factor}")
        with pytest.raises(ConfigError, match=r"rope_scaling\.factor|max_position_embeddings"):
            load_config(file, {"train.sequence_length": 10**6})


def test_a_published_length_that_does_not_follow_its_yarn_is_followed(base: Base) -> None:
    """Published instructions add YaRN to a config.json and leave its length."""
    folder = base(max_position_embeddings=20, rope_scaling=YarnConfig(4.0, 16))
    config = parsed("--init-from", folder, "--train.sequence-length", 64)
    assert config.model.max_position_embeddings == 64
    find_weights(config)
    assert not any("rope_scaling" in note for note in notes_on_weights(folder, config))
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 99}))
    assert parsed("--init-from", folder).model.max_position_embeddings == 99


def test_what_the_model_was_not_trained_with_is_said(base: Base) -> None:
    folder = base()
    scaled = parsed("--init-from", folder, FACTOR, 4, "--train.sequence-length", 64)
    find_weights(scaled)
    assert notes_on_weights(folder, scaled)[-1] == (
        "model.rope_scaling: yarn, factor 4, for a model of 16 positions, so sequences of up to 64 "
        "tokens; init_from has no scaling"
    )
    options = "--model.max-position-embeddings", 64, "--train.sequence-length", 64
    assert notes_on_weights(folder, parsed("--init-from", folder, *options))[-1] == (
        "train.sequence_length is 64, but the model of init_from has 16 positions: "
        "model.rope_scaling.factor adapts it to longer sequences"
    )
    assert notes_on_weights(folder, parsed("--init-from", folder)) == []


def test_a_model_without_the_scaling_of_its_weights_is_another(base: Base, tmp_path: Path) -> None:
    folder = base("gpt_oss")
    command = ["import", str(folder), str(tmp_path / "run")]
    assert main(command) == 0
    file = tmp_path / "run/config.toml"
    text, _, rest = file.read_text().partition("[model.rope_scaling]")
    (tmp_path / "my.toml").write_text(f"{text}{rest.partition(chr(10) * 2)[2]}")
    config = parsed(tmp_path / "my.toml", "--init-from", folder)
    assert config.model.rope_scaling is None
    with pytest.raises(ConfigError, match=r"model.rope_scaling is \{.* there and none here"):
        find_weights(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([FACTOR, "0.5"], "model.rope_scaling.factor = 0.5 is not valid: it must be at least 1 "),
        ([FACTOR, "inf"], "model.rope_scaling.factor = inf is not valid: it must be at least 1 "),
        ([FACTOR, "x"], f"{FACTOR} = 'x' is not valid: it must be a number"),
        ([FACTOR, "4", ORIGINAL, "0"], "model.rope_scaling.original_max_position_embeddings = 0 "),
        ([ORIGINAL, "8"], "model.rope_scaling.factor is missing: give the new maximal length "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options: list[str], message: str, base: Base) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed("--init-from", base(), *options)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_the_error_for_long_sequences_names_what_makes_them_possible(
    base: Base, tmp_path: Path
) -> None:
    command = ["--init-from", base(), "--train.sequence-length", 50]
    with pytest.raises(ConfigError) as raised:
        parsed(*command)
    assert str(raised.value) == (
        "train.sequence_length = 50 is not valid: it must be at most model.max_position_embeddings "
        "(16): lower it, or give the model more: with trained weights "
        "model.rope_scaling.factor 3.13, with new ones model.max_position_embeddings 50"
    )
    assert parsed(*command, FACTOR, 3.13).model.max_position_embeddings == 50
    assert (
        main(["import", str(command[1]), str(tmp_path / "run"), "--rope-scaling.factor", "2"]) == 0
    )
    file = tmp_path / "run/config.toml"
    with pytest.raises(ConfigError, match=r"model\.rope_scaling\.factor 4,"):
        parsed(file, "--train.sequence-length", 64)
    shorter = ["--model.max-position-embeddings", 20, "--train.sequence-length", 32]
    with pytest.raises(ConfigError, match=r"model more: model\.max_position_embeddings 32,"):
        parsed(file, *shorter)
    assert (
        parsed(file, "--train.sequence-length", 64, FACTOR, 4).model.max_position_embeddings == 64
    )


def test_a_run_trains_resumes_and_exports_with_it(base: Base, tmp_path: Path) -> None:
    """The same command resumes; another factor is another model."""
    folder = base()
    corpus = write_config(tmp_path).parent / "corpus"
    command = [
        *("train", "--init-from", folder, "--run-dir", tmp_path / "run", "--data.source", corpus),
        *("--data.cache-dir", tmp_path / "cache", "--data.tokenizer", tmp_path / "tokenizer.json"),
        *("--train.sequence-length", 64, "--train.batch-size", 2, "--log.sample-tokens", 0),
        *("--train.validation-sequences", 2, FACTOR, 4),
    ]
    status, out, error_text = run(*command, "--train.steps", 1)
    assert status == 0, error_text
    assert "note: model.rope_scaling: yarn, factor 4" in " ".join(out.split())
    status, _, error_text = run(*command, "--train.steps", 2)
    assert status == 0, error_text
    status, _, error_text = run(*command[:-1], 5, "--train.steps", 3)
    assert status == 2
    assert "max_position_embeddings is 64 there and 80 here and 1 more" in error_text
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["max_position_embeddings"] == 64
    assert written["rope_scaling"]["factor"] == 4.0
    assert written["rope_scaling"]["original_max_position_embeddings"] == 16
