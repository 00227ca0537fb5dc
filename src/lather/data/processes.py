"""Distributes units of work over several processes, and counts the documents and tokens that they have made.

The processes are spawned and not forked, because forking a process that has threads is not safe. They end with their parent. A single unit,
or all units if one process is asked for, are done in the calling process, where the tokenizer uses all cores.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from lather.data.sources import ReadUnit
from lather.data.work import Making, do_unit
from lather.errors import DataError
from lather.processes import end_with_parent

POLL_SECONDS = 0.5


class MakingDisplay(Protocol):
    """Shows the progress of making a data set."""

    def note(self, text: str) -> None:
        """Show a line."""

    def progress(self, units: int, num_units: int, documents: int, tokens: int) -> None:
        """Show the number of finished units, and the documents and tokens made since the command was started."""


def do_units(units: Sequence[ReadUnit], num_units: int, making: Making, workers: int, display: MakingDisplay) -> None:
    """Do `units`, the missing ones of all `num_units`. Raises the error of a unit that fails; finished units are kept."""
    if workers == 1 or len(units) < 2:
        _do_here(units, num_units, making, display)
        return
    done, context = num_units - len(units), multiprocessing.get_context("spawn")
    counts = context.Array("q", 2)
    waiting, at_work = list(reversed(units)), {}
    processes: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(min(workers, len(units))):
            ours, theirs = context.Pipe()
            processes[ours] = context.Process(target=_work, args=(theirs, making, counts))
            processes[ours].start()
            theirs.close()
        for idle in processes:
            at_work[idle] = waiting.pop()
            _send(idle, at_work[idle])
        while at_work:
            for connection in wait(list(at_work), POLL_SECONDS):
                assert isinstance(connection, Connection)
                following = waiting[-1:]
                _hand_over(connection, at_work.pop(connection), following)
                if following:
                    at_work[connection] = waiting.pop()
                done += 1
            display.progress(done, num_units, *counts[:])
    finally:
        for connection, process in processes.items():
            connection.close()  # an idle process ends when its connection closes
            if connection in at_work:
                process.kill()
            process.join()


def _do_here(units: Sequence[ReadUnit], num_units: int, making: Making, display: MakingDisplay) -> None:
    done, made = num_units - len(units), [0, 0]

    def count(documents: int, tokens: int) -> None:
        made[0], made[1] = made[0] + documents, made[1] + tokens
        display.progress(done, num_units, *made)

    for unit in units:
        do_unit(unit, making, count)
        done += 1
        display.progress(done, num_units, *made)


def _hand_over(connection: Connection, unit: ReadUnit, following: Sequence[ReadUnit]) -> None:
    """Receive the result of a unit, and send the following unit, if there is one. Raises the unit's error."""
    try:
        error = connection.recv()
    except (EOFError, ConnectionError):
        raise _killed(unit) from None
    if error is not None:
        raise error
    if following:
        _send(connection, following[0])


def _send(connection: Connection, unit: ReadUnit) -> None:
    try:
        connection.send(unit)
    except ConnectionError:
        raise _killed(unit) from None


def _killed(unit: ReadUnit) -> DataError:
    return DataError(
        f"a process ended while it was at work on {unit.parts[0].path}: it was killed, perhaps because memory ran out; "
        "the same command continues: give it fewer --workers"
    )


def _work(connection: Connection, making: Making, counts: Any) -> None:
    """Do units from the connection until it closes. `counts`: documents and tokens made by all processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles and reports it
    end_with_parent()

    def count(documents: int, tokens: int) -> None:
        with counts.get_lock():
            counts[0] += documents
            counts[1] += tokens

    with contextlib.suppress(EOFError):
        while True:
            unit = connection.recv()
            try:
                do_unit(unit, making, count)
            except Exception as error:  # the parent process raises it
                connection.send(error)
            else:
                connection.send(None)
