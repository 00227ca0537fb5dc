"""Says what a launch of a Triton kernel reads and writes, from its source: which of its tensors are
loaded and stored in the branches that are compiled for its constants.

A pointer is followed through sums and names (`start = logits + row * stride`). Functions whose
names have `load`, `store` or `atomic` in them do so to the pointers that they are given first; a
pointer that is given to any other function counts as loaded.
"""

from __future__ import annotations

import ast
import operator
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from torch import Tensor

from lather.standin.operations import nbytes
from lather.time_model.operations import source_of

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.Lt: operator.lt,
}
Constants = Mapping[str, Any]


def kernel_traffic(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[int, int]:
    """The bytes of the tensors that a Triton kernel loads and stores, each tensor whole and once,
    under however many names it is passed.

    Args:
        arguments: by the names of the kernel's parameters. Both branches count where the constant
            that chooses is not given.
    """
    constants = tuple(
        (name, ... if isinstance(x, Tensor) else x)
        for name, x in sorted(arguments.items())
        if name.isupper() or x is None or isinstance(x, Tensor)
    )
    loaded, stored = _touched(function, constants)
    read, written = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for name, x in arguments.items():
        if isinstance(x, Tensor):
            place = (id(x.untyped_storage()), int(x.storage_offset()))
            for names, sizes in ((loaded, read), (stored, written)):
                if name in names:
                    sizes[place] = max(sizes.get(place, 0), nbytes(x))
    return sum(read.values()), sum(written.values())


@cache
def _touched(
    function: Callable[..., Any], constants: tuple[tuple[str, Any], ...]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the parameters that are loaded, and of those that are stored."""
    (definition,) = ast.parse(textwrap.dedent(source_of(function))).body
    assert isinstance(definition, ast.FunctionDef)
    walk = _PointerWalk(dict(constants), [argument.arg for argument in definition.args.args])
    for statement in definition.body:
        walk.visit(statement)
    return frozenset(walk.loaded), frozenset(walk.stored)


class _PointerWalk(ast.NodeVisitor):
    """Follows a kernel's pointers in the order of its statements."""

    def __init__(self, constants: Constants, parameters: list[str]) -> None:
        self.constants = constants
        self.pointers = {name: {name} for name in parameters}
        """The parameters that a name points into."""
        self.loaded: set[str] = set()
        self.stored: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        taken = _truth(node.test, self.constants)
        for branch, is_first in ((node.body, True), (node.orelse, False)):
            for statement in branch if taken in (None, is_first) else ():
                self.visit(statement)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        taken = _truth(node.test, self.constants)
        for branch, is_first in ((node.body, True), (node.orelse, False)):
            if taken in (None, is_first):
                self.visit(branch)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        pairs = [(target, node.value) for target in node.targets]
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs += zip(target.elts, node.value.elts, strict=True)
        for name, pointers in [(name, self.into(value)) for name, value in pairs]:
            if isinstance(name, ast.Name):
                self.pointers[name.id] = pointers

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
        if "store" not in name and "atomic" not in name and "load" not in name:
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            self.loaded.update(*map(self.into, given))
            return
        touched = self.loaded if "load" in name else self.stored
        for argument in node.args:
            if not (pointers := self.into(argument)):
                break
            touched |= pointers

    def into(self, node: ast.expr) -> set[str]:
        """Return the parameters that an expression points into."""
        if isinstance(node, ast.Name):
            return self.pointers.get(node.id, set())
        if isinstance(node, ast.BinOp):
            return self.into(node.left) | self.into(node.right)
        return set()


def _truth(test: ast.expr, constants: Constants) -> bool | None:
    """Return whether a condition on constants holds; None: not known."""
    match test:
        case ast.Name(id=name) if name in constants:
            return bool(constants[name])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = _truth(operand, constants)
            return None if truth is None else not truth
        case ast.Compare(
            left=ast.Name(id=name), ops=[kind], comparators=[ast.Constant(value=value)]
        ) if name in constants and type(kind) in COMPARISONS:
            return COMPARISONS[type(kind)](constants[name], value)
    return None
