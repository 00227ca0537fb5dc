"""Connections from every rank to one hub, by which a death, a failure or a request to stop reaches
every rank at once.

The kernel closes a process's sockets when the process dies, whatever it was doing. Each rank
listens on a thread of its own, so a rank that is blocked in a collective, where Python runs no
signal handler, still receives the end of the job and exits. There are no heartbeats, so a slow rank
is never taken for dead; keep-alive probes, which the kernel answers, detect a lost machine.

Messages are JSON objects, one per line: a rank sends `hello`, `failed`, `done` (its result),
`stalled` (that its main thread does not move) and `place` (where that is); the hub sends `request`
(a signal), `where` and `end`. After the first operation that timed out, or a standstill, the hub
asks all ranks where they are, to name those that the others have waited for. When one rank fails,
the others soon fail too, because their connections to it break. So the hub waits for a moment, and
then reports as the cause the first failure that is not such a consequence.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NoReturn

import torch.distributed as dist

from lather.errors import UserError
from lather.files import remedy_of
from lather.parallel.launch.requests import Requests
from lather.parallel.launch.whereabouts import Standstill, Whereabouts, whereabouts

SETTLE_SECONDS = 0.5
"""Time that the hub waits after the first failure for another one that may be its cause."""
UNWIND_SECONDS = 3.0
"""Time that it waits instead after a UserError, as usually every rank raises the error, and needs
time to remove what it has started; and for the answers of ranks that were asked where they are."""
TICK_SECONDS = 0.1
CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "gloo",
    "NCCL",
    "TCPStore",
)
"""Parts of the messages of errors that a rank raises because another rank has died."""
COPY = "This is a copy of what another rank raised."
"""Note (`add_note`) on an exception that a rank raises only because another rank has raised it."""


@dataclass(frozen=True)
class Failure:
    """The reason why a rank ended."""

    rank: int
    """-1 if the process had not yet reported its rank."""
    kind: Literal["user", "file", "error", "died", "stuck", "connection"]
    """user: a UserError. file: the system's error for a file or a disk. error: any other exception.
    died: no exception was reported. stuck: other ranks waited for it in vain. connection: a
    consequence of another rank's end."""
    text: str
    """The message of the UserError or of the file's error, or the traceback."""
    when: float
    """Seconds since the epoch."""
    number: int = 0
    """Number of the operating system's error, for "file"."""
    file: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the report of `error`, which ended `rank`."""
        now = time.time()
        if isinstance(error, UserError):
            return cls(rank, "user", str(error), now)
        if isinstance(error, OSError) and remedy_of(error):
            file, number = str(error.filename or ""), error.errno or 0
            return cls(rank, "file", error.strerror or "", now, number, file)
        text = "".join(traceback.format_exception(error))
        return cls(rank, "connection" if _is_consequence(error) else "error", text, now)

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: the smallest is the cause. Broken connections come after everything else,
        however early they were noticed."""
        return self.kind == "connection", self.when

    def describe(self) -> str:
        """Return the text for standard error."""
        who = f"rank {self.rank}" if self.rank >= 0 else "a rank that was starting"
        if self.kind == "user":
            return f"lather: error: {' '.join(self.text.split())}"
        if self.kind == "died":
            return (
                f"lather: stopped: {who} {self.text}; the same command "
                "resumes the run from its last checkpoint"
            )
        if self.kind == "stuck":
            return (
                f"lather: stopped: {self.text}; the same command resumes the run from its last "
                "checkpoint"
            )
        return f"lather: stopped: {who} failed:\n{self.text.rstrip()}"


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None:
        if (
            isinstance(error, (dist.DistError, ConnectionError))
            or COPY in getattr(error, "__notes__", ())
            or (isinstance(error, RuntimeError) and any(x in str(error) for x in CONSEQUENCES))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


class _JsonSocket:
    """A socket that sends and receives JSON objects."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank = -1
        self.pid = 0
        self.is_done = False
        self._rest = b""
        self._sending = threading.Lock()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, **message: object) -> None:
        """Send a message, unless the connection is closed."""
        with contextlib.suppress(OSError), self._sending:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, object]] | None:
        """Wait for data and return the complete messages; None if the connection is closed."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._rest = (self._rest + data).split(b"\n")
            return [json.loads(line) for line in lines] if data else None
        except (OSError, ValueError):
            return None


class Hub:
    """Holds the connections of all ranks, on a thread in the parent of local ranks, or in rank 0 if
    another launcher started the ranks.

    `on_end` is called once, on that thread, with the failure that ends the job. `watch` returns the
    processes that have died, with a text, also those that had not connected yet.
    """

    def __init__(
        self,
        host: str,
        num_ranks: int,
        on_end: Callable[[Failure], None],
        *,
        watch: Callable[[], Mapping[int, str]] = dict,
        died: Callable[[int], str] = lambda pid: "died without an error message",
    ) -> None:
        """`host`: address to listen on, "" for all; `died` returns how the process of a rank whose
        connection broke has ended."""
        two_stacks = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if two_stacks else socket.AF_INET
        self._listener = socket.create_server(
            (host, 0), family=family, dualstack_ipv6=two_stacks, backlog=num_ranks
        )
        self.port: int = self._listener.getsockname()[1]
        self.failures: list[Failure] = []
        self.cause: Failure | None = None
        self.result: int | None = None
        """Result of rank 0, once it is done."""
        self._num_ranks, self._on_end, self._watch, self._died = num_ranks, on_end, watch, died
        self._lines: list[_JsonSocket] = []
        self._known: set[int] = set()
        """Processes that are or were connected, or whose death was noticed."""
        self._places: dict[int, Whereabouts] | None = None
        """The places of ranks, once they were asked for."""
        self._stalled = 0.0
        """Seconds in which a rank that has not failed did not move; 0: none said so."""
        self._requests: dict[int, None] = {}
        """Signals that were passed on, each once, in order."""
        self._num_done = 0
        self._is_closed = False
        self._since = time.monotonic()
        """Last time at which there was no failure."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="lather-hub", daemon=True)

    def start(self, unblocked: tuple[signal.Signals, ...] = ()) -> Hub:
        """Start the thread, which unblocks the signals `unblocked`; all other threads may block
        them."""
        self._unblocked = unblocked
        self._thread.start()
        return self

    def request(self, number: signal.Signals) -> None:
        """Pass a signal on to every rank, including those that connect later."""
        with self._lock:
            self._requests[int(number)] = None
            for line in self._lines:
                line.send(request=int(number))

    def wait(self, seconds: float) -> None:
        """Wait until all ranks are done, or the job has ended."""
        deadline = time.monotonic() + seconds
        while (
            time.monotonic() < deadline
            and self._num_done < self._num_ranks
            and self._thread.is_alive()
        ):
            time.sleep(0.02)

    def close(self, seconds: float = UNWIND_SECONDS + SETTLE_SECONDS) -> None:
        """End the thread; failures that were received are still handled."""
        self._is_closed = True
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _serve(self) -> None:
        if self._unblocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self._unblocked)
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            while not (self._is_closed and not self.failures):
                for key, _ in selector.select(TICK_SECONDS):
                    if key.data is None:
                        self._accept(selector)
                    elif not self._hear(key.data):
                        selector.unregister(key.data.socket)
                        self._lost(key.data)
                self._look_for_deaths()
                if self._is_settled():
                    break
            self._listener.close()
        if self.failures:
            self._end(min(self.failures, key=lambda failure: failure.order))

    def _is_settled(self) -> bool:
        if not self.failures:
            self._since = time.monotonic()
            return False
        are_users = all(failure.kind == "user" for failure in self.failures)
        patience = UNWIND_SECONDS if are_users or self._is_asking() else SETTLE_SECONDS
        return len(self.failures) >= self._num_ranks or time.monotonic() > self._since + patience

    def _is_asking(self) -> bool:
        """Return whether ranks that have not failed were asked for their places, and one has not
        answered yet."""
        places = self._places
        return places is not None and any(
            line.rank not in places and not line.is_done for line in self._lines
        )

    def _accept(self, selector: selectors.BaseSelector) -> None:
        line = _JsonSocket(self._listener.accept()[0])
        with self._lock:
            self._lines.append(line)
            for number in self._requests:
                line.send(request=number)
        if self._places is not None:
            line.send(where=True)
        selector.register(line.socket, selectors.EVENT_READ, line)

    def _hear(self, line: _JsonSocket) -> bool:
        """Handle the messages of a connection; return whether it is still open."""
        messages = line.receive()
        for message in messages or ():
            match message:
                case {"hello": int(rank), "pid": int(pid)}:
                    line.rank, line.pid = rank, pid
                    self._known.add(pid)
                case {"failed": dict(failed)}:
                    self.failures.append(Failure(**failed))
                    line.is_done = True
                    self._ask_for_places(self.failures[-1])
                case {"place": dict(place)} if self._places is not None:
                    self._places[line.rank] = Whereabouts(**place)
                case {"stalled": float(seconds)} if self._places is None:
                    text = f"timed out: it has not moved for {seconds:.0f} s"
                    self._stalled = seconds
                    self.failures.append(Failure(line.rank, "connection", text, time.time()))
                    self._ask_for_places(self.failures[-1])
                case {"done": int(result)}:
                    line.is_done = True
                    self.result = result if line.rank == 0 else self.result
                    self._num_done += 1
        return messages is not None

    def _ask_for_places(self, failure: Failure) -> None:
        """Ask all ranks where they are after a failure that is a timeout."""
        if self._places is None and "timed out" in failure.text.lower():
            self._places = {}
            for line in self._lines:
                line.send(where=True)

    def _named(self, cause: Failure) -> Failure:
        """Return the cause; in place of a rank that waited in vain, those that it waited for, or
        all, if none of them moves."""
        if cause.kind != "connection" or self._places is None:
            return cause
        places = {
            line.rank: self._places.get(line.rank)
            for line in sorted(self._lines, key=lambda line: line.rank)
            if line.rank >= 0 and not line.is_done
        }
        stuck = [rank for rank, place in places.items() if place is None or not place.waits]
        if not stuck and not self._stalled:
            return cause
        named = {rank: places[rank] for rank in stuck or places}
        texts = "; ".join(
            f"rank {rank} " + ("does not answer" if place is None else f"is in {place.text}")
            for rank, place in named.items()
        )
        if len(named) == len(places) and self._stalled:
            text = f"no rank has moved for {self._stalled:.0f} s: {texts}"
        elif self._stalled:
            text = f"{texts}, and the others have waited for it for {self._stalled:.0f} s"
        else:
            text = f"{texts}, and the others have waited for it longer than parallel.timeout"
        return Failure(min(named), "stuck", text, cause.when)

    def _lost(self, line: _JsonSocket) -> None:
        with self._lock:
            self._lines.remove(line)
        line.socket.close()
        if not line.is_done and line.rank >= 0:
            when = time.time()  # before asking, which may take a moment
            self.failures.append(Failure(line.rank, "died", self._died(line.pid), when))

    def _look_for_deaths(self) -> None:
        for pid, text in self._watch().items():
            if pid not in self._known:
                self._known.add(pid)
                self.failures.append(Failure(-1, "died", text, time.time()))

    def _end(self, cause: Failure) -> None:
        self.cause = cause = self._named(cause)
        # rank 0 last: the hub may be in it
        for line in sorted(self._lines, key=lambda line: -line.rank):
            line.send(end=asdict(cause))
        self._on_end(cause)


class Lifeline:
    """A rank's connection to the hub. Its thread calls `on_end` with the failure that ends the job,
    or None if the connection to the hub is lost. `requests`: the rank's requests, to which it adds
    those of the hub."""

    def __init__(
        self,
        address: tuple[str, int],
        rank: int,
        on_end: Callable[[Failure | None], None],
        requests: Requests | None = None,
        patience: float | None = None,
    ) -> None:
        """`patience`: seconds of a standstill in a training step that is reported; None: none
        is."""
        self.rank = rank
        self._on_end, self._requests = on_end, requests or Requests()
        self._line = _JsonSocket(socket.create_connection(address, timeout=30))
        self._line.socket.settimeout(None)
        self._line.send(hello=rank, pid=os.getpid())
        threading.Thread(target=self._listen, name="lather-lifeline", daemon=True).start()
        if patience is not None:
            watch = threading.Thread(target=self._watch, args=(patience,), daemon=True)
            watch.start()

    def fail(self, error: BaseException) -> NoReturn:
        """Report the error that ended this rank, and exit with the other ranks."""
        self._line.send(failed=asdict(Failure.of(self.rank, error)))
        time.sleep(2 * UNWIND_SECONDS)  # `on_end` ends the process meanwhile
        os._exit(1)

    def done(self, result: int) -> None:
        """Report that this rank is done, and its result; it then no longer exits when the hub
        does."""
        self._line.is_done = True
        self._line.send(done=result)

    def _watch(self, patience: float) -> None:
        """Report a standstill, once."""
        standstill = Standstill(patience)
        while not self._line.is_done:
            time.sleep(min(1.0, patience / 10))
            if standstill.is_reached(time.monotonic()):
                self._line.send(stalled=float(patience))
                return

    def _listen(self) -> None:
        while (messages := self._line.receive()) is not None:
            for message in messages:
                match message:
                    case {"request": int(number)}:
                        self._requests.add(number)
                    case {"where": True}:
                        self._line.send(place=asdict(whereabouts()))
                    case {"end": dict(failure)}:
                        self._on_end(Failure(**failure))
        if not self._line.is_done:
            self._on_end(None)
