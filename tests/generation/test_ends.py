"""Every token that ends a text for transformers' generate ends it here, too: in texts, answers,
samples and tasks, and after an export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from lather.cli import main
from lather.config.toml_file import load_config
from lather.errors import DataError
from lather.models.generate import generate
from lather.models.hf.model_export import save_hugging_face
from lather.train.companions import ends_of
from lather.train.trained_model import TrainedModel
from models.tiny import tiny_config, tiny_model
from tiny_run import write_config

SETTINGS = {
    "eos_token": "<|endoftext|>",
    "chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lather.data.documents import train_tokenizer

    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained = train_tokenizer(iter(["def f(x): return x\n"] * 9), 290, "<|endoftext|>")
    trained.add_special_tokens(["<|im_end|>"])
    trained.save(str(file))
    return file


@pytest.fixture
def published(tokenizer: Path, tmp_path: Path) -> Path:
    """A Hugging Face folder whose model goes on without an end, greedily, as far as its settings
    let it."""
    torch.manual_seed(0)
    save_hugging_face(
        tiny_model(vocab_size=300), tiny_config(vocab_size=300), tmp_path / "published"
    )
    (tmp_path / "published/tokenizer.json").write_bytes(tokenizer.read_bytes())
    return tmp_path / "published"


def greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Continue the prompt with transformers, with the settings of the folder alone."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    tokens = torch.tensor([prompt])
    made = model.generate(
        tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones_like(tokens),
    )
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_several_ends_end_a_text_as_in_transformers(
    published: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read = Tokenizer.from_file(str(published / "tokenizer.json"))
    prompt = read.encode("def f").ids
    free = greedy(published, prompt, 12)
    end = next(
        token for place, token in enumerate(free) if place >= 2 and token not in free[:place]
    )
    settings = json.loads((published / file).read_text()) if (published / file).exists() else {}
    (published / file).write_text(json.dumps({**settings, "eos_token_id": [299, end]}))
    theirs = greedy(published, prompt, 12)
    assert theirs == free[: free.index(end) + 1]

    run = tmp_path / "run"
    assert main(["import", str(published), str(run)]) == 0
    trained = TrainedModel.find(str(run))
    ends = trained.stop_tokens(trained.tokenizer())
    assert {299, end} <= ends
    tokens = generate(trained.decoder(), prompt, 12, context=24, temperature=0, stop_token=ends)
    assert tokens == theirs[:-1]
    capsys.readouterr()
    options = ["--temperature", "0", "--tokens", "12", "--context", "24", "--json"]
    assert main(["generate", str(run), "--prompt", "def f", *options]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["tokens"], row["stopped"]) == (len(theirs) - 1, True)

    assert main(["export", str(run), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    if file == "generation_config.json":
        assert (tmp_path / "out" / file).read_bytes() == (published / file).read_bytes()
    assert greedy(tmp_path / "out", prompt, 12) == theirs


def test_settings_for_generation_take_precedence_over_the_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert ends_of(tmp_path) == [7]
    for value, expected in (("null", [7]), ("[2, 3]", [2, 3])):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
        assert ends_of(tmp_path) == expected


@pytest.mark.parametrize("value", ["</s>", -1, [2, None], True, {"a": 1}], ids=str)
def test_what_is_no_token_is_refused(tmp_path: Path, value: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    fault = (
        r"generation_config\.json: eos_token_id = .* is not valid: it must be the number of a tok"
    )
    with pytest.raises(DataError, match=fault):
        ends_of(tmp_path)


def test_a_run_keeps_the_ends_of_its_model_and_its_export_has_all(
    published: Path, tmp_path: Path
) -> None:
    """The model's folder disappears after the start; the template's end of an answer is not among
    its settings."""
    config = write_config(tmp_path, steps=1)
    (published / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    settings = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**settings, "eos_token_id": [5, 6]}))
    run = tmp_path / "run"
    arguments = ["--run-dir", str(run), "--data.tokenizer", str(published / "tokenizer.json")]
    assert main(["train", str(config), *arguments]) == 0
    published.rename(tmp_path / "elsewhere")
    trained = TrainedModel(run, run / "checkpoints/step-00000001", load_config(run / "config.toml"))
    read = trained.tokenizer()
    end_of_text, end_of_turn = read.token_to_id("<|endoftext|>"), read.token_to_id("<|im_end|>")
    assert trained.stop_tokens(read) == {5, 6, end_of_text}
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == sorted(
        {5, 6, end_of_text, end_of_turn}
    )


def test_a_sample_ends_at_each(
    monkeypatch: pytest.MonkeyPatch, published: Path, tmp_path: Path
) -> None:
    given: list[object] = []

    def record(*_: object, stop_token: object, **__: object) -> list[int]:
        given.append(stop_token)
        return []

    monkeypatch.setattr("lather.train.trained_model.generate", record)
    (published / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    config, run = write_config(tmp_path, steps=1), str(tmp_path / "run")
    options = ["--run-dir", run, "--data.tokenizer", str(published / "tokenizer.json")]
    assert main(["train", str(config), *options]) == 0
    assert given == [{0, 2, 3}]
