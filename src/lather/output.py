"""Standard output and standard error of a run, whose failures do not end it: a full disk below a
log, a closed pipe, a lost terminal.

What cannot be written is lost. The other stream says so at once, or either stream as soon as it can
be written again; then output goes on where it was, behind a line that says that some may be
missing. A reader that has closed its pipe wants no more, and nothing is said."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

GAP = "lather: lines may be missing before this one: the output could not be written\n"


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
    """A text stream whose errors of writing do not reach those who write to it. It has all other
    attributes of `stream`."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.other: SurvivingStream | None = None
        """The stream that says what happened to this one."""
        self._is_failing = False
        self._unsaid = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if self._try(""):
            self._catch_up()

    def finish(self) -> None:
        """Write what is in the buffer, or discard it if that fails, so that it fails nobody
        later."""
        self.flush()
        if self._is_failing:
            with contextlib.suppress(OSError, ValueError):
                discard_output(self._stream)

    def _try(self, text: str) -> bool:
        """Write the text, or flush if it is empty; return whether that was possible."""
        try:
            if text:
                self._stream.write(text)
            else:
                self._stream.flush()
        except BrokenPipeError:
            with contextlib.suppress(OSError, ValueError):
                discard_output(self._stream)
            return False
        except OSError as error:
            self._failed(error)
            return False
        return True

    def _failed(self, error: OSError) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        said = (
            f"lather: {self._name} cannot be written ({error.strerror or error}): the run goes on\n"
        )
        if self.other is None or not self.other.say(said):
            self._unsaid = said

    def say(self, text: str) -> bool:
        """Write and flush a line; return whether that was possible."""
        return self._try(text) and self._try("")

    def _catch_up(self) -> None:
        """Say what could not be said or written before, now that the stream can be written."""
        if self._is_failing and self.say(GAP):
            self._is_failing, self._unsaid = False, ""
        if self.other is not None and self.other._unsaid and self.say(self.other._unsaid):
            self.other._unsaid = ""


@contextlib.contextmanager
def surviving_output() -> Iterator[None]:
    """Let no failure of standard output or standard error end what the block does. Blocks may lie
    in each other."""
    if isinstance(sys.stdout, SurvivingStream):
        yield
        return
    with open(
        os.devnull, "w", encoding="utf-8"
    ) as nowhere:  # for a stream that was closed before this process started
        out, err = (
            SurvivingStream(sys.stdout or nowhere, "standard output"),
            SurvivingStream(sys.stderr or nowhere, "standard error"),
        )
        out.other, err.other = err, out
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                yield
            finally:
                out.finish()
                err.finish()
