"""Fine-tuning from the command line: a folder, conversations, adapters, exports; before, during and
after training."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from lather.checkpoint.folder import list_checkpoints
from lather.checkpoint.held import PREFIX
from lather.checkpoint.reader import load_checkpoint
from lather.checkpoint.state import TrainingState
from lather.cli import main
from lather.config.toml_file import load_config
from lather.data.documents import train_tokenizer
from lather.data.recipe import END_OF_TEXT
from lather.engine.engine import build_model
from lather.models.hf.model_export import save_hugging_face
from lather.models.hf.model_folder import model_from_hugging_face
from lather.train.trained_model import TrainedModel
from models.tiny import error, tiny_family_config, tiny_family_model
from tiny_run import start

SIZES = {"vocab_size": 300, "max_position_embeddings": 64}
SMALL = (
    "--train.steps 3 --train.batch-size 2 --train.sequence-length 32 "
    "--train.validation-sequences 2 --log.sample-tokens 0 --lora.rank 4"
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role + '\n' + m.content + '<|endoftext|>' }}{% "
    "endfor %}{{ 'assistant\n' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in Hugging Face's format with a chat template, and a data set of conversations."""
    folder = tmp_path_factory.mktemp("tuning")
    train_tokenizer(iter(["user assistant question 1 answer\n"] * 9), 300, END_OF_TEXT).save(
        str(folder / "tokenizer.json")
    )
    model, config = (
        tiny_family_model("qwen3_moe", **SIZES),
        tiny_family_config("qwen3_moe", **SIZES),
    )
    save_hugging_face(model, config, folder / "base", tokenizer=folder / "tokenizer.json")
    (folder / "base/chat_template.jinja").write_text(TEMPLATE)
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"question {n}"},
                    {"role": "assistant", "content": f"answer {n}"},
                ]
            }
        )
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    made = ["data", "make", folder / "chats", folder / "chats.jsonl", "--chat", "--tokenizer"]
    assert main([*map(str, [*made, folder / "base"])]) == 0
    return folder


def tuning(folder: Path, run_dir: Path) -> list[str]:
    """The command that tunes adapters, without a configuration file."""
    weights = ["--init-from", folder / "base", "--run-dir", run_dir]
    data = ["--data.path", folder / "chats", "--data.packing", "documents"]
    return ["train", *map(str, [*weights, *data]), *SMALL.split()]


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    assert main(tuning(folder, folder / "tuned")) == 0
    return folder / "tuned"


def test_adapters_are_tuned_on_answers_and_both_exports_hold_them(
    tuned: Path, folder: Path, tmp_path: Path
) -> None:
    config = load_config(tuned / "config.toml")
    assert config.model == tiny_family_config("qwen3_moe", **SIZES)
    assert main(["export", str(tuned), str(tmp_path / "merged"), "--dtype", "fp32"]) == 0
    assert main(["export", str(tuned), str(tmp_path / "adapter"), "--adapter"]) == 0
    model = build_model(config, torch.device("cpu"))
    load_checkpoint(list_checkpoints(tuned / "checkpoints")[-1], TrainingState.of_model(model))
    tokens = torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))
    merged, base = (
        model_from_hugging_face(path)[0] for path in (tmp_path / "merged", folder / "base")
    )
    with torch.no_grad():
        ours = model(tokens).logits_BSV
        assert error(merged(tokens).logits_BSV, ours) < 1e-5
        assert error(base(tokens).logits_BSV, ours) > 1e-3
    command = ["export", str(tuned), str(tmp_path / "named"), "--adapter", "--base", "org/model"]
    assert main(command) == 0
    for name, expected in (("adapter", str((folder / "base").resolve())), ("named", "org/model")):
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == expected


