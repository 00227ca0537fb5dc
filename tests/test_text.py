"""Texts may begin with a byte-order mark and have any ends of lines; what is no text is named."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.convergence.study import load_study
from lather.commands.generate import _lines_of_user
from lather.config.toml_file import load_config
from lather.data.chat import ChatTemplate
from lather.data.dataset import MANIFEST, DataSet
from lather.data.documents import load_tokenizer, train_tokenizer
from lather.data.making import make_dataset
from lather.data.recipe import END_OF_TEXT, DataRecipe
from lather.data.records import FilePart, RecordReader
from lather.errors import UserError
from lather.files import read_text
from lather.generation.prompts import read_prompts
from lather.models.hf.model_folder import read_json
from lather.models.hf.safetensors_folder import read_index
from lather.train.companions import has_template

SOURCE = Path(__file__).parents[1] / "src" / "lather"
NFC, NFD = "caf\u00e9", "cafe\u0301"
"""The same word in two forms, which look alike; neither becomes the other."""


def records(file: Path, kind: Any) -> Any:
    return [
        getattr(record, "content", record) for record in RecordReader(FilePart(str(file), kind))
    ]


def weight_map(file: Path) -> Any:
    (file.parent / "a.safetensors").touch()
    return read_index(file)


def tokenizer_json() -> str:
    return train_tokenizer(iter(["some text"]), 260, END_OF_TEXT).to_str(pretty=True)


STUDY = (Path(__file__).parents[1] / "benchmarks/studies/short.toml").read_text("utf-8")
CHAT = json.dumps({"chat_template": f"{NFC} {NFD}"}, ensure_ascii=False, indent=1)
MESSAGE = {"role": "user", "content": f"{NFC} {NFD}"}
MESSAGES = json.dumps({"messages": [MESSAGE]}, ensure_ascii=False)
READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "configuration": ("a.toml", f'run_dir = "{NFC} {NFD}"\n[train]\nsteps = 3\n', load_config),
    "study": ("study.toml", STUDY, load_study),
    "prompts": ("prompts.txt", f"one\n\n{NFC} {NFD}\n", read_prompts),
    "prompts of JSON": ("prompts.jsonl", f'{{"prompt": "one"}}\n{MESSAGES}\n', read_prompts),
    "template": (
        "chat_template.jinja",
        f"{NFC}\n{NFD}\n",
        lambda file: ChatTemplate.beside(file).source,
    ),
    "template of settings": (
        "tokenizer_config.json",
        CHAT,
        lambda file: ChatTemplate.beside(file).source,
    ),
    "settings": ("tokenizer_config.json", CHAT, lambda file: has_template(file.parent)),
    "tokenizer": (
        "tokenizer.json",
        tokenizer_json(),
        lambda file: load_tokenizer(file, "restore it").encode("some text").ids,
    ),
    "config.json": ("config.json", '{\n"model_type": "a"\n}\n', lambda file: read_json(file, "x")),
    "index": (
        "model.safetensors.index.json",
        '{\n"weight_map": {"x": "a.safetensors"}}',
        weight_map,
    ),
    "JSON": ("a.json", f'[\n{{"text": "{NFC} {NFD}"}}]', lambda file: records(file, "json")),
}
"""Each way in: a file, its text, and what reads it."""
LINES = (
    "a.jsonl",
    f'{{"text": "{NFC} {NFD}"}}\n{{"text": "two"}}\n',
    lambda file: records(file, "jsonl"),
)
WRITTEN: dict[str, Callable[[str], bytes]] = {
    "UTF-8 with mark": lambda text: text.encode("utf-8-sig"),
    "line ends of Windows": lambda text: text.replace("\n", "\r\n").encode(),
    "both": lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "UTF-16, the high byte first": lambda text: b"\xfe\xff" + text.encode("utf-16-be"),
    "UTF-32": lambda text: text.encode("utf-32"),
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("way", [*READERS, "JSONL"])
def test_a_text_with_a_mark_is_the_text_without_it(way: str, written: str, tmp_path: Path) -> None:
    name, text, read = READERS.get(way, LINES)
    file = tmp_path / name
    file.write_bytes(text.encode())
    expected = read(file)
    content = WRITTEN[written](text)
    assert content != text.encode()
    file.write_bytes(content)
    if way == "JSONL" and written.startswith(("UTF-16", "UTF-32")):
        (skip,) = read(file)  # its lines cannot be found
        assert (skip.line, skip.reason, skip.detail[:3]) == (0, "not UTF-8", "utf")
        return
    assert read(file) == expected


@pytest.mark.parametrize("way", [way for way in READERS if way != "JSON"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one = 'naïve'\n".encode("latin-1"), "not UTF-8: byte 0xef in line 1; save it as UTF-8"),
        (b"\xef\xbb\xbfone = 1\r\n\xff", "not UTF-8: byte 0xff in line 2; save it as UTF-8"),
        (
            "one = 1\n".encode("utf-16-le"),
            "zero bytes, as binary files do, and UTF-16 without a byte-order mark; save it as",
        ),
        ("one".encode("utf-16")[:-1], "not UTF-16-LE: byte 0x65 in line 1; save it as UTF-8"),
    ],
    ids=["Latin-1", "damaged", "UTF-16 without mark", "UTF-16 cut"],
)
def test_what_is_not_text_is_named_with_a_remedy(
    way: str, content: bytes, message: str, tmp_path: Path
) -> None:
    name, _, read = READERS[way]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_record_of_any_line_may_begin_with_a_mark(tmp_path: Path) -> None:
    """Files with marks that were joined have marks inside."""
    line = '{"text": "one"}\r\n'.encode("utf-8-sig")
    (tmp_path / "a.jsonl").write_bytes(line * 2 + b"\xef\xbb\xbf\n")
    assert records(tmp_path / "a.jsonl", "jsonl") == [{"text": "one"}] * 2


@pytest.mark.parametrize("encoding", ["auto", "utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_the_mark_of_a_text_to_train_on_is_dropped_and_characters_stay(
    encoding: str, tmp_path: Path
) -> None:
    text = f"{NFC} {NFD}"
    with_mark = {"auto": "utf-8-sig", "utf-8": "utf-8-sig", "utf-16-le": "utf-16"}
    (tmp_path / "a.txt").write_bytes(text.encode(with_mark.get(encoding, encoding)))
    (found,) = RecordReader(FilePart(str(tmp_path / "a.txt"), "text", encoding=encoding))
    assert found.content == text  # type: ignore[union-attr]


def test_the_tokens_of_both_forms_of_a_word_are_those_of_their_own_bytes(tmp_path: Path) -> None:
    lines = (json.dumps({"text": word}) + "\n" for word in (NFC, NFD))
    (tmp_path / "a.jsonl").write_text("".join(lines))
    recipe = DataRecipe((str(tmp_path / "a.jsonl"),), vocab_size=257, holdout_every=0)
    dataset = make_dataset(tmp_path / "data", recipe, lambda text: None, 1)
    tokenizer = load_tokenizer(tmp_path / "data/tokenizer.json", "")
    tokens = dataset.split("train").tokens(0, 13).tolist()
    assert tokenizer.decode(tokens) == f"{NFC}{NFD}"
    assert len(tokens) == len(NFC.encode()) + len(NFD.encode()) + 2


def test_a_manifest_that_an_editor_has_given_a_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    recipe = DataRecipe((str(tmp_path / "a.txt"),), vocab_size=257, holdout_every=0)
    folder = make_dataset(tmp_path / "data", recipe, lambda text: None, 1).folder
    manifest = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_bytes(manifest.replace("\n", "\r\n").encode("utf-8-sig"))
    assert DataSet(folder).check() == []


def piped(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "input").write_bytes(content)
    with (tmp_path / "input").open(encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdin", file)
        return list(_lines_of_user())


def test_messages_on_standard_input_may_begin_with_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert piped("\ufeffhello\r\n\r\n\ufefftwo\n".encode(), tmp_path, monkeypatch) == [
        "hello",
        "\ufefftwo",
    ]
    with pytest.raises(UserError, match="standard input, after 0 lines: not UTF-8: give text"):
        piped("hello".encode("utf-16"), tmp_path, monkeypatch)


def test_the_text_of_a_pipe_is_read(tmp_path: Path) -> None:
    """`--prompts /dev/stdin` and `--prompts <(command)` name pipes."""
    ours, theirs = os.pipe()
    os.write(theirs, b"\xef\xbb\xbfone\r\ntwo\r\n")
    os.close(theirs)
    assert read_prompts(Path(f"/dev/fd/{ours}")) == ["one", "two"]
    os.close(ours)


OTHERWISE = {
    "cores.py": "files of the kernel; commands import the module before all others",
    "train/trackers.py": "an identifier that another library made",
    "version.py": "a commit that the build wrote; the module stands alone",
}


def other_ways(text: str) -> list[str]:
    """Return calls that read text and are not `read_text` of `lather.files`."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if (isinstance(call.func, ast.Attribute) and call.func.attr == "read_text")
        or ast.unparse(call.func) in ("json.load", "tomllib.load")
        or (ast.unparse(call.func).rpartition(".")[2] == "open" and reads_text(call))
    ]


def reads_text(call: ast.Call) -> bool:
    """Tell whether a call of `open` reads text. The mode is the first argument of a path's method,
    and the second of the function."""
    place = 0 if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) != "io.open" else 1
    modes = [
        *call.args[place : place + 1],
        *(one.value for one in call.keywords if one.arg == "mode"),
    ]
    return ast.unparse(call.func) not in ("os.open", "webbrowser.open") and not any(
        isinstance(mode, ast.Constant) and set(str(mode.value)) & set("bwax") for mode in modes
    )


def test_no_module_reads_text_in_another_way() -> None:
    files = {file.relative_to(SOURCE).as_posix(): file for file in SOURCE.rglob("*.py")}
    found = {name: other_ways(file.read_text("utf-8")) for name, file in files.items()}
    assert {name: calls for name, calls in found.items() if calls and name not in OTHERWISE} == {}


def test_the_readers_of_text_take_files_of_packages() -> None:
    assert read_text(SimpleNamespace(read_bytes=lambda: b"\xef\xbb\xbfa\r\nb\rc")) == "a\nb\nc"
