"""The console on which commands print their tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


class _PipedConsole(Console):
    """A console that raises BrokenPipeError, as `print` does, if its reader leaves early (`lather profile ... | head`); rich would exit
    with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def wide_console(columns: int) -> Console:
    """Return a console as wide as the terminal, but at least `columns`, which the tables need."""
    return _PipedConsole(width=max(Console().width, columns))


def titled_table(title: str = "", left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """A table without a frame, whose first columns are words and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for justify, names in (("left", left), ("right", right)):
        for name in names:
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
    return table