def test_a_question_is_put_into_the_template_of_the_model_that_was_started_from(
    tuned: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = TrainedModel.find(str(tuned)).chat_template()
    assert template.source == (folder / "base/chat_template.jinja").read_text()
    assert main(["generate", str(tuned), "--message", "question 1", "--tokens", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == [
        {"role": "user", "content": "question 1"}
    ]


def test_a_run_keeps_what_belongs_to_its_model_and_goes_on_when_that_is_gone(
    folder: Path, tmp_path: Path
) -> None:
    """A run keeps chat template and settings, for questions and exports, and the model itself, so
    that the same command can go on."""
    base = tmp_path / "model"
    shutil.copytree(folder / "base", base)
    command = tuning(folder, tmp_path / "run")
    command[command.index("--init-from") + 1] = str(base)
    assert main(command) == 0
    shutil.rmtree(base)
    assert TrainedModel.find(str(tmp_path / "run")).chat_template().source == TEMPLATE
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (folder / "base" / name).read_bytes()
    assert main([*command, "--train.steps", "5"]) == 0


def test_the_template_of_the_data_is_taken_where_no_other_is_left(
    folder: Path, tuned: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tuned, run)
    shutil.rmtree(run / "huggingface")
    text = (run / "config.toml").read_text().replace(str(folder / "base"), str(tmp_path / "gone"))
    (run / "config.toml").write_text(text)
    manifest = folder / "chats/dataset.json"
    recipe = json.loads(manifest.read_text())["made_from"]
    assert recipe["chat_template"] == TEMPLATE
    base = folder / "base"
    base.rename(folder / "away")
    try:
        assert TrainedModel.find(str(run)).chat_template().source == TEMPLATE
    finally:
        (folder / "away").rename(base)


def test_data_of_another_tokenizer_is_refused_with_the_command_that_makes_it_anew(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats, texts, other = folder / "chats.jsonl", tmp_path / "texts", str(tmp_path / "other")
    texts.mkdir()
    for name in "abcd":
        shutil.copyfile(chats, texts / f"{name}.txt")
    assert main(["data", "make", other, str(chats), "--chat", "--vocab-size", "270"]) == 0
    command = tuning(folder, tmp_path / "run")
    command[command.index(str(folder / "chats"))] = other
    capsys.readouterr()
    assert main(command) == 2
    base = folder / "base"
    assert capsys.readouterr().err == (
        f"lather: error: init_from = '{base}' was trained with another tokenizer than that of "
        f"{other}: make the data set with `lather data make NEW SOURCE --tokenizer {base}`, and "
        "give it as data.path\n"
    )
    start = command.index("--data.path")
    made = ["--data.source", str(texts), "--data.tokenizer", f"{other}/tokenizer.json"]
    made += ["--data.cache-dir", str(tmp_path)]
    assert main([*command[:start], *made, *command[start + 2 :]]) == 2
    assert capsys.readouterr().err == (
        f"lather: error: init_from = '{base}' was trained with another tokenizer: give "
        f"data.tokenizer = '{base}/tokenizer.json'\n"
    )


def test_a_run_may_start_from_a_checkpoint_of_another(
    folder: Path, tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tuning(folder, tmp_path / "run")
    command[command.index("--init-from") + 1] = f"{tuned}@3"
    assert main(command) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"starting from the weights of {tuned}/checkpoints/step-00000003" in out
    command[command.index(f"{tuned}@3")] = f"{tuned}@2"
    command[command.index(str(tmp_path / "run"))] = str(tmp_path / "other")
    assert main(command) == 2
    assert "@2: no such checkpoint" in capsys.readouterr().err


def test_trained_weights_at_the_rate_of_fresh_ones_are_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = tuning(folder, tmp_path / "run")
    command[command.index("--lora.rank") + 1] = "0"
    assert main(command) == 0
    assert "give --optim.lr" in capsys.readouterr().out.replace("\n", " ")
    command[command.index(str(tmp_path / "run"))] = str(tmp_path / "other")
    assert main([*command, "--optim.lr", "1e-3"]) == 0
    assert "give --optim.lr" not in capsys.readouterr().out.replace("\n", " ")


def test_a_run_is_exported_while_it_trains(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run makes a checkpoint at every step and keeps one, so that checkpoints are deleted while
    they are read."""
    run_dir = tmp_path / "run"
    often = "--train.steps 100000 --checkpoint.every 1 --checkpoint.keep-last 1"
    command = [*tuning(folder, run_dir), *often.split(), "--train.validation-every", "0"]
    process = start(*command)
    try:
        deadline = time.monotonic() + 100
        while (
            not list_checkpoints(run_dir / "checkpoints")
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.02)
        steps = []
        for number in range(8):
            capsys.readouterr()
            assert main(["export", str(run_dir), str(tmp_path / f"model{number}")]) == 0, (
                capsys.readouterr().err
            )
            steps.append(int(capsys.readouterr().out.split()[0].removeprefix("step-")))
            assert (tmp_path / f"model{number}/model.safetensors").exists()
        assert process.poll() is None
        assert steps == sorted(steps)
        assert len(set(steps)) > 1
        assert not list(run_dir.glob(f"{PREFIX}*"))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
