"""Progress displays of a run: a live bar on a terminal, plain lines in a pipe or file."""

from __future__ import annotations

import contextlib
import math

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lather.train.metrics import StepRow


class PlainDisplay(contextlib.AbstractContextManager["PlainDisplay"]):
    """Prints a line every `every` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.is_read = True

    def __exit__(self, *exc: object) -> None:
        pass

    def note(self, text: str) -> None:
        if self.is_read:
            print(text, flush=True)

    def step(self, row: StepRow, num_steps: int) -> None:
        if row.step % self.every == 0 or row.step in (1, num_steps) or row.skipped:
            self.note(f"step {row.step}/{num_steps}  {_summary(row)}")


class LiveDisplay(Progress):
    """Shows a bar with step, loss, tokens per second and remaining time; notes scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("[bold]training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            speed_estimate_period=math.inf,
        )

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def step(self, row: StepRow, num_steps: int) -> None:
        task = self.task_ids[0] if self.task_ids else self.add_task("training", total=num_steps, summary="")
        self.update(task, completed=row.step, summary=_summary(row))


def _summary(row: StepRow) -> str:
    if row.skipped:
        return f"skipped: {'loss or gradient not finite' if row.tokens else 'no token to learn'}"
    return f"loss {row.loss:.4f}  lr {row.lr:.2e}  grad {row.grad_norm:.2f}  {row.tokens_per_second:,.0f} tokens/s"
