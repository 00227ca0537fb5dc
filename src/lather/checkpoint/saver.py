"""Saves checkpoints while training continues: tensors are copied to CPU memory, and a thread writes the copies.

The thread runs all of `save_checkpoint`, including its planning. Training waits only until this rank's pieces have been copied. One
checkpoint is written at a time, and the next one waits for it. This takes as much CPU memory as the rank writes, from the first checkpoint
to the end of the run; for CUDA it is pinned, so that copies run at the speed of the bus. Of equal pieces on several ranks only one is
copied. The thread has its own process group, the mesh's `saving_group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lather.checkpoint.folder import Retention, checkpoint_path
from lather.checkpoint.save import save_checkpoint
from lather.checkpoint.state import TrainingState
from lather.checkpoint.table import Progress
from lather.device import gpu_module, is_gpu
from lather.optim.sharded.placement import PieceKey


class Staging:
    """CPU memory for copies of the tensors that a rank writes; it is reused for the next checkpoint."""

    def __init__(self, device: torch.device) -> None:
        """`device`: device of the tensors."""
        self.device = device
        self._kept: dict[PieceKey, Tensor] = {}

    @torch.no_grad()
    def copy(self, own: Mapping[PieceKey, Tensor]) -> Mapping[PieceKey, Tensor]:
        """Copy the tensors; the copies are complete on return."""
        self._kept = {index: self._room(index, value) for index, value in own.items()}
        for index, value in own.items():
            self._kept[index].copy_(value, non_blocking=True)
        if is_gpu(self.device):
            gpu_module(self.device).current_stream(self.device).synchronize()
        return self._kept

    def _room(self, index: PieceKey, value: Tensor) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            return kept
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=is_gpu(self.device))

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())


class Saver:
    """Writes a run's checkpoints, immediately or in a thread. All ranks call the same methods in the same order."""

    def __init__(self, folder: Path, state: TrainingState, *, retention: Retention, asynchronous: bool) -> None:
        self.folder, self.state, self.retention = folder, state, retention
        self.staging = Staging(state.device) if asynchronous else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None

    def save(self, progress: Progress) -> Path:
        """Save a checkpoint and return its path, where a thread may still be writing it. Raises the error of the previous save if that
        failed."""
        self.wait()
        if self._thread is None:
            save_checkpoint(self.folder, progress, self.state, retention=self.retention)
        else:
            if is_gpu(self.state.device):
                gpu_module(self.state.device).current_stream(self.state.device).synchronize()  # the thread uses another stream
            copied: Future[None] = Future()
            self._writing = self._thread.submit(self._write, progress, self.retention, copied)
            copied.result()
        return checkpoint_path(self.folder, progress.step)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written; raises its error on all ranks."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, progress: Progress, retention: Retention, copied: Future[None]) -> None:
        assert self.staging is not None

        def stage(own: Mapping[PieceKey, Tensor]) -> Mapping[PieceKey, Tensor]:
            assert self.staging is not None
            staged = self.staging.copy(own)
            copied.set_result(None)
            return staged

        try:
            if is_gpu(self.state.device):
                gpu_module(self.state.device).set_device(self.state.device)
            save_checkpoint(self.folder, progress, self.state, retention=retention, stage=stage)
        finally:
            if not copied.done():  # the save failed, or the checkpoint exists already
                copied.set_result(None)
