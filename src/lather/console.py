"""The console that commands print their tables to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["wide_console"]


class _PipedConsole(Console):
    """A reader that leaves early (`lather profile ... | head`) is told as by `print`; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def wide_console(columns: int) -> Console:
    """As wide as the terminal, but at least `columns` for what the tables need."""
    return _PipedConsole(width=max(Console().width, columns))
