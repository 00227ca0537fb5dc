"""Only one file has names of torch that are not public."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lather.errors import UserError
from lather.torch_private import check_torch_version

SOURCE = Path(__file__).parents[1] / "src" / "lather"
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_version__)\w+|\._base\b|\bfrom torch(\.\w+)*\._\w+|\bfrom torch\S* "
    r"import _\w+"
    r"|\._(local_tensor|spec)\b"
)
"""Matches private names. The second line has those of DTensors, which are attributes of objects and
not of modules."""


FROM_TORCH = re.compile(r"(importlib\.)?(import_module|__import__)\('torch\b|torch(\.\w+)*$")
"""Matches values from torch that a file assigns to a name of its own."""


def private_names(text: str) -> list[str]:
    return [match[0] for match in PRIVATE.finditer(text)] + list(
        private_attributes(ast.parse(text))
    )


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Yield private attributes of what a file got from torch, whatever the file calls it: `from
    torch import distributed as d`, then `d._x`."""
    from_torch = {name for node in ast.walk(tree) for name in names_from_torch(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, *path = ast.unparse(node).split(".")
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            root, *path = [*ast.unparse(node.args[0]).split("."), str(node.args[1].value)]
        else:
            continue
        if root in from_torch and path[-1].startswith("_") and not path[-1].startswith("__"):
            yield ".".join((root, *path))


def names_from_torch(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [name.asname or "torch" for name in names if name.name.split(".")[0] == "torch"]
        case ast.ImportFrom(module=str(module), names=names, level=0) if (
            module.split(".")[0] == "torch"
        ):
            return [name.asname or name.name for name in names]
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
            return (
                [ast.unparse(target)]
                if value is not None and FROM_TORCH.match(ast.unparse(value))
                else []
            )
    return []


def test_private_names_of_torch_stand_in_one_file() -> None:
    found = {
        file.relative_to(SOURCE).as_posix(): private_names(file.read_text("utf-8"))
        for file in SOURCE.rglob("*.py")
    }
    assert {name for name, names in found.items() if names} == {"torch_private.py"}


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cu128", "2.13.0a0+git12ab"])
def test_known_versions_of_torch_pass(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    check_torch_version()


@pytest.mark.parametrize(
    "version", ["2.10.1", "1.13.0", "2.14.0", "2.14.0.dev20261101+cpu", "3.0.0"]
)
def test_other_versions_are_refused_with_the_remedy(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        UserError, match=rf"(?s)torch {re.escape(version)} .*install torch >= 2\.11 and < 2\.14"
    ):
        check_torch_version()
