"""Named numpy arrays in anonymous memory that a parent shares with its sub-processes."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np

__all__ = ["ArrayLayout", "SharedArrays"]

_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class ArrayLayout:
    """Name, shape and dtype of every array, in order."""

    entries: tuple[tuple[str, tuple[int, ...], str], ...]

    def offsets(self) -> tuple[list[int], int]:
        """Byte offset of each array, and the total size."""
        offsets, position = [], 0
        for _, shape, dtype in self.entries:
            offsets.append(position)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            position += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offsets, max(position, _ALIGNMENT)


class SharedArrays:
    """Arrays as items, ``arrays["main"]``; the memory goes when the last process unmaps it.

    The memory is a file descriptor without a name, handed to children by inheritance: nothing is
    left behind whatever way the processes end.

    Args:
        layout: What to allocate.
        descriptor: Memory made by another process; None allocates.
    """

    def __init__(self, layout: ArrayLayout, descriptor: int | None = None) -> None:
        self.layout = layout
        offsets, size = layout.offsets()
        if descriptor is None:
            descriptor = os.memfd_create("rlinf_wamrl_envs", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            self._finalizer = weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._arrays = {
            name: np.frombuffer(
                self._memory, dtype=dtype, count=int(np.prod(shape)), offset=offset
            ).reshape(shape)
            for (name, shape, dtype), offset in zip(layout.entries, offsets, strict=True)
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]
