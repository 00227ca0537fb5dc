"""docs/troubleshooting.md quotes messages as they are printed: commands provoke some, and the
source has the words of the others."""

import ast
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
    """The source has the words of each message of Lather that no command provokes."""
    page = PROVOKED.sub("", PAGE.read_text()).partition("## From torch")[0]
    blocks = re.findall(r"^```text\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    messages = [" ".join(block.split()) for block in blocks]
    messages = [message for message in messages if not re.match(r"\w[\w.]*Error: ", message)]
    patterns = [
        pattern
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (pattern := pattern_of(node)) is not None
    ]
    assert len(messages) >= 9
    for message in messages:
        assert any(pattern.search(message) for pattern in patterns), message


def pattern_of(node: ast.AST) -> re.Pattern[str] | None:
    """Return a pattern for a string of the source that may be a message: its words, with anything
    in place of a value."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
    texts = [word for word in words if isinstance(word, str)]
    if sum(map(len, texts)) < LEAST:
        return None
    pattern = ".*".join(re.escape(word) if isinstance(word, str) else "" for word in words)
    return re.compile(f"(^|[ :]){pattern}$")


def test_every_message_has_a_remedy() -> None:
    """A paragraph follows each block, which is closed by a bare fence."""
    parts = re.split(r"^```", PAGE.read_text(), flags=re.MULTILINE)
    for block, text in itertools.zip_longest(parts[1::2], parts[2::2], fillvalue=""):
        assert block.startswith("text\n"), block
        assert re.match(r"\n\n(?!#|<!--|\s)", text), block
