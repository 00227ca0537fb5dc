"""Reads the fenced blocks of the pages and checks that each is right.

Every block names its language. `python` is executed, `toml` is read as a configuration, `json` is
parsed, and every command of Lather in `bash` is read by the parser that reads it when a user types
it. `text` is output and formulas.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from lather import cli
from lather.commands import parsing, train, with_config
from lather.config.fields import build
from lather.config.toml_file import config_from_mapping

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^([ ]*)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:^|[ (=])lather (.*?)(?=$|\)|;|\s[#|&>])", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int = 0
    """The line of the page in which it begins."""
    file: str = ""
    """The file that the block is a part of, if it names one: ```python title="examples/one.py"."""


def blocks_of(page: Path) -> list[Block]:
    text, blocks = page.read_text(), []
    for match in FENCED.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        language, _, rest = match[2].partition(" ")
        line = text[: match.start()].count("\n") + 1
        file = rest.removeprefix('title="').removesuffix('"')
        blocks.append(Block(language, "\n".join(lines) + "\n", line, file))
    return blocks


def check_block(
    block: Block, names: dict[str, Any], execute: Callable[[list[str]], None] = lambda _: None
) -> None:
    """Raise an exception if a block is not right. Python blocks of a page share `names`; `execute`
    gets every command of Lather that was parsed, without the name of the program. A block that
    shows a file is not executed, because the file has tests."""
    if block.file:
        assert block.text in (ROOT / block.file).read_text(), f"{block.file} has other lines"
    elif block.language == "python":
        exec(compile(block.text, f"<block of line {block.line}>", "exec"), names)
    elif block.language == "toml":
        config_from_mapping(tomllib.loads(block.text))
    elif block.language == "json":
        for line in block.text.splitlines():
            json.loads(line)
    elif block.language == "bash":
        for arguments in commands_of(block.text):
            check_lather(arguments)
            execute(arguments)
    else:
        assert block.language == "text", f"{block.language!r} is no language of a block"


def commands_of(script: str) -> Iterator[list[str]]:
    """Yield the arguments of every command of Lather in a script, with 1 for each variable."""
    for command in COMMAND.findall(script.replace("\\\n", " ")):
        yield shlex.split(re.sub(r"\$\{?\w+\}?", "1", command))


class Parsed(Exception):  # noqa: N818 - not an error: the command's arguments are right
    """Raised in place of carrying a command out."""


def check_lather(arguments: list[str]) -> None:
    """Let the command read its arguments; nothing else is done."""
    if arguments[:1] == ["train"]:
        train.read_arguments(arguments[1:])
        return

    def build_only(*values: Any) -> None:
        raise Parsed(build(*values))

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Parsed))
        for module in (parsing, with_config):
            stack.enter_context(mock.patch.object(module, "build", build_only))
        assert cli._dispatch(arguments, 0.0) == 0, f"lather {' '.join(arguments)}"
