"""The option tables of docs/optimizers-reference.md, made from the fields of the rules.

    python docs/option_tables.py            writes them between their markers
    python docs/option_tables.py --check    writes nothing; exit code 1 if the page has others

A table lists the options that a rule has of its own, and those that differ, in default, range or meaning, from what the tables of its base
classes say. To give a new rule a table, put its two markers where it belongs:

    <!-- options of MyRule -->
    <!-- end of options -->
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path

from lather.optim import Rule
from lather.optim.options import Option, documentation_of, options_of, saveable
from lather.optim.rules import RULES
from lather.optim.rules.bases import BasisRule

PAGE = Path(__file__).parent / "optimizers-reference.md"
TABLE = re.compile(r"(<!-- options of (\w+) -->\n)(.*?)(<!-- end of options -->)", re.DOTALL)
CODE = re.compile(r"(`[^`]*`)")
WITH_TABLE: dict[str, type[Rule]] = {rule.__name__: rule for rule in (Rule, BasisRule, *RULES.values())}


def table(rule: type[Rule]) -> str:
    """The table of a rule, in Markdown."""
    bases = [base for base in rule.__mro__[1:] if base in WITH_TABLE.values()]
    rows = ["| option | default | range | what it does |", "|---|---|---|---|"]
    for name in options_of(rule):
        row = row_of(rule, name)
        if not any(row == row_of(base, name) for base in bases if name in options_of(base)):
            rows.append(row)
    return "\n".join(rows) + "\n"


def row_of(rule: type[Rule], name: str) -> str:
    option = options_of(rule)[name]
    cells = [f"`{name}`", default_of(option), option.range.words if option.range else "", documentation_of(rule).get(name, "")]
    return "| " + " | ".join(map(escaped, cells)) + " |"


def default_of(option: Option) -> str:
    if option.default is MISSING:
        return "required"
    value = saveable(option.default)
    is_power = isinstance(value, int) and value > 2**16 and not value & (value - 1)
    return f"`2**{value.bit_length() - 1}`" if is_power else f"`{value!r}`"


def escaped(text: str) -> str:
    """With nothing outside of code that Markdown would read as its own."""
    parts = CODE.split(text)
    return "".join(part if part.startswith("`") else re.sub(r"([*|<])", r"\\\1", part) for part in parts)


def rewritten(page: str, make: Callable[[type[Rule]], str] = table) -> str:
    """The page with new tables."""
    return TABLE.sub(lambda found: found[1] + make(WITH_TABLE[found[2]]) + found[4], page)


def main(arguments: list[str]) -> int:
    before = PAGE.read_text()
    after = rewritten(before)
    if arguments == ["--check"]:
        if after != before:
            print(f"{PAGE}: the tables are not those of the rules; run python docs/option_tables.py", file=sys.stderr)
        return int(after != before)
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
