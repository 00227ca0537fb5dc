"""Makes the lists of the reference pages from the fields of configuration, commands and metrics,
and from the strings under them.

    python docs/reference_tables.py            writes them between their markers
    python docs/reference_tables.py --check    writes nothing; exit code 1 if a page has others

A page has its lists between two markers: `configuration`, a section for each section of TOML;
`commands`, a section for each command; `metrics`, a section for each kind of row of metrics.jsonl.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, is_dataclass
from pathlib import Path
from typing import Any, Literal

from lather import cli
from lather.commands.options import options_of_command
from lather.config.config import Config
from lather.config.fields import Field, fields_of
from lather.config.kind_config import KINDS, KindConfig
from lather.config.optim import OptimConfig
from lather.models.rotary import YarnConfig
from lather.optim.options import documentation_of
from lather.train.metrics import (
    AttentionLogitsRow,
    ExpertLoadRow,
    StepRow,
    SuspectRow,
    ValidationRow,
)

DOCS = Path(__file__).resolve().parent
PAGES = [DOCS / f"{name}.md" for name in ("configuration", "commands", "metrics")]
TABLE = re.compile(
    r"(<!-- (configuration|commands|metrics) -->\n)(.*?)(<!-- end of \w+ -->)", re.DOTALL
)
CODE = re.compile(r"(`[^`]*`)")
PLAIN = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
    types.NoneType: "nothing",
}


def escaped(text: str) -> str:
    """Escape what Markdown would read as its own, outside of code."""
    parts = CODE.split(text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts
    )


def item(name: str, value: str, text: str) -> str:
    """Make the line of a list that describes a field or a key; without a value if that is
    empty."""
    return f"- `{name}`" + (f" ({value}): " if value else ": ") + escaped(text)


def words_of(thing: object) -> str:
    """Return the docstring of a class or function in one line."""
    return " ".join((thing.__doc__ or "").split())


# --- fields of dataclasses ------------------------------------------------------------------------


def type_words(hint: Any) -> str:
    """Describe a type as the reader of a TOML file thinks of it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_words(part) for part in arguments if part is not types.NoneType)
    if origin is tuple:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return f"section of {type_words(arguments[1])} by name"
    return "section" if is_dataclass(hint) else PLAIN[hint]


