"""Files of prompts: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lather.errors import DataError
from lather.generation.prompts import read_prompts


def test_lines_of_text_and_of_json(tmp_path: Path) -> None:
    texts, objects = tmp_path / "some.txt", tmp_path / "some.jsonl"
    texts.write_text("one\n\ntwo {\n")
    messages = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "one", "id": 3},
        {"messages": messages},
        {"conversations": [{"from": "human", "value": "hi"}]},
    ]
    objects.write_text("\n".join(map(json.dumps, rows)))
    assert read_prompts(texts) == ["one", "two {"]
    assert read_prompts(objects) == ["one", messages, messages]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_joined_files_may_have_a_byte_order_mark_each(tmp_path: Path, name: str) -> None:
    lines = ["one", "two"] if name == "a.txt" else ['{"prompt": "one"}', '{"prompt": "two"}']
    (tmp_path / name).write_text("".join(f"\ufeff{line}\n" for line in lines), "utf-8")
    assert read_prompts(tmp_path / name) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n \n", "it holds no prompt"),
        ("a.jsonl", '{"prompt": "x"}\n{', "line 2: not JSON"),
        ("a.jsonl", '\n{"text": "x"}', "line 2: neither messages nor prompt"),
        ("a.jsonl", '"x"', "line 1: neither"),
        ("a.jsonl", '{"messages": []}', "line 1: messages is not a list of messages"),
        ("a.txt", b"\xff", "not UTF-8: byte 0xff in line 1; save it as UTF-8"),
        ("a.txt", b"\xff\xfe", "it holds no prompt"),
        ("absent", None, "cannot be read"),
    ],
)
def test_files_without_prompts_are_refused_with_the_line(
    tmp_path: Path, name: str, content: str | bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=words) as raised:
        read_prompts(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)
