"""Files of a run on which nothing depends: where one cannot be written, the run says so and goes
on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from lather.errors import UserError
from lather.files import reason


@contextlib.contextmanager
def optional_file(file: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Write `file` in the block; if it cannot be written, only say so with `note`."""
    try:
        yield
    except UserError as error:  # that of a command whose --out cannot be written
        cause = error.__context__
        why = reason(cause, file) if isinstance(cause, OSError) else str(error)
        note(f"{file} cannot be written ({why}): the run goes on without it")
    except OSError as error:
        note(f"{file} cannot be written ({reason(error, file)}): the run goes on without it")


def draw_run(run: Path, note: Callable[[str], None]) -> None:
    """Write the picture and the page of a run that has ended."""
    from lather.train.plot import draw  # matplotlib takes a second to import
    from lather.train.report import REPORT, write_report

    with optional_file(run / "loss.png", note):
        draw([run], run / "loss.png")
    with optional_file(run / REPORT, note):
        write_report(run, run / REPORT)
