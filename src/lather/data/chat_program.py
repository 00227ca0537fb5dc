"""Compiles chat templates as transformers does, and once more with marks that tell which message
wrote which part of the text.

As in transformers, a template is a Jinja program that runs in a sandbox, with the same filters and
functions. Templates write the messages in a loop. In the marked template every turn of such a loop
begins with the number of its message, and every `{% generation %}` block stands between marks.
"""

from __future__ import annotations

import copy
import datetime
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

Span = tuple[int, int]
"""A range of characters: its start and its stop."""
MARK = re.compile("\ufdd0(loop|endloop|block|endblock|[0-9]+)\ufdd1")
"""A label between two code points that are no characters, and so in no text."""


def mark(label: object) -> str:
    return f"\ufdd0{label}\ufdd1"


NUMBERS = "numbers_of_messages"
"""Variable of marked templates: the numbers of the messages by the identities of their objects."""


@dataclass(frozen=True)
class MarkedText:
    """A rendered text, and which ranges of it were written for which message."""

    text: str
    segments: dict[int, Span]
    """By number of the message; messages for which no loop writes anything have none."""
    blocks: list[Span]
    """The ranges that `{% generation %}` blocks wrote."""

    @property
    def end(self) -> int:
        """The end of the last segment."""
        return max((stop for _, stop in self.segments.values()), default=0)


def read_marks(marked: str) -> MarkedText:
    """Take the marks out of a text."""
    texts, length, blocks, segments = list[str](), 0, list[Span](), dict[int, Span]()
    loops, block_start = [("", 0)], 0  # label and start of the segment in each loop
    for place, piece in enumerate(MARK.split(marked)):
        if place % 2 == 0:  # between two marks
            texts.append(piece)
            length += len(piece)
        elif piece == "block":
            block_start = length
        elif piece == "endblock":
            blocks += [(block_start, length)] if length > block_start else []
        elif piece == "loop":
            loops.append(("", length))
        else:
            label, start = loops.pop() if loops else ("", length)
            if label and length > start:
                segments[int(label)] = start, length
            if piece != "endloop":
                loops.append((piece, length))
    return MarkedText("".join(texts), segments, blocks)


class Program:
    """A compiled chat template."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateError if the source is not a template."""
        self.source, self._environment = source, _environment()
        self.plain: Template = self._environment.from_string(source)

    @cached_property
    def marked(self) -> Template:
        tree = _Marker().visit(self._environment.parse(self.source))
        tree.set_environment(self._environment)
        template: Template = self._environment.from_string(tree)
        return template


class _GenerationBlocks(Extension):
    """Parses `{% generation %}` blocks as scopes, which templates have of nothing else."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Marker(NodeTransformer):
    """Adds marks to loops and `{% generation %}` blocks."""

    def visit_For(self, node: nodes.For) -> nodes.Node | list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        message = nodes.Name(node.target.name, "load")
        node.body.insert(0, _filtered(message, "mark_of_message"))
        first, last = (
            _filtered(copy.deepcopy(node.iter), "mark_of_loop", nodes.Const(label))
            for label in ("loop", "endloop")
        )
        return [first, node, last]

    def visit_Scope(self, node: nodes.Scope) -> list[nodes.Node]:  # noqa: N802
        self.generic_visit(node)
        return [_written("block"), node, _written("endblock")]


def _written(label: str) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(mark(label))])


def _filtered(value: nodes.Node, name: str, *arguments: nodes.Node) -> nodes.Node:
    return nodes.Output([nodes.Filter(value, name, list(arguments), [], None, None)])


@pass_context
def _mark_of_loop(context: Context, items: Any, label: str) -> str:
    """Return the mark of a loop if it is over messages: other loops may be in macros whose text the
    template compares."""
    numbers = context.get(NUMBERS, {})
    is_iterator = iter(items) is items  # which must not be used up
    return mark(label) if is_iterator or any(id(item) in numbers for item in items) else ""


@pass_context
def _mark_of_message(context: Context, value: Any) -> str:
    number = context.get(NUMBERS, {}).get(id(value))
    return "" if number is None else mark(number)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox with the filters and functions that transformers gives templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters.update(
        tojson=_to_json, mark_of_message=_mark_of_message, mark_of_loop=_mark_of_loop
    )
    environment.globals["raise_exception"] = _raise
    # data sets must not depend on the date
    environment.globals["strftime_now"] = datetime.datetime(2025, 1, 1).strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)
