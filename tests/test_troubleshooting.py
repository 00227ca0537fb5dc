"""docs/troubleshooting.md quotes messages as they are printed: commands provoke some, and the
source has the words of the others."""

import ast
import functools
import itertools
import re
from pathlib import Path

import pytest
import torch

import error_messages
from error_messages import PAGE, PROVOKED

SOURCE = Path(error_messages.REPOSITORY) / "src/lather"
LEAST = 20
"""Letters that a message has to share with the source, so that a pattern of nothing but values
matches nothing."""


def test_messages_that_a_command_provokes_are_those_of_the_page() -> None:
    page = PAGE.read_text()
    changed = error_messages.rewritten(page)
    if torch.cuda.is_available():  # a message says that there is no CUDA device
        pytest.skip("there is a CUDA device")
    assert changed.splitlines() == page.splitlines(), "run python docs/error_messages.py"


def test_the_words_of_all_other_messages_are_in_the_code() -> None:
    patterns = patterns_of_the_source()
    others = others_of(PAGE.read_text())
    assert len(others) >= 15
    for message in others:
        assert any(pattern.search(message) for pattern in patterns), message


def test_every_message_has_a_remedy() -> None:
    """A paragraph follows each block, which is closed by a bare fence."""
    parts = re.split(r"^```", PAGE.read_text(), flags=re.MULTILINE)
    for block, text in itertools.zip_longest(parts[1::2], parts[2::2], fillvalue=""):
        assert block.startswith("text\n"), block
        assert re.match(r"\n\n(?!#|<!--|\s)", text), block


def others_of(page: str) -> list[str]:
    """Return the messages of Lather that the page quotes without a command, each on one line."""
    own = PROVOKED.sub("", page).partition("## From torch")[0]
    blocks = [
        " ".join(block.split())
        for block in re.findall(r"^```text\n(.*?)\n```$", own, re.DOTALL | re.MULTILINE)
    ]
    return [block for block in blocks if not re.match(r"\w[\w.]*Error: ", block)]


@functools.cache
def patterns_of_the_source() -> list[re.Pattern[str]]:
    """Return a pattern for every string of the package that may be a message: its words, with
    anything in place of a value."""
    found = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(part.value) if isinstance(part, ast.Constant) else None
                    for part in node.values
                ]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node.value]
            else:
                continue
            if sum(len(part) for part in parts if part) >= LEAST:
                found.append(
                    re.compile(
                        "(^|[ :])"
                        + ".*".join("" if part is None else re.escape(part) for part in parts)
                        + "$"
                    )
                )
    return found
