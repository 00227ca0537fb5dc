"""Looks for what the house rules out and no linter knows: imports against the order of rooms,
imports of another room's inner modules, circles of imports among files, folders and modules that
are no room, class names used twice, and docstrings whose first word stands for a noun that is
missing. Says how many lines of code the package has.

Class names are checked in the package and in `benchmarks/`, docstrings there and in `tests/`,
`.ci/`, `docs/` and `examples/`.

    python .ci/house.py        prints each finding; exit status 1 if there is one
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "__main__",
    "cli",
    "commands",
    "doctor",
    "sweep",
    "evaluation",
    "train",
    "generation",
    "memory",
    "time_model",
    "standin",
    "checkpoint",
    "engine",
    "pipeline",
    "parallel",
    "config",
    "data",
    "models",
    "optim",
    "kernels",
)
"""Rooms of the package, folders and modules, from the top down: each imports from those below
it."""
FOR_ALL = (
    *(
        "__init__",
        "allocator",
        "argument",
        "boxes",
        "console",
        "cores",
        "device",
        "durations",
        "errors",
        "files",
        "formats",
        "hub",
        "lines",
        "memory_limits",
        "output",
        "page",
        "processes",
        "profiled",
    ),
    *("safetensors_file", "shapes", "storages", "torch_private", "version"),
)
"""Modules that serve all rooms and import none."""
DOORS = {
    "lather.kernels.rms_norm.reference",
    "lather.models.hf.hub_model",
    "lather.models.hf.model_export",
    "lather.models.hf.model_folder",
    "lather.models.hf.peft_folder",
    "lather.models.saving.embedding_gradient",
    "lather.models.saving.recomputed",
    "lather.models.saving.rounded_weights",
    "lather.models.saving.weight_gradients",
    "lather.optim.batched.formats",
    "lather.optim.batched.gradients",
    "lather.optim.batched.known_keys",
    "lather.optim.batched.pinned",
    "lather.optim.batched.remainders",
    "lather.parallel.launch.lifeline",
    "lather.parallel.launch.requests",
    "lather.parallel.launch.start",
    "lather.parallel.launch.world",
}
"""Modules that other rooms import although they are in a folder inside of their room. The other
modules of such folders belong to their room alone."""
READ = ("benchmarks", "tests", ".ci", "docs", "examples")
"""Folders outside of the package whose docstrings are read."""
NO_NOUNS = ("Of", "What", "Whose", "That", "Those", "These", "Its", "Their", "Such", "So")
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def main() -> int:
    found = list(findings(ROOT))
    for line in found:
        print(line)
    modules = (ROOT / "src" / "lather").rglob("*.py")
    num_lines = sum(code_lines(path.read_text("utf-8")) for path in modules)
    print(f"{num_lines:,} lines of code in the package")
    return 1 if found else 0


def findings(root: Path) -> Iterator[str]:
    """Yield a line for everything that is wrong in a checkout."""
    package = trees_in(root, "src/lather")
    yield from unknown_rooms(package)
    yield from arrows_back(package)
    yield from inner_modules(package)
    yield from circles(package)
    yield from doubled_classes(package | trees_in(root, "benchmarks"))
    yield from docstrings_without_subject(package | trees_in(root, *READ))


def trees_in(root: Path, *folders: str) -> dict[Path, ast.Module]:
    """Parse the Python files of folders of a checkout; returns their syntax trees by path."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return {path.relative_to(root): ast.parse(path.read_text("utf-8")) for path in paths}


def room_of(path: Path) -> str:
    """The room of a file of the package: the folder of `src/lather` that it is in, or the module
    that it is."""
    return path.parts[2].removesuffix(".py")


def unknown_rooms(trees: dict[Path, ast.Module]) -> Iterator[str]:
    for room in sorted({room_of(path) for path in trees} - {*ROOMS, *FOR_ALL}):
        yield (
            f"src/lather/{room}: no room of the house: add it to ROOMS or FOR_ALL of "
            ".ci/house.py, to CONTRIBUTING.md and docs/design.md"
        )


