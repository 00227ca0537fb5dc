"""The console on which commands print their tables."""

from __future__ import annotations

from rich.console import Console

__all__ = ["wide_console"]


class _PipedConsole(Console):
    """A console that raises BrokenPipeError, as `print` does, if its reader leaves early (`lather profile ... | head`); rich would exit
    with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def wide_console(columns: int) -> Console:
    """Return a console as wide as the terminal, but at least `columns`, which the tables need."""
    return _PipedConsole(width=max(Console().width, columns))
