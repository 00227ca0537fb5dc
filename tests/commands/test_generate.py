"""`lather generate` as a user gives it: several prompts, files, messages, conversations, samples,
JSON, and one line for each error."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lather.cli import main
from lather.commands import generate as command
from tiny_run import write_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4 and 8."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--run-dir", str(folder / "run"), "--log.sample-tokens", "0"]
    assert main(["train", str(write_config(folder, steps=8)), *options]) == 0
    return folder / "run"


def generate(capsys: pytest.CaptureFixture[str], run: object, *arguments: object) -> str:
    capsys.readouterr()
    status = main(["generate", str(run), "--tokens", "12", *map(str, arguments)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def rows(
    capsys: pytest.CaptureFixture[str], run: object, *arguments: object
) -> list[dict[str, Any]]:
    return [json.loads(line) for line in generate(capsys, run, "--json", *arguments).splitlines()]


def test_several_prompts_give_what_each_gives_alone(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["def f", "    return x + 1\n\ndef", "x"]
    given = [argument for prompt in prompts for argument in ("--prompt", prompt)]
    together = rows(capsys, trained, *given, "--temperature", 0)
    assert [row["prompt"] for row in together] == prompts
    for prompt, row in zip(prompts, together, strict=True):
        assert (
            rows(capsys, trained, "--prompt", prompt, "--temperature", 0)[0]["text"] == row["text"]
        )
        assert row["tokens"] == 12 or row["stopped"]
    text = generate(capsys, trained, *given, "--temperature", 0, "--batch-size", 2)
    for number, row in enumerate(together, 1):
        assert f"--- prompt {number}, sample 1 ---" in text
        assert row["prompt"] + row["text"] in text


def test_samples_have_seeds_of_their_own(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = ["--prompt", "def", "--temperature", 2]
    found = rows(capsys, trained, *hot, "--num-samples", 3, "--seed", 5, "--batch-size", 2)
    assert [row["sample"] for row in found] == [0, 1, 2]
    assert len({row["text"] for row in found}) == 3
    assert rows(capsys, trained, *hot, "--seed", 6)[0]["text"] == found[1]["text"]


def test_a_single_text_comes_in_pieces(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    def noted(*texts: str, **options: Any) -> None:
        pieces.extend(texts)
        print(*texts, **options)

    monkeypatch.setattr(command, "print", noted, raising=False)
    out = generate(capsys, trained, "--prompt", "def f", "--temperature", 0)
    assert pieces[0] == "def f"
    assert len(pieces) > 4
    assert "".join(pieces) + "\n" == out


def test_prompts_of_a_file(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "def f"}]
    file.write_text(
        json.dumps({"prompt": "def"}) + "\n" + json.dumps({"messages": messages}) + "\n"
    )
    found = rows(capsys, trained, "--prompts", file, "--num-samples", 2, "--batch-size", 3)
    assert [(row.get("prompt"), row["sample"]) for row in found[:2]] == [("def", 0), ("def", 1)]
    assert [(row["messages"], row["sample"]) for row in found[2:]] == [(messages, 0), (messages, 1)]


def test_a_message_is_put_into_the_template_and_only_the_answer_is_shown(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--temperature", 0, "--context", 64]
    answer = generate(capsys, trained, "--message", "def f", "--system", "be", *options)
    text = (
        "<|im_start|>system\nbe<|im_end|>\n"
        "<|im_start|>user\ndef f<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer == rows(capsys, trained, "--prompt", text, *options)[0]["text"] + "\n"
    row = rows(capsys, trained, "--message", "def f", "--system", "be", *options)[0]
    assert [message["role"] for message in row["messages"]] == ["system", "user"]


def test_a_conversation_of_piped_lines(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n\nx + 1\n"))
    first, second = rows(capsys, trained, "--chat", "--temperature", 0)
    contents = [message["content"] for message in second["messages"]]
    assert contents == ["def f", first["text"], "x + 1"]
    (row,) = rows(capsys, trained, "--message", "def f", "--temperature", 0)
    assert row["text"] == first["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\nx + 1\n"))
    out = generate(capsys, trained, "--chat", "--temperature", 0)
    assert out == f"{first['text']}\n{second['text']}\n"


def test_the_templates_own_end_ends_an_answer(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers of this template end with a letter that this model is sure to write."""

    def answers(*options: object) -> dict[str, Any]:
        return rows(capsys, trained, "--message", "def f", "--temperature", 3, *options)[0]

    def letters(text: str) -> list[str]:
        return [letter for letter in text if letter.isalnum() and text.index(letter) > 2]

    # the text of a seed depends on the kind of CPU
    tries = ((seed, answers("--seed", seed)) for seed in range(20))
    seed, answer = next(
        (seed, answer)
        for seed, answer in tries
        if not answer["stopped"] and letters(answer["text"])
    )
    stop = letters(answer["text"])[0]
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ STOP if m.role == 'assistant' else '<|im_end|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    template = trained / "chat_template.jinja"
    template.write_text(source.replace("STOP", json.dumps(stop)))
    try:
        ended = answers("--seed", seed)
    finally:
        template.unlink()
    assert ended["stopped"]
    assert ended["text"] == answer["text"][: answer["text"].index(stop)]
    assert ended["tokens"] < answer["tokens"]


@pytest.mark.parametrize("option", ["--prompt", "--message"])
def test_text_that_is_not_unicode_is_refused(
    option: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(trained), option, "\udcff"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "not valid Unicode" in error


def test_a_damaged_template_is_one_line(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = trained / "tokenizer_config.json"
    settings.write_text("{")
    try:
        assert main(["generate", str(trained), "--message", "x"]) == 2
    finally:
        settings.unlink()
    assert f"{settings}: not readable" in capsys.readouterr().err


def test_a_conversation_without_standard_input_is_refused_before_the_model_is_sought(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `<&-` closes it."""
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "nowhere", "--chat"]) == 2
    error = "--chat reads standard input, which is closed: leave it open, or give --message TEXT"
    assert capsys.readouterr().err == f"lather: error: {error}\n"
