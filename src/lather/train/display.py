"""Progress displays of a run: a live bar on a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lather.durations import spent_and_left
from lather.lines import flow
from lather.train.metrics import StepRow

LEAST_BAR, MOST_BAR = 8, 40
"""Columns of the bar."""
GIB = 2**30


class Clock:
    """Estimates the time left from the steps of this process."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._first: tuple[int, float] | None = None
        """Number and time of the first step."""

    def times(self, row: StepRow, num_steps: int) -> str:
        """Return the time that the run has trained, in all processes, and the time left, which is
        known from the second step on. `row`: a completed step."""
        now = self._now()
        self._first = self._first or (row.step, now)
        steps, seconds = row.step - self._first[0], now - self._first[1]
        steps_left = num_steps - row.step
        left = seconds / steps * steps_left if steps else None
        return spent_and_left(row.seconds, left if steps_left else 0.0)


class PlainDisplay(contextlib.AbstractContextManager["PlainDisplay"]):
    """Prints a line every `every` steps, and for each skipped step that had tokens to learn."""

    def __init__(self, every: int, clock: Clock | None = None) -> None:
        self.every = every
        self.is_silent = False
        self.clock = clock or Clock()

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, text: str) -> None:
        if not self.is_silent:
            print(text, flush=True)

    def step(self, row: StepRow, num_steps: int) -> None:
        fields = (
            f"step {row.step}/{num_steps}",
            *numbers_of(row),
            self.clock.times(row, num_steps),
        )
        if row.step % self.every == 0 or row.step in (1, num_steps) or (row.skipped and row.tokens):
            self.note("  ".join(fields))


class LiveDisplay(contextlib.AbstractContextManager["LiveDisplay"]):
    """Shows a bar with the step, the time spent and the time left, and below it the numbers of the
    step, on as many lines as the terminal's width requires; notes scroll above it."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self.console, self.clock = console, clock or Clock()
        self.live = Live(self, console=console, refresh_per_second=4)
        self._row: StepRow | None = None
        self._num_steps, self._times = 0, ""

    def __enter__(self) -> LiveDisplay:
        self.live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def step(self, row: StepRow, num_steps: int) -> None:
        self._row, self._num_steps = row, num_steps
        self._times = self.clock.times(row, num_steps)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row, width = self._row, options.max_width
        if row is None:
            return
        fields = [f"step {row.step}/{self._num_steps}", self._times]
        room = width - sum(map(cell_len, fields)) - 4
        if room >= LEAST_BAR:
            line = Table.grid(padding=(0, 2, 0, 0))
            line.add_row(
                fields[0], ProgressBar(self._num_steps, row.step, min(room, MOST_BAR)), fields[1]
            )
            yield line
            fields = []
        yield Text("\n".join(flow((*fields, *numbers_of(row)), width)))


def numbers_of(row: StepRow) -> list[str]:
    """Return the numbers of a step as texts."""
    if row.skipped:
        return [f"skipped: {row.skip_reason}"]
    return [
        f"loss {row.loss:.4f}",
        f"lr {row.lr:.2e}",
        f"grad {row.grad_norm:.2f}",
        f"{row.tokens_per_second:,.0f} tokens/s",
        f"{row.peak_memory_bytes / GIB:.2f} GiB",
    ]
