"""Looks for what the house rules out and no linter knows: imports against the order of rooms, class names used twice, and docstrings that
begin with "Of" or "What" in place of a noun.

    python .ci/house.py        prints each finding; exit status 1 if there is one
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lather"
ROOMS = (
    "cli",
    "commands",
    "evaluation",
    "train",
    "generation",
    "planning",
    "checkpoint",
    "engine",
    "memory",
    "pipeline",
    "parallel",
    "config",
    "data",
    "models",
    "optim",
    "kernels",
)
"""From the top down: a room imports from rooms below it. Modules that are named nowhere here serve all of them."""
NO_NOUNS = ("Of", "What")


def main() -> int:
    trees = {path: ast.parse(path.read_text("utf-8")) for folder in (PACKAGE, ROOT / "benchmarks") for path in sorted(folder.rglob("*.py"))}
    found = [*arrows_back(trees), *doubled_classes(trees), *docstrings_without_subject(trees)]
    for line in found:
        print(line)
    return 1 if found else 0


def arrows_back(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Imports of a room from one above it."""
    for path, tree in trees.items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py") if path.is_relative_to(PACKAGE) else ""
        for node in ast.walk(tree):
            for name in imported(node):
                package, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package == "lather" and {room, other} <= set(ROOMS) and ROOMS.index(other) < ROOMS.index(room):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {room} imports {name}, a room above it"


def imported(node: ast.AST) -> list[str]:
    """Names of the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def doubled_classes(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Classes of one name, but for a leading underscore."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    for name, several in places.items():
        if len(several) > 1:
            yield f"{several[0]}: class {name} is also defined at {', '.join(several[1:])}"


def docstrings_without_subject(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Docstrings, those of fields and constants included, whose first word stands for a noun that is missing."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
                continue
            words = node.value.value.split(maxsplit=1)
            if words and words[0] in NO_NOUNS:
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f'{place}: a docstring that begins with "{words[0]}": begin with a verb or the thing itself'


if __name__ == "__main__":
    sys.exit(main())
