"""Progress displays of a run: a live bar on a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import contextlib
import math

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lather.durations import spent_and_left
from lather.lines import flow, short_number
from lather.train.metrics import StepRow

LEAST_BAR, MIDDLE_BAR, MOST_BAR = 8, 16, 40
"""Columns of the bar; `MIDDLE_BAR` stay when the line has other numbers, too."""
GIB = 2**30


class PlainDisplay(contextlib.AbstractContextManager["PlainDisplay"]):
    """Prints a line every `every` steps, and for each skipped step that had tokens to learn."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.is_silent = False

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, text: str) -> None:
        if not self.is_silent:
            print(text, flush=True)

    def step(self, row: StepRow, num_steps: int) -> None:
        fields = (
            f"step {row.step}/{num_steps}",
            *numbers_of(row),
            *reached_by(row),
            times_of(row),
        )
        if row.step % self.every == 0 or row.step in (1, num_steps) or (row.skipped and row.tokens):
            self.note("  ".join(fields))


class LiveDisplay(contextlib.AbstractContextManager["LiveDisplay"]):
    """Shows a bar with the step, epoch, tokens, the time spent and the time left, and below it the
    numbers of the step, on as many lines as the terminal's width requires; notes scroll above
    it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(self, console=console, refresh_per_second=4)
        self._row: StepRow | None = None
        self._num_steps = 0

    def __enter__(self) -> LiveDisplay:
        self.live.start(refresh=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def step(self, row: StepRow, num_steps: int) -> None:
        self._row, self._num_steps = row, num_steps

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row, width = self._row, options.max_width
        if row is None:
            return
        head, times = f"step {row.step}/{self._num_steps}", times_of(row)
        fields = reached_by(row)
        while fields and cell_len(f"{head}  {fields[0]}{times}") + 4 + MIDDLE_BAR <= width:
            head = f"{head}  {fields.pop(0)}"
        room = width - cell_len(head + times) - 4
        if room >= LEAST_BAR:
            line = Table.grid(padding=(0, 2, 0, 0))
            line.add_row(head, ProgressBar(self._num_steps, row.step, min(room, MOST_BAR)), times)
            yield line
            texts = [*numbers_of(row), *fields]
        else:
            texts = [head, times, *numbers_of(row), *fields]
        yield Text("\n".join(flow(texts, width)))


def reached_by(row: StepRow) -> list[str]:
    """Return how far the run is after a step as texts."""
    return [f"epoch {row.epoch:.2f}", f"{short_number(row.total_tokens)} tokens"]


def times_of(row: StepRow) -> str:
    """Return the time that the run has trained, in all processes, and the time left if it is
    known."""
    left = None if math.isnan(row.seconds_left) else row.seconds_left
    return spent_and_left(row.seconds, left)


def numbers_of(row: StepRow) -> list[str]:
    """Return the numbers of a step as texts."""
    if row.skipped:
        return [f"skipped: {row.skip_reason}"]
    return [
        f"loss {row.loss:.4f}",
        f"lr {row.lr:.2e}",
        f"grad {row.grad_norm:.2f}",
        f"{row.tokens_per_second:,.0f} tokens/s",
        *([] if math.isnan(row.mfu) else [f"MFU {row.mfu:.1%}"]),
        f"{row.peak_memory_bytes / GIB:.2f} GiB",
    ]
