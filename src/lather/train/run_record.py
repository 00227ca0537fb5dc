"""The rows of metrics of a run, which rank 0 alone writes, for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lather.config.changes import values_of
from lather.config.config import Config
from lather.files import read_rows
from lather.parallel.agreement import on_rank_0
from lather.parallel.mesh import Mesh
from lather.pipeline.timeline import FILE as TIMELINE
from lather.train.metrics import MetricsWriter, Row, cut_rows


class RunRecord:
    """Writes the rows of a run on rank 0; on the others it writes nothing.

    An error of writing is kept until all ranks have saved a checkpoint and end.
    """

    def __init__(
        self, config: Config, mesh: Mesh, resumed_step: int | None, note: Callable[[str], None]
    ) -> None:
        """Open the files on rank 0, cut to the step from which the run resumes; None for a run
        that begins."""
        self.error: OSError | None = None
        """The first error of writing."""
        self._writer: MetricsWriter | None = None
        self._path, self._group = Path(config.run_dir), mesh.control_group
        if mesh.rank == 0:
            if (self._path / TIMELINE).exists():
                cut_rows(self._path / TIMELINE, resumed_step)
            self._writer = MetricsWriter(
                self._path, resumed_step, config.log, values_of(config), note
            )

    @property
    def writes(self) -> bool:
        """Whether this rank writes the rows."""
        return self._writer is not None

    def write(self, row: Row) -> None:
        self._do(lambda writer: writer.write(row))

    def sync(self) -> None:
        """Flush all rows to disk."""
        self._do(MetricsWriter.sync)

    def close(self) -> None:
        self._do(MetricsWriter.close)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows on rank 0, and none on the others."""
        return [] if self._writer is None else read_rows(self._writer.path)

    def of_rows(self, choose: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Return on all ranks what `choose` makes of the rows on rank 0. All ranks call it."""
        return on_rank_0(lambda: choose(self.rows()), self._group)

    def _do(self, write: Callable[[MetricsWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            self.error = self.error or error
