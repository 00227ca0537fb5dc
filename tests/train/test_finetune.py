"""Choosing by name what is trained; and starting from the weights of a Hugging Face folder or of
another run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from changing_runs import run
from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.reader import load_checkpoint, open_checkpoint
from lather.checkpoint.state import TrainingState
from lather.commands.train import read_arguments
from lather.config.config import Config
from lather.config.optim import optim_config
from lather.config.toml_file import load_config
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.engine.engine import build_engine, build_model
from lather.engine.optimizer import build_optimizer
from lather.engine.trained_parameters import (
    check_adapters_are_all,
    trained_parameters,
)
from lather.errors import CheckpointError, ConfigError, DataError, ExchangeError
from lather.files import read_rows
from lather.models.decoder import Decoder
from lather.models.hf.model_export import save_hugging_face
from lather.parallel.mesh import Mesh
from lather.train.initial_weights import find_weights, notes_on_weights
from tiny_model import VOCAB_SIZE
from tiny_run import timeless_rows

ConfigMaker = Callable[..., Config]


@pytest.fixture
def published(make_config: ConfigMaker, tmp_path: Path) -> Path:
    """The tiny model in Hugging Face's format, with other weights than the seed's."""
    config = make_config()
    train_tokenizer(iter(["the quick brown fox\n"] * 9), VOCAB_SIZE, END_OF_TEXT).save(
        str(tmp_path / "tokenizer.json")
    )
    model = build_model(make_config(seed=9), torch.device("cpu"))
    save_hugging_face(
        model, config.model, tmp_path / "published", tokenizer=tmp_path / "tokenizer.json"
    )
    return tmp_path / "published"


@pytest.fixture
def tune(make_config: ConfigMaker, published: Path) -> ConfigMaker:
    """Make configurations that start from that folder."""

    def make(**changes: Any) -> Config:
        data = {"tokenizer": str(published / "tokenizer.json")}
        return make_config(
            **{"init_from": str(published), **changes, "data": {**data, **changes.get("data", {})}}
        )

    return make


def weights(config: Config) -> dict[str, Tensor]:
    """Read the weights of the newest checkpoint."""
    tensors = open_checkpoint(list_checkpoints(Path(config.run_dir) / "checkpoints")[-1]).weights()
    return {name: tensors.read(name) for name in tensors.tensors}


def model_of(config: Config) -> Decoder:
    model = build_model(config, torch.device("cpu"))
    newest = list_checkpoints(Path(config.run_dir) / "checkpoints")[-1]
    load_checkpoint(newest, TrainingState.of_model(model))
    return model


EXPERTS = "layers.1.mlp.experts."


# --- by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("",)),
        ({"train": {"trainable": ["layers.0.*"]}}, ("layers.0.",)),
        ({"train": {"trainable": ["*.experts.*", "norm.weight"]}}, (EXPERTS, "norm.")),
        ({"train": {"trainable": ["layers.*"], "frozen": ["layers.0.*"]}}, ("layers.1.",)),
        (
            {"lora": {"rank": 2, "targets": ["experts"]}},
            (f"{EXPERTS}gate_up_lora", f"{EXPERTS}down_lora"),
        ),
        (
            {
                "lora": {"rank": 2, "targets": ["*.o_proj"]},
                "train": {"trainable": ["norm.*"], "frozen": ["layers.0.*"]},
            },
            ("layers.1.self_attn.o_proj.lora", "norm."),
        ),
    ],
    ids=str,
)
def test_patterns_say_what_is_trained(
    changes: dict[str, Any], expected: tuple[str, ...], make_config: ConfigMaker
) -> None:
    config = make_config(**changes)
    trained = trained_parameters(config)
    parameters = dict(build_model(config, torch.device("meta")).named_parameters())
    assert trained.names == {name for name in parameters if name.startswith(expected)}
    assert trained.num_parameters == sum(p.numel() for p in parameters.values())
    assert trained.num_trained == sum(parameters[name].numel() for name in trained.names)
    engine = build_engine(config, Mesh.single(torch.device("cpu")))
    found = {entry.info.name for entry in engine.parameters if entry.source.requires_grad}
    assert found == trained.names
    grouped = build_optimizer(config.optim, engine.parameters).param_groups
    assert sum(p.numel() for group in grouped for p in group["params"]) == trained.num_trained


def test_adapters_are_exported_alone_if_nothing_else_was_trained(make_config: ConfigMaker) -> None:
    check_adapters_are_all(make_config(lora={"rank": 2}))
    with pytest.raises(ConfigError, match=r"lora\.rank = 0: export the model"):
        check_adapters_are_all(make_config())
    with pytest.raises(ConfigError, match=r"'norm\.weight': export the merged model"):
        check_adapters_are_all(make_config(lora={"rank": 2}, train={"trainable": ["norm.*"]}))


# --- the start ------------------------------------------------------------------------------------


def test_a_run_starts_from_a_hugging_face_folder(
    tune: ConfigMaker, make_config: ConfigMaker, published: Path
) -> None:
    config = tune(optim={"lr": 0.0})
    notes = run(config)
    assert f"starting from the weights of {published}" in notes
    expected = dict(build_model(make_config(seed=9), torch.device("cpu")).named_parameters())
    found = dict(model_of(config).named_parameters())
    assert all(torch.equal(found[name], p) for name, p in expected.items())


def test_a_run_starts_from_a_folder_with_fields_that_it_is_told_to_ignore(
    published: Path, tmp_path: Path
) -> None:
    """The command line, the file and the run all pass them on."""
    file = published / "config.json"
    fields = {"final_logit_softcapping": 30.0, "scoring_func": "sigmoid"}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    command = ["--init-from", str(published), "--run-dir", str(tmp_path / "told")]
    with pytest.raises(ExchangeError, match="final_logit_softcapping = 30"):
        read_arguments(command)
    config, _ = read_arguments([*command, "--ignore-fields", *fields])
    assert config.ignore_fields == (*fields,)
    toml = tmp_path / "my.toml"
    toml.write_text(f"init_from = '{published}'\nignore_fields = {[*fields]}\n")
    assert load_config(toml).model == config.model
    assert find_weights(config) == published
    assert notes_on_weights(published, config) == [f"{file}: ignored as told: {', '.join(fields)}"]


@pytest.mark.parametrize("rule", ["muon", "soap", "adamw", "klsoap", "soap_muon"])
def test_adapters_learn_under_every_rule_and_the_weights_stay(
    rule: str, tune: ConfigMaker, make_config: ConfigMaker
) -> None:
    """The first gradient of every A is zero, because B is zero."""
    more = {"precondition_frequency": 2} if "soap" in rule else {}
    optim = {"name": rule, "lr": 2e-2, "warmup_steps": 1, "rest": {"lr_factor": 1.0}, **more}
    config = replace(tune(train={"steps": 12}, lora={"rank": 4}), optim=optim_config(**optim))
    notes = run(config)
    assert any(
        re.match(r"[\d,]+ of [\d,]+ parameters are trained \([\d.]+ %\), 20 tensors", note)
        for note in notes
    ), notes
    rows = [row for row in read_rows(Path(config.run_dir) / "metrics.jsonl") if "loss" in row]
    assert not any(row["skipped"] for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05
    base = dict(build_model(make_config(seed=9), torch.device("cpu")).named_parameters())
    found = dict(model_of(config).named_parameters())
    assert all(torch.equal(found[name], p) for name, p in base.items())
    assert all(found[name].abs().max() > 0 for name in found.keys() - base.keys())


def test_a_run_with_adapters_that_was_stopped_goes_on_to_the_same_bits(
    tune: ConfigMaker, tmp_path: Path
) -> None:
    whole, parted = (
        tune(lora={"rank": 2}, run_dir=str(tmp_path / name)) for name in ("whole", "parted")
    )
    run(whole)
    run(parted, stop_after=3)
    run(parted)
    assert timeless_rows(Path(parted.run_dir)) == timeless_rows(Path(whole.run_dir))
    found, expected = weights(parted), weights(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_run_that_starts_from_one_with_adapters_starts_from_its_model(
    tune: ConfigMaker, tmp_path: Path
) -> None:
    first = tune(
        lora={"rank": 2, "targets": ["attention", "experts", "dense", "shared_experts"]},
        run_dir=str(tmp_path / "first"),
    )
    run(first)
    tokens = torch.randint(VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(0))
    expected = model_of(first)(tokens).logits_BSV
    for name, changes in {"plain": {}, "more": {"lora": {"rank": 3}}}.items():
        config = tune(
            init_from=str(tmp_path / "first"),
            run_dir=str(tmp_path / name),
            optim={"lr": 0.0},
            **changes,
        )
        run(config)
        torch.testing.assert_close(
            model_of(config)(tokens).logits_BSV, expected, rtol=1e-5, atol=1e-5
        )


def test_a_configuration_without_model_has_that_of_its_start(
    tune: ConfigMaker, published: Path, tmp_path: Path
) -> None:
    (tmp_path / "tune.toml").write_text(
        f'init_from = "{published}"\n[train]\nsequence_length = 60\n'
    )
    assert load_config(tmp_path / "tune.toml").model == tune().model
    (tmp_path / "tune.toml").write_text("[train]\nsequence_length = 60\n")
    assert load_config(tmp_path / "tune.toml", {"init_from": str(published)}).model == tune().model
    (tmp_path / "tune.toml").write_text('init_from = "nowhere"\n')
    with pytest.raises(
        ConfigError,
        match=(
            r"tune.toml: init_from = 'nowhere' is not valid: it "
            r"must be a run directory, or a folder"
        ),
    ):
        load_config(tmp_path / "tune.toml")


@pytest.mark.parametrize("of", ["folder", "run"])
def test_another_model_is_refused_by_its_first_field(
    of: str, tune: ConfigMaker, tmp_path: Path, published: Path
) -> None:
    if of == "run":
        run(tune(run_dir=str(tmp_path / "first"), train={"steps": 1}))
    source = published if of == "folder" else tmp_path / "first"
    harmless = {"initializer_range": 0.3, "aux_loss_alpha": 0.5}
    config = tune(
        init_from=str(source), model={**harmless, "rms_norm_eps": 1e-5, "num_attention_heads": 4}
    )
    message = (
        f"init_from = '{source}' is another model: model.num_attention_heads is 2 there and 4 here"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(config)
    assert not Path(config.run_dir).exists()
    run(tune(init_from=str(source), model=harmless))


@pytest.mark.parametrize("of", ["folder", "run"])
def test_blocks_of_multi_token_prediction_may_be_left_out(
    of: str, make_config: ConfigMaker, published: Path, tmp_path: Path
) -> None:
    sizes, of_tokenizer = (
        {"model_type": "deepseek_v3"},
        {"tokenizer": str(published / "tokenizer.json")},
    )
    with_one = make_config(
        run_dir=str(tmp_path / "first"),
        model={**sizes, "num_nextn_predict_layers": 1},
        data=of_tokenizer,
        train={"steps": 1},
    )
    source = tmp_path / "first"
    run(with_one)
    expected = weights(with_one)
    if of == "folder":
        source = tmp_path / "exported"
        save_hugging_face(
            model_of(with_one), with_one.model, source, tokenizer=published / "tokenizer.json"
        )
    config = make_config(
        init_from=str(source),
        model=sizes,
        data=of_tokenizer,
        train={"steps": 1},
        optim={"lr": 1e-30},
    )
    run(config)
    found = weights(config)
    assert found.keys() == {name for name in expected if not name.startswith("layers.2.")}
    assert all(torch.allclose(found[name], expected[name]) for name in found)
    more = make_config(
        run_dir=str(tmp_path / "more"),
        init_from=str(source),
        model={**sizes, "num_nextn_predict_layers": 2},
        data=of_tokenizer,
    )
    with pytest.raises(ConfigError, match=r"model.num_nextn_predict_layers is 1 there and 2 here"):
        run(more)


def test_a_start_that_does_not_fit_is_refused(
    tune: ConfigMaker, published: Path, tmp_path: Path
) -> None:
    other, file = tmp_path / "other.json", published / "model.safetensors"
    train_tokenizer(iter(["another text\n"] * 9), VOCAB_SIZE, END_OF_TEXT).save(str(other))
    corpus, tokenizer = str(tmp_path / "corpus"), published / "tokenizer.json"
    for config, error, message in [
        (tune(data={"tokenizer": str(other)}), DataError, r"give data\.tokenizer = '.*published"),
        (tune(init_from=corpus), CheckpointError, "has no checkpoint: give a run directory that"),
    ]:
        with pytest.raises(error, match=message):
            run(config)
    without = tune(data={"tokenizer": ""})
    tokenizer.unlink()
    with pytest.raises(DataError, match=r"has no tokenizer\.json: give its model's tokenizer"):
        run(without)
    file.write_bytes(file.read_bytes()[:-100])
    shutil.copyfile(other, tokenizer)
    with pytest.raises(ExchangeError, match=r"model.safetensors: missing, truncated or damaged"):
        run(tune(data={"tokenizer": str(other)}))
    assert not (tmp_path / "run").exists()
