"""Makes the tables of the reference pages from the fields of rules, configuration, commands and
metrics, and from the strings under them.

    python docs/reference_tables.py            writes them between their markers
    python docs/reference_tables.py --check    writes nothing; exit code 1 if a page has others

The table of a rule lists the options that its base classes lack, and those whose default, range or
meaning differs from the tables of its base classes. To give a new rule a table, put its two markers
where it belongs:

    <!-- options of MyRule -->
    <!-- end of options -->

The other markers stand once each: `configuration`, a section for each section of TOML; `commands`,
a section for each command; `metrics`, a section for each kind of row of metrics.jsonl.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import tyro

from lather import cli
from lather.commands import bench
from lather.config.config import Config
from lather.config.optim import KINDS, KindConfig, OptimConfig
from lather.models.gpt_oss import GptOssConfig
from lather.models.rotary import YarnConfig
from lather.optim import Rule
from lather.optim.options import Option, documentation_of, options_of
from lather.optim.plain import saveable
from lather.optim.rules import RULES
from lather.optim.rules.bases import BasisRule
from lather.train.metrics import ExpertLoadRow, StepRow, ValidationRow

DOCS = Path(__file__).resolve().parent
sys.path.insert(
    0, str(DOCS.parent)
)  # so that the checkout's `benchmarks`, which is not installed, is found
PAGES = [
    DOCS / f"{name}.md" for name in ("optimizers-reference", "configuration", "commands", "metrics")
]
TABLE = re.compile(
    r"(<!-- (?:options of (\w+)|(configuration|commands|metrics)) -->\n)(.*?)(<!-- end of \w+ -->)",
    re.DOTALL,
)
CODE = re.compile(r"(`[^`]*`)")
WITH_TABLE: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (Rule, BasisRule, *RULES.values())
}
PLAIN = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    types.NoneType: "nothing",
}


# --- rules ----------------------------------------------------------------------------------------


def table(rule: type[Rule]) -> str:
    """Make the table of a rule, in Markdown."""
    bases = [base for base in rule.__mro__[1:] if base in WITH_TABLE.values()]
    rows = ["| option | default | range | what it does |", "|---|---|---|---|"]
    for name in options_of(rule):
        row = row_of(rule, name)
        if not any(row == row_of(base, name) for base in bases if name in options_of(base)):
            rows.append(row)
    return "\n".join(rows) + "\n"


def row_of(rule: type[Rule], name: str) -> str:
    option = options_of(rule)[name]
    cells = [
        f"`{name}`",
        default_of(option),
        option.range.words if option.range else "",
        documentation_of(rule).get(name, ""),
    ]
    return _row(cells)


def default_of(option: Option) -> str:
    if option.default is MISSING:
        return "required"
    value = saveable(option.default)
    is_power = isinstance(value, int) and value > 2**16 and not value & (value - 1)
    return f"`2**{value.bit_length() - 1}`" if is_power else f"`{value!r}`"


def escaped(text: str) -> str:
    """Escape what Markdown would read as its own, outside of code."""
    parts = CODE.split(text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*|<])", r"\\\1", part) for part in parts
    )


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


# --- fields of dataclasses ------------------------------------------------------------------------


def type_words(hint: Any) -> str:
    """Describe a type as the reader of a TOML file thinks of it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Annotated, NotRequired):
        return type_words(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_words(one) for one in arguments if one is not types.NoneType)
    if origin in (tuple, list):
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return f"section of {type_words(arguments[1])} by name"
    return "section" if is_dataclass(hint) else PLAIN[hint]


def default_words(value: Any) -> str:
    """Write a default as TOML has it, or nothing if the option is to be left out or is required.
    Code in a table cannot hold a |."""
    if value in (None, MISSING) or is_dataclass(value):
        return ""
    text = json.dumps(list(value) if isinstance(value, tuple) else value, default=str)
    return text if "|" in text else f"`{text}`"


def fields_table(cls: type) -> str:
    """Make the table of a configuration section's fields. Sections within it have tables of their
    own."""
    hints, texts = typing.get_type_hints(cls, include_extras=True), documentation_of(cls)
    rows = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for one in fields(cls):
        if one.name in texts:
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            rows.append(
                _row(
                    [
                        f"`{one.name}`",
                        type_words(hints[one.name]),
                        default_words(default),
                        texts[one.name],
                    ]
                )
            )
    return "\n".join(rows) + "\n"


def configuration() -> str:
    """Make a section of the page for each section of TOML."""
    parts = ["## Top of the file\n\n" + fields_table(Config)]
    for name, hint in typing.get_type_hints(Config).items():
        for cls in typing.get_args(hint) or (hint,):
            if not is_dataclass(cls):
                continue
            family = getattr(cls, "model_type", None)
            title = f"## [{name}] of {family}" if family else f"## [{name}]"
            parts.append(f"{title}\n\n{cls.__doc__}\n\n{fields_table(cls)}")
            if cls is GptOssConfig:  # the last of the families
                parts.append(
                    f"## [model.rope_scaling]\n\n{YarnConfig.__doc__}\n\n{fields_table(YarnConfig)}"
                )
            if cls is OptimConfig:
                kinds = "\n".join(f"- `[optim.{kind}]` {text}" for kind, text in KINDS.items())
                parts.append(f"### Kinds of parameters\n\n{kinds}\n\n{fields_table(KindConfig)}")
    return "\n" + "\n".join(parts) + "\n"