def arrows_back(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find imports of a room from one above it, and imports of any room in a module that serves
    all."""
    for path, tree in trees.items():
        room = room_of(path)
        for node in ast.walk(tree):
            for name in imported(node):
                package, _, rest = name.partition(".")
                other = rest.partition(".")[0]
                if package != "lather" or other not in ROOMS:
                    continue
                if room in FOR_ALL or (room in ROOMS and ROOMS.index(other) < ROOMS.index(room)):
                    yield f"{path}:{node.lineno}: {room} imports {name}, a room above it"


def inner_modules(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find imports of a module in a folder inside of another room (`optim/batched`), unless it is
    one of DOORS, and DOORS that no other room uses."""
    files = {module_of(path) for path in trees}
    unused = DOORS & files
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for name in imported_files(node):
                module = name if name in files else name.rpartition(".")[0]
                parts = module.split(".")
                if parts[0] != "lather" or len(parts) < 4 or parts[1] == room_of(path):
                    continue
                unused.discard(module)
                if module not in DOORS:
                    yield (
                        f"{path}:{node.lineno}: imports {module}, an inner module of another room: "
                        "export the name from the folder's __init__, move it to a module of "
                        "FOR_ALL, or add the module to DOORS of .ci/house.py"
                    )
    yield from (
        f"{door}: one of DOORS in .ci/house.py, but no other room imports it"
        for door in sorted(unused)
    )


def circles(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find files of the package that import each other, directly or through others, and name the
    shortest circle of each such file that comes first.

    Every import counts, also one inside a function or under `TYPE_CHECKING`: a reader who wants to
    understand one of these files has to know all of them.
    """
    files = {module_of(path): path for path in trees}
    arrows = {
        module: {
            other
            for node in ast.walk(trees[path])
            for name in imported_files(node)
            if (other := name if name in files else name.rpartition(".")[0]) in files
            if other != module
        }
        for module, path in files.items()
    }
    seen: set[str] = set()
    for module in sorted(files):
        if module not in seen and (circle := shortest_circle(module, arrows)):
            seen.update(circle)
            yield f"{files[module]}: a circle of imports: {' -> '.join(circle)}"


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")


def imported_files(node: ast.AST) -> list[str]:
    """Name what a statement imports, with the names that it takes out of modules: each is a module,
    or a name in the module before its last dot."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{one.name}" for one in node.names]
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def shortest_circle(start: str, arrows: dict[str, set[str]]) -> list[str]:
    """Return the modules of the shortest circle of arrows from `start` and back to it; empty if
    there is none."""
    seen: set[str] = set()
    for path in (paths := [[start]]):
        if start in arrows[path[-1]]:
            return [*path, start]
        new = sorted(arrows[path[-1]] - seen)
        seen.update(new)
        paths += [[*path, module] for module in new]
    return []


def imported(node: ast.AST) -> list[str]:
    """Name the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return (
            [f"lather.{one.name}" for one in node.names]
            if node.module == "lather"
            else [node.module or ""]
        )
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def doubled_classes(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find classes that share a name, but for a leading underscore."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, several in places.items():
        if len(several) > 1:
            yield f"{several[0]}: class {name} is also defined at {', '.join(several[1:])}"


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Find the strings that stand alone: docstrings, also those of fields and constants."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def docstrings_without_subject(trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Find docstrings whose first word stands for a noun that is missing. ("Whether", "How many"
    and "Which" ask questions.)"""
    for path, tree in trees.items():
        for node in docstrings(tree):
            words = str(node.value).split(maxsplit=1)
            if words and words[0] in NO_NOUNS:
                yield (
                    f"{path}:{node.lineno}: a docstring that begins with "
                    f'"{words[0]}": begin with a verb or the thing itself'
                )


def code_lines(text: str) -> int:
    """Count the lines of a module that are neither empty nor comment nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in docstrings(ast.parse(text)):
        lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


if __name__ == "__main__":
    sys.exit(main())
