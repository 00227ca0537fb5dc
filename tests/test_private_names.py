"""Only one file has names of torch that are not public."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lather.errors import UserError
from lather.torch_private import (
    check_torch_version,
    finish_gradient_reduction,
    prepare_sharding,
    start_gradient_reduction,
)

SOURCE = Path(__file__).parents[1] / "src" / "lather"
PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._(?!_version__)\w+|\._base\b|\bfrom torch(\.\w+)*\._\w+|\bfrom torch\S* "
    r"import _\w+"
    r"|\._(fsdp|lazy_init|root_post_backward|state_ctx|local_tensor)\w*\b|\bpost_backward\(|\bfully_shard\.state\b"
)
"""Matches private names. The second line has those of FSDP2, which are attributes of objects and
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
    for use in (prepare_sharding, start_gradient_reduction, finish_gradient_reduction):
        with pytest.raises(
            UserError, match=rf"(?s)torch {re.escape(version)} .*install torch >= 2\.11 and < 2\.14"
        ):
            use(nn.Linear(1, 1))


@pytest.mark.parametrize(
    "missing",
    [
        "_lazy_init",
        "_root_post_backward_final_callback",
        "_state_ctx",
        "_fsdp_param_group",
        "post_backward",
    ],
)
def test_a_name_that_is_gone_is_named_when_sharding_is_set_up(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = SimpleNamespace(post_backward=print)
    state = SimpleNamespace(
        _lazy_init=dict, _root_post_backward_final_callback=print, _fsdp_param_group=group
    )
    state._state_ctx = SimpleNamespace(all_states=[state])
    delattr(group if missing == "post_backward" else state, missing)
    monkeypatch.setattr(fully_shard, "state", lambda module: state)
    with pytest.raises(
        UserError,
        match=(
            rf"torch {re.escape(torch.__version__)} has no "
            rf"SimpleNamespace\.{missing}, .*install torch"
        ),
    ):
        prepare_sharding(nn.Linear(1, 1))
