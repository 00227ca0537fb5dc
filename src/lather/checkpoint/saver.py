"""Saving while training goes on: what is to be written is copied to CPU memory, and a thread writes the copy.

The thread does all of `save_checkpoint`, planning first. Training waits until this rank's pieces have been copied, and goes on while files
are written, synced, and renamed by rank 0. One checkpoint is written at a time: the next one waits for it. It costs CPU memory for all that
a rank writes, of weights and optimizer state, from the first checkpoint to the end of the run; on CUDA it is pinned, so that copying is as
fast as the bus. Of equal copies on several ranks one is kept. The thread has a process group of its own, the mesh's `saving_group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lather.checkpoint.folder import Retention, checkpoint_path
from lather.checkpoint.save import save_checkpoint
from lather.checkpoint.state import Key, TrainingState
from lather.checkpoint.table import Progress
from lather.device import gpu_module, is_gpu


class Staging:
    """Memory on the CPU for what a rank writes, kept from one checkpoint to the next."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the tensors."""
        self.device = device
        self._kept: dict[Key, Tensor] = {}

    @torch.no_grad()
    def copy(self, own: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        """Copies, which are complete when this returns."""
        self._kept = {index: self._room(index, value) for index, value in own.items()}
        for index, value in own.items():
            self._kept[index].copy_(value, non_blocking=True)
        if is_gpu(self.device):
            gpu_module(self.device).current_stream(self.device).synchronize()
        return self._kept

    def _room(self, index: Key, value: Tensor) -> Tensor:
        kept = self._kept.get(index)
        if kept is not None and (kept.shape, kept.dtype) == (value.shape, value.dtype):
            return kept
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=is_gpu(self.device))

    @property
    def num_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())


class Saver:
    """Writes a run's checkpoints, at once or beside the run. All ranks call the same methods in the same order."""

    def __init__(self, folder: Path, state: TrainingState, *, retention: Retention, asynchronous: bool) -> None:
        self.folder, self.state, self.retention = folder, state, retention
        self.staging = Staging(state.device) if asynchronous else None
        self._thread = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writing: Future[None] | None = None

    def save(self, progress: Progress) -> Path:
        """Returns the path where the checkpoint is, or will be. What went wrong with the one before is raised here."""
        self.wait()
        if self._thread is None:
            save_checkpoint(self.folder, progress, self.state, retention=self.retention)
        else:
            if is_gpu(self.state.device):
                gpu_module(self.state.device).current_stream(self.state.device).synchronize()  # the thread has another current stream
            copied: Future[None] = Future()
            self._writing = self._thread.submit(self._write, progress, self.retention, copied)
            copied.result()
        return checkpoint_path(self.folder, progress.step)

    def wait(self) -> None:
        """For the checkpoint that is being written. Raises what went wrong, on all ranks."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, progress: Progress, retention: Retention, copied: Future[None]) -> None:
        assert self.staging is not None

        def stage(own: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
            assert self.staging is not None
            staged = self.staging.copy(own)
            copied.set_result(None)
            return staged

        try:
            if is_gpu(self.state.device):
                gpu_module(self.state.device).set_device(self.state.device)
            save_checkpoint(self.folder, progress, self.state, retention=retention, stage=stage)
        finally:
            if not copied.done():  # it failed, or the checkpoint is there already
                copied.set_result(None)
