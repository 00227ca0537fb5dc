"""Standard output and standard error of a run, whose failures do not end it: a full disk below a
log, a closed pipe, a lost terminal.

Text that cannot be written is lost, and the other stream gets a line about the first failure. A
reader that has closed its pipe wants no more, and there is no line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO


def discard_output(stream: TextIO | None = None) -> None:
    """Send a stream (None: standard output) nowhere from now on, with what is in its buffer.
    Otherwise Python would try to write the buffer again when it exits, and end with 120."""
    stream = stream or sys.stdout
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    with contextlib.suppress(OSError):
        stream.flush()


def settle_output() -> None:
    """Write what is in the buffers of standard output and standard error, or discard it if that
    fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                discard_output(stream)


class SurvivingStream:
    """A text stream whose errors of writing do not reach the code that writes. It has all other
    attributes of `stream`."""

    def __init__(self, stream: TextIO, name: str, other: TextIO) -> None:
        """`other`: gets a line about the first failure."""
        self._stream, self._name, self._other, self._has_failed = stream, name, other, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            with contextlib.suppress(OSError, ValueError):
                discard_output(self._stream)
        except OSError as error:
            if self._has_failed:
                return
            self._has_failed = True
            why = f"{self._name} cannot be written ({error.strerror or error})"
            with contextlib.suppress(OSError, ValueError):
                print(f"lather: {why}: the run goes on", file=self._other, flush=True)


@contextlib.contextmanager
def surviving_output() -> Iterator[None]:
    """Let no failure of standard output or standard error end the block. Blocks may be nested."""
    if isinstance(sys.stdout, SurvivingStream):
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        # a stream is None if it was closed before this process started
        out, err = sys.stdout or nowhere, sys.stderr or nowhere
        surviving_out: Any = SurvivingStream(out, "standard output", err)
        surviving_err: Any = SurvivingStream(err, "standard error", out)
        try:
            with (
                contextlib.redirect_stdout(surviving_out),
                contextlib.redirect_stderr(surviving_err),
            ):
                yield
        finally:
            settle_output()