def value_words(field: Field) -> str:
    """Describe a value: its default, or its type if it has none; of several choices all, with the
    default first."""
    if typing.get_origin(field.hint) is Literal:
        choices = sorted(typing.get_args(field.hint), key=lambda choice: choice != field.default)
        return ", ".join(f"`{json.dumps(choice)}`" for choice in choices)
    if field.default in (None, MISSING):
        return type_words(field.hint)
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(default)}`"


def field_items(cls: type) -> list[str]:
    """Describe the fields of a configuration section. Sections within it have lists of their
    own."""
    texts = documentation_of(cls)
    return [
        item(name, value_words(field), texts[name])
        for name, field in fields_of(cls).items()
        if name in texts
    ]


def configuration() -> str:
    """Make a section of the page for each section of TOML. What several families of models have in
    common stands once, with their names unless all have it."""
    parts = ["## Top of the file", *field_items(Config)]
    for name, field in fields_of(Config).items():
        classes = [OptimConfig] if name == "optim" else field.sections
        items = {cls: field_items(cls) for cls in classes}
        shared: dict[str, str] = {}
        for line in itertools.chain(*items.values()):
            having = [cls for cls, lines in items.items() if line in lines]
            if len(having) > 1:
                names = ", ".join(cls.model_type for cls in having)
                shared[line] = line if len(having) == len(classes) else f"{line} ({names})"
        if shared:
            parts += [f"## [{name}] of several families", *shared.values()]
        for cls in classes:
            family = getattr(cls, "model_type", None)
            parts.append(
                f"## [{name}] of {family}" if family else f"## [{name}]\n\n{words_of(cls)}"
            )
            parts += [line for line in items[cls] if line not in shared]
            if cls is OptimConfig:
                parts.append("### Kinds of parameters")
                parts += [f"- `[optim.{kind}]` {text}" for kind, text in KINDS.items()]
                parts.append("Each of these sections has:")
                parts += field_items(KindConfig)
        if shared:
            scalings = {scaling: cls for cls in classes for scaling in scalings_of(cls)}
            for scaling, cls in scalings.items():
                of_family = "" if scaling is YarnConfig else f" of {cls.model_type}"
                parts.append(f"## [model.rope_scaling]{of_family}\n\n{words_of(scaling)}")
                parts += field_items(scaling)
    return paragraphs(parts)


def scalings_of(family: type) -> tuple[type, ...]:
    """Return the classes of a family's rotary scaling."""
    return fields_of(family)["rope_scaling"].sections


def paragraphs(parts: Sequence[str]) -> str:
    """Join headings, paragraphs and items of lists; an empty line comes between two of them that
    are not items of one list."""
    text = ""
    for before, part in itertools.pairwise(["", *parts]):
        text += (
            ("\n" if not (before.startswith("- ") and part.startswith("- ")) else "") + part + "\n"
        )
    return text + "\n"


# --- commands -------------------------------------------------------------------------------------


BESIDE_THE_DATACLASS = {
    "train": ["CONFIG", "--nproc"],
    "doctor": ["--nproc"],
}
"""Arguments that a command reads before its dataclass reads the others (`take_nproc`)."""


def commands() -> str:
    """Make a section of the page for each command, from its module's docstring and the arguments of
    its dataclasses."""
    parts = []
    for name, module_name in cli.COMMANDS.items():
        module = importlib.import_module(f"lather.commands.{module_name}")
        classes = list(_argument_classes(module))
        classes = [cls for cls in classes if cls.__name__.lower().startswith(name)] or classes
        parts.append(f"## lather {name}")
        if not classes:
            parts.append(words_of(getattr(module, f"{name}_command")))
        if usage := getattr(module, "USAGE", None):
            parts.append(f"```text\n{usage.strip()}\n```")
        more = BESIDE_THE_DATACLASS.get(name, [])
        for cls in classes:
            parts += [words_of(cls), listed([*_arguments(cls), *more])]
        if not classes and more:
            parts.append(listed(more))
    return paragraphs(parts)


def listed(arguments: Sequence[str]) -> str:
    return f"Arguments: {', '.join(f'`{argument}`' for argument in arguments)}."


def _argument_classes(module: types.ModuleType) -> Iterator[type]:
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and is_dataclass(value)
            and value.__name__.endswith("Arguments")
            and value.__module__ == module.__name__
        ):
            yield value


def _arguments(cls: type) -> Iterator[str]:
    """Yield the arguments of a command as they are typed: `--an-option`, or the word that stands
    for an argument that has no name."""
    has_config = any(field.hint is Config for field in fields_of(cls).values())
    if has_config:
        yield "CONFIG"
    for option in options_of_command(cls):
        if option.section is cls or not has_config:
            yield next(iter(option.flags), option.metavar)


# --- metrics --------------------------------------------------------------------------------------


ROWS = {
    "Training steps": StepRow,
    "Validations": ValidationRow,
    "Loads of experts": ExpertLoadRow,
    "Logits of attention heads": AttentionLogitsRow,
    "Suspect steps": SuspectRow,
}


def metrics() -> str:
    """Make a section for each kind of row."""
    parts = []
    for title, cls in ROWS.items():
        texts = documentation_of(cls)
        parts += [f"## {title}", words_of(cls)]
        parts += [item(key, "", texts[key]) for key in typing.get_type_hints(cls)]
    return paragraphs(parts)


# --- pages ----------------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[], str]] = {
    "configuration": configuration,
    "commands": commands,
    "metrics": metrics,
}


def rewritten(page: str) -> str:
    """Return the page with new lists."""
    return TABLE.sub(lambda match: match[1] + WHOLE[match[2]]() + match[4], page)


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
                f"{page}: its lists are not those of the code; run python docs/reference_tables.py",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
