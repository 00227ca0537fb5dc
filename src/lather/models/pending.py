"""Communications that have been started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """A communication that has been started; it can be waited for once."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        """`finish` waits, and returns the result; it and the buffers that it holds are dropped
        afterwards."""
        self._finish: Callable[[], Result] | None = finish

    def wait(self) -> Result:
        """Return the result. On CUDA the current stream waits for it, not the host."""
        assert self._finish is not None, "this was waited for before"
        finish, self._finish = self._finish, None
        return finish()
