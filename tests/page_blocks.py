"""Reads the fenced blocks of the pages and checks that each is right.

Every block names its language. `python` is executed, `toml` is read as a configuration, `json` is
parsed. Every `bash` command is read by the parser that reads it when a user types it: options of
`lather` by Lather's own, of torchrun by torch's; files, make targets and extras have to exist.
`text` is output and formulas, and may not begin a line with a command. Any other language is an
error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.run import get_args_parser

from lather import cli
from lather.commands import parsing, train, with_config
from lather.config.config import check_parallel
from lather.config.fields import build
from lather.config.toml_file import config_from_mapping

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^([ ]*)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
COMMANDS = ("lather", "python", "python3", "make", "torchrun", "srun", "sbatch", "pip", "pytest")
HARMLESS = (
    "cd",
    "mkdir",
    "ls",
    "cat",
    "head",
    "tail",
    "echo",
    "cp",
    "ln",
    "rm",
    "source",
    ".",
    "set",
    "git",
    "ulimit",
    "module",
    "scontrol",
    "tensorboard",
)
KEYWORDS = ("do", "then", "else")
ENVIRONMENT = ("HOME", "USER", "PWD", "HOSTNAME")


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
    text = page.read_text()
    found = []
    for match in FENCED.finditer(text):
        lines = [line.removeprefix(match[1]) for line in match[3].splitlines()]
        language, _, rest = match[2].partition(" ")
        title = re.fullmatch(r'title="([^"]+)"', rest)
        assert bool(rest) == bool(title), f"{page.name}: ```{match[2]}"
        line = text[: match.start()].count("\n") + 1
        found.append(Block(language, "\n".join(lines) + "\n", line, title[1] if title else ""))
    return found


def check_block(
    block: Block, names: dict[str, Any], execute: Callable[[list[str]], None] = lambda _: None
) -> None:
    """Raise an exception if a block is not right. Python blocks of a page share `names`; `execute`
    gets every command of Lather that was parsed, without the name of the program. A block that
    shows a file is not executed, because the file has tests."""
    if block.file:
        assert block.text in (ROOT / block.file).read_text(), (
            f"{block.file} does not have these lines"
        )
        return
    match block.language:
        case "python":
            exec(compile(block.text, f"<block of line {block.line}>", "exec"), names)
        case "toml":
            config_from_mapping(tomllib.loads(block.text))
        case "json":
            for line in block.text.splitlines():
                json.loads(line)
        case "bash":
            for command in commands_of(block.text):
                check_command(command, execute)
        case "text":
            for line in block.text.splitlines():
                assert line.split(" ")[0] not in COMMANDS, (
                    f"{line!r} is a command in a block of text: make it a block of bash"
                )
        case _:
            raise AssertionError(
                f"{block.language!r} is no language that blocks of the pages may have: python, "
                "toml, json, bash or text"
            )


# --- shell ----------------------------------------------------------------------------------------


def commands_of(script: str) -> Iterator[list[str]]:
    """Yield the words of every simple command of a script, variables replaced. Here-documents are
    left out."""
    values = _slurm_values(script)
    script = re.sub(
        r"<<-?\s*'?\"?(\w+)'?\"?(.*?)\n.*?^\1$", r"\2", script, flags=re.DOTALL | re.MULTILINE
    ).replace("\\\n", " ")
    for line in script.splitlines():
        uncommented = re.sub(r"(^|\s)#(\s|!|SBATCH).*$", "", line)
        lexer = shlex.shlex(
            re.sub(r"\$\([^()]*\)", "substituted", uncommented), posix=True, punctuation_chars=True
        )
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()"):
                yield from _simple(words, values)
                words = []
            else:
                words.append(word)


def _simple(words: list[str], values: dict[str, str]) -> Iterator[list[str]]:
    words = [
        re.sub(r"\$\{?(\w+)\}?", lambda match: _value(match[1], values), word) for word in words
    ]
    while words and words[0] in KEYWORDS:
        words = words[1:]
    for position, word in enumerate(words):
        if set(word) <= set("<>"):
            words = words[:position]
            break
    if words and words[0] == "export":
        words = words[1:]
    while words and (assigned := re.fullmatch(r"(\w+)=(.*)", words[0])):
        values[assigned[1]] = assigned[2]
        words = words[1:]
    if words and words[0] == "for":
        values[words[1]] = words[3]
    elif words and words[0] not in ("done", "fi", "if"):
        yield words


def _slurm_values(script: str) -> dict[str, str]:
    """Return the variables that SLURM sets for a batch script with these options."""
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)[= ](\S+)", script, re.MULTILINE))
    nodes, tasks = asked.get("nodes", "1"), asked.get("ntasks-per-node", "1")
    return {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": asked.get("ntasks", str(int(nodes) * int(tasks))),
    }


def _value(name: str, values: dict[str, str]) -> str:
    known = name in values or name in ENVIRONMENT or name.startswith("SLURM_")
    assert known, f"${name} is set nowhere in the block"
    return values.get(name, "1")


def check_command(
    words: list[str], execute: Callable[[list[str]], None], ranks: int | None = None
) -> None:
    """Check a command; a launcher before it starts `ranks` processes."""
    program, *arguments = words
    match program:
        case "lather":
            check_lather(arguments, ranks)
            execute(arguments)
        case "python" | "python3" | ".venv/bin/python":
            check_python(arguments, ranks)
        case "pytest":
            check_python(["-m", "pytest", *arguments], ranks)
        case "torchrun":
            parsed = get_args_parser().parse_args(arguments)
            nodes = int(str(parsed.nnodes).partition(":")[2] or str(parsed.nnodes))
            script = ["-m"] * parsed.module + [parsed.training_script, *parsed.training_script_args]
            check_python(script, nodes * int(parsed.nproc_per_node))
        case "srun":
            first = next(
                position
                for position, word in enumerate(arguments)
                if word in COMMANDS or word == "bash"
            )
            tasks = re.search(r"--ntasks[= ](\d+)", " ".join(arguments[:first]))
            if arguments[first] != "bash":
                check_command(arguments[first:], execute, int(tasks[1]) if tasks else ranks)
        case "make":
            check_make(arguments)
        case "pip":
            check_pip(arguments)
        case _:
            assert program in HARMLESS or program in ("sbatch", "ssh"), (
                f"{program!r} is no command that blocks of the pages may have"
            )


class Parsed(Exception):  # noqa: N818 - not an error: the command's arguments are right
    """Raised in place of carrying a command out."""


def check_lather(arguments: list[str], ranks: int | None = None) -> None:
    """Let the command read its arguments; nothing else is done."""
    if arguments and arguments[0] == "train":
        config, nproc = train._read(arguments[1:])
        if not isinstance(nproc, str):
            check_parallel(config, ranks or nproc or 1)
        return

    def build_only(*given: Any) -> None:
        raise Parsed(build(*given))

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Parsed))
        for module in (parsing, with_config):
            stack.enter_context(mock.patch.object(module, "build", build_only))
        status = cli._dispatch(arguments)
        assert status == 0, f"lather {' '.join(arguments)} did not read its arguments"


def check_python(arguments: list[str], ranks: int | None = None) -> None:
    if arguments[0] == "-m" and arguments[1] == "lather":
        check_lather(arguments[2:], ranks)
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]), f"no module {arguments[1]}"
        for path in arguments[2:] if arguments[1] == "pytest" else []:
            assert path.startswith("-") or (ROOT / path.partition("::")[0]).exists(), path
    elif arguments[0] != "-c":
        assert Path(arguments[0]).exists() or (ROOT / arguments[0]).exists(), (
            f"no file {arguments[0]}"
        )


def check_make(arguments: list[str]) -> None:
    """Check that targets exist, variables are the Makefile's, and options for `lather train` are
    its own."""
    makefile = (ROOT / "Makefile").read_text()
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    for variable in given:
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), (
            f"the Makefile has no variable {variable}"
        )
    for target in (word for word in arguments if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), (
            f"the Makefile has no target {target}"
        )
        if target == "train":
            check_lather(
                [
                    "train",
                    given.get("CONFIG", "configs/quickstart.toml"),
                    *shlex.split(given.get("ARGS", "")),
                ]
            )


def check_pip(arguments: list[str]) -> None:
    """Check that the extras are Lather's, and that files of constraints exist."""
    assert arguments[0] in ("install", "wheel"), arguments[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in arguments:
        if found := re.fullmatch(r"(?:lather|\.)\[(.+)\]", word):
            assert set(found[1].split(",")) <= set(extras), word
    for option, file in itertools.pairwise(arguments):
        assert option not in ("-c", "-r") or (ROOT / file).exists(), file