# --- commands -------------------------------------------------------------------------------------


A_CONFIG = [
    "`CONFIG`",
    "path",
    "",
    "The configuration, a TOML file; each of its fields is an option, too, such as `--train.steps "
    "100`.",
]
NPROC_WORDS = (
    "Number of ranks to start on this machine; gpu: one for each CUDA device. "
    "Not under torchrun or srun, which start the ranks."
)
NPROC = ["`--nproc`", "integer or `gpu`", "`1`", NPROC_WORDS]
HELP_WORDS = (
    "Show the fields that are changed most; `--help all`: all fields; `--help "
    "optim` (or another section): those of that section."
)
HELP = ["`--help [SECTION]`", "text", "", HELP_WORDS]
BESIDE_THE_DATACLASS = {
    "train": [NPROC, HELP],
    "doctor": [NPROC],
    "plan": [HELP],
    "profile": [HELP],
}
"""Rows of arguments that a command reads before its dataclass reads the others (`take_nproc`,
`take_help`)."""


def commands() -> str:
    """Make a section of the page for each command, from its module's docstring and the options of
    its dataclasses."""
    parts = []
    for name, module_name in cli.COMMANDS.items():
        module = importlib.import_module(f"lather.commands.{module_name}")
        own = list(_argument_classes(module))
        own = [cls for cls in own if cls.__name__.lower().startswith(name)] or own
        parts.append(f"## lather {name}\n")
        if not own:
            parts.append(" ".join(getattr(module, f"{name}_command").__doc__.split()) + "\n")
        if usage := getattr(module, "USAGE", None):
            parts.append(f"```text\n{usage.strip()}\n```\n")
        for cls in own:
            parts.append(" ".join((cls.__doc__ or "").split()) + "\n")
            parts.append(arguments_table(cls, BESIDE_THE_DATACLASS.get(name, [])))
        if name == "train":
            parts.append(arguments_table(None, [A_CONFIG, *BESIDE_THE_DATACLASS[name]]))
        if name == "bench":
            parts += benchmarks()
    return "\n" + "\n".join(parts) + "\n"


def _argument_classes(module: types.ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and is_dataclass(value)
            and value.__name__.endswith("Arguments")
            and value.__module__ == module.__name__
        ):
            yield value


def benchmarks() -> Iterator[str]:
    """Make a section for each benchmark, from its dataclass in the checkout."""
    for name in bench.BENCHMARKS:
        cls, _ = bench.find_benchmark(name)
        yield f"### lather bench {name}\n"
        yield " ".join((cls.__doc__ or "").split()) + "\n"
        yield arguments_table(cls)


def arguments_table(cls: type | None, more: Sequence[list[str]] = ()) -> str:
    """Make the table of a command's arguments: those of its dataclass and of dataclasses within it,
    and `more`."""
    rows = [
        "| argument | type | default | what it is |",
        "|---|---|---|---|",
        *(_argument_rows(cls) if cls else ()),
        *map(_row, more),
    ]
    return "\n".join(rows) + "\n"


def _argument_rows(cls: type) -> Iterator[str]:
    hints, texts = typing.get_type_hints(cls, include_extras=True), documentation_of(cls)
    for one in fields(cls):
        hint = hints[one.name]
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        if inner is Config:
            yield _row(A_CONFIG)
        elif is_dataclass(inner):
            yield from _argument_rows(inner)
        else:
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            shown = (
                "number of cores"
                if one.name == "workers" and default == os.cpu_count()
                else default_words(default)
            )
            yield _row(
                [f"`{_argument(one.name, hint)}`", type_words(hint), shown, texts.get(one.name, "")]
            )


def _argument(name: str, hint: Any) -> str:
    """Write an argument as it is typed: `--an-option`, or the word that stands for a positional
    one."""
    details = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    metavar = next((one.metavar for one in details if getattr(one, "metavar", None)), None)
    return (
        (metavar or name.upper())
        if tyro.conf.Positional in details
        else f"--{name.replace('_', '-')}"
    )


# --- metrics --------------------------------------------------------------------------------------


ROWS = {"Training steps": StepRow, "Validations": ValidationRow, "Loads of experts": ExpertLoadRow}


def metrics() -> str:
    """Make a section for each kind of row."""
    return (
        "\n"
        + "\n".join(
            f"## {title}\n\n{cls.__doc__}\n\n{keys_table(cls)}" for title, cls in ROWS.items()
        )
        + "\n"
    )


def keys_table(cls: type) -> str:
    texts, hints = documentation_of(cls), typing.get_type_hints(cls, include_extras=True)
    rows = ["| key | type | what it is |", "|---|---|---|"]
    return (
        "\n".join(
            [
                *rows,
                *(_row([f"`{key}`", type_words(hint), texts[key]]) for key, hint in hints.items()),
            ]
        )
        + "\n"
    )


# --- pages ----------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "commands": commands,
    "metrics": metrics,
}


def rewritten(page: str) -> str:
    """Return the page with new tables."""
    return TABLE.sub(
        lambda found: (
            found[1] + (table(WITH_TABLE[found[2]]) if found[2] else WHOLE[found[3]]()) + found[5]
        ),
        page,
    )


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for page in PAGES:
        before = page.read_text()
        after = rewritten(before)
        if not arguments:
            page.write_text(after)
        elif after != before:
            print(
                f"{page}: the tables are not those of the code; run python "
                "docs/reference_tables.py",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
