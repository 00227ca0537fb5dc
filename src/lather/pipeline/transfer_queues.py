"""When transfers between pipeline ranks end, if each rank's transfers wait in queues.

NCCL executes the operations of one communicator in the order in which a rank started them. A
receive whose sender is not there yet holds up everything behind it, also what comes from, or goes
to, another rank. With one communicator for all ranks of a pipeline a step takes 30 to 45 % longer
than the table says, on four ranks or more; with one for each pair of neighbors, at most 1 %. A
transfer starts when it is the first of its queue on both ranks (a rendezvous).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from lather.pipeline.schedule import RECEIVED_AS, TRANSFERS, Action, Kind, Schedule

MOST_SENDS_UNDER_WAY = 2
"""Maximal number of unfinished sends of a rank; before a further one, the oldest is waited for.
gloo does not report when a send is complete, and sent tensors must not accumulate."""

Transfer = tuple[Kind, int, int]
"""A transfer by its receive: kind, stage and micro-batch."""
QueueOf = Callable[[Kind, int], Hashable]
"""Gives the queue of a rank's transfer of a kind with another rank."""
Line = tuple[int, Hashable]
"""A rank and one of its queues."""


def queue_per_neighbor(kind: Kind, peer: int) -> Hashable:
    """A communicator for each pair of neighbors, as the mesh makes them on GPUs."""
    return peer


def transfer_of(action: Action) -> Transfer:
    """Return the transfer of which an action is the sending or the receiving end."""
    assert action.micro_batch is not None
    if action.kind in RECEIVED_AS:
        return RECEIVED_AS[action.kind], action.stage + TRANSFERS[action.kind], action.micro_batch
    return action.kind, action.stage, action.micro_batch


class TransferQueues:
    """The queues of all ranks in one step."""

    def __init__(self, schedule: Schedule, duration: float, queue_of: QueueOf) -> None:
        """`duration`: the time of a transfer, once it has started."""
        self.ends: dict[Transfer, float] = {}
        """The end of every transfer that is known to take place."""
        self._schedule, self._duration, self._queue_of = schedule, duration, queue_of
        self._lines: defaultdict[Line, deque[Transfer]] = defaultdict(deque)
        self._free_at: defaultdict[Line, float] = defaultdict(float)
        self._posted: defaultdict[Transfer, list[tuple[Line, float]]] = defaultdict(list)
        """The ends of each transfer that were started, with the times."""

    def post(self, rank: int, action: Action, at: float) -> None:
        """Put the send or receive that `rank` starts at this time at the end of its queue."""
        line = rank, self._queue_of(action.kind, self._schedule.peer_of(action))
        transfer = transfer_of(action)
        self._lines[line].append(transfer)
        self._posted[transfer].append((line, at))
        self._advance(line)

    def _advance(self, line: Line) -> None:
        """Let the transfers take place that are now the first of their queues on both ranks."""
        changed = [line]
        while changed:
            waiting = self._lines[changed.pop()]
            if not waiting:
                continue
            transfer = waiting[0]
            both = self._posted[transfer]
            if len(both) < 2 or any(self._lines[one][0] != transfer for one, _ in both):
                continue
            start = max(max(at, self._free_at[one]) for one, at in both)
            self.ends[transfer] = start + self._duration
            for one, _ in both:
                self._free_at[one] = self.ends[transfer]
                self._lines[one].popleft()
                changed.append(one)
