"""The console on which commands print, and tables that fit its width."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

WIDE = 10_000
"""Columns of a console that is no terminal: nothing is wrapped in a file or a pipe."""
LEAST_TEXT = 16
"""Columns to which a column of text may be wrapped, or its longest word if that is longer."""
LONG_WORD = 28
"""Longer words, names or paths for example, may be broken after a mark between their parts."""
MARKS = "-_/.,:@="


class _PipedConsole(Console):
    """A console that raises BrokenPipeError, as `print` does, if its reader leaves early (`lather
    profile ... | head`); rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def command_console() -> Console:
    """Return a console on standard output: as wide as the terminal, or as wide as its lines need if
    that is no terminal."""
    console = _PipedConsole()
    return console if console.file.isatty() else _PipedConsole(width=WIDE)


def is_live(console: Console) -> bool:
    """Return whether the console is a terminal that can replace its lines."""
    return console.is_interactive and console.file.isatty()


class FittedTable(Table):
    """A table that fits the console: it wraps headers and texts between words, and if that is not
    enough, divides the columns among several tables, each of which begins with the columns that
    name the rows. Numbers and words stay whole."""

    num_names = 1
    """Number of first columns that name the rows."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield console.render_str(str(self.title), style="bold", highlight=False)
        columns = [
            [console.render_str(str(cell), highlight=False) for cell in column.cells]
            for column in self.columns
        ]
        widths = [
            _widths(column, cells) for column, cells in zip(self.columns, columns, strict=True)
        ]
        if sum(most for _, most in widths) + _around(len(widths)) > options.max_width:
            columns = [[with_breaks(cell) for cell in cells] for cells in columns]
            widths = [
                _widths(column, cells) for column, cells in zip(self.columns, columns, strict=True)
            ]
        num_names = min(self.num_names, len(columns))
        for group in _groups([least for least, _ in widths], num_names, options.max_width):
            room = options.max_width - _around(len(group))
            shared = _shared([widths[index] for index in group], room)
            yield self._part(dict(zip(group, shared, strict=True)), columns)

    def _part(self, widths: Mapping[int, int], columns: Sequence[Sequence[Text]]) -> Table:
        """Make a table of the columns whose widths are given."""
        part = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, width in widths.items():
            column = self.columns[index]
            part.add_column(
                column.header,
                justify=column.justify,
                style=column.style,
                width=width,
                overflow="fold",
            )
        for number, row in enumerate(self.rows):
            part.add_row(
                *(columns[index][number] for index in widths),
                style=row.style,
                end_section=row.end_section,
            )
        return part


def with_breaks(cell: Text, longest: int = LONG_WORD, marks: str = MARKS) -> Text:
    """Break words that have more columns than `longest` after marks in them."""
    part_of_word = re.compile(f"[^{re.escape(marks)}]*[{re.escape(marks)}]*")
    breaks = []
    for word in re.finditer(r"\S+", cell.plain):
        begin = word.start()
        for part in part_of_word.finditer(cell.plain, *word.span()):
            if part.end() - begin > longest and part.start() > begin:
                breaks.append(begin := part.start())
    return Text("\n").join(cell.divide(breaks)) if breaks else cell


def _widths(column: Column, cells: Sequence[Text]) -> tuple[int, int]:
    """Return the least width at which words and numbers stay whole, and the width at which nothing
    is wrapped."""
    header = [cell_len(word) for word in str(column.header).split()]
    whole = [max(map(cell_len, cell.plain.split("\n"))) for cell in cells]
    words = [max(map(cell_len, cell.plain.split()), default=0) for cell in cells]
    is_number = column.justify == "right" or column.no_wrap
    texts = [
        most if is_number else max(word, min(most, LEAST_TEXT))
        for most, word in zip(whole, words, strict=True)
    ]
    return max((0, *header, *texts)), max((cell_len(str(column.header)), *whole))


def _around(columns: int) -> int:
    """Return the columns of a table outside of its cells: two spaces for each cell, and an edge."""
    return 2 * columns + 1


def _groups(least: Sequence[int], num_names: int, width: int) -> Iterator[list[int]]:
    """Divide columns into groups that fit, each with the columns that name the rows."""
    names = list(range(num_names))
    group = names
    for index in range(num_names, len(least)):
        columns = [*group, index]
        needed = sum(least[column] for column in columns) + _around(len(columns))
        if len(group) > num_names and needed > width:
            yield group
            columns = [*names, index]
        group = columns
    yield group


def _shared(measured: Sequence[tuple[int, int]], room: int) -> list[int]:
    """Share the room among columns of (least, greatest) widths, in proportion to the difference. If
    the least widths need more room, the widest columns are folded."""
    widths = [least for least, _ in measured]
    while sum(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    wanted = [most - width for (_, most), width in zip(measured, widths, strict=True)]
    share = min(1.0, max(0, room - sum(widths)) / max(1, sum(wanted)))
    return [width + int(more * share) for width, more in zip(widths, wanted, strict=True)]


def titled_table(
    title: str = "", left: Iterable[str] = (), right: Iterable[str] = ()
) -> FittedTable:
    """Return a table without a frame: `left` columns of words, which name the rows, and `right`
    columns of numbers."""
    table = FittedTable(title=title)
    for justify, names in (("left", left), ("right", right)):
        for name in names:
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.num_names = max(1, sum(column.justify == "left" for column in table.columns))
    return table
