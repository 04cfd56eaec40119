"""Messages as flat dicts of tensors, the form in which RLinf's channels copy data without pickling.

RLinf sends a dict of tensors as raw buffers, but pickles whatever it finds nested deeper inside a
message. Here a message becomes such a dict: each of its tensors once, however often it is named,
and one byte tensor with the pickled rest.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch

from rlinf_wamrl.data.batch_values import CompactPickle

__all__ = ["pack_message", "packed_nbytes", "unpack_message"]

_SKELETON = "skeleton"


def pack_message(message: Any) -> dict[str, torch.Tensor]:
    """Take a message apart into tensors.

    Args:
        message: Any picklable value with CPU tensors inside. Tensors are not copied unless they are
            not contiguous.

    Returns:
        The tensors by number and, under ``"skeleton"``, uint8 [n] for everything else.
    """
    buffer = io.BytesIO()
    pickler = _SkeletonPickler(buffer)
    pickler.dump(message)
    # The bytearray gives writable memory, which torch wants of a buffer it wraps.
    skeleton = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    return {
        _SKELETON: skeleton,
        **{str(index): tensor.contiguous() for index, tensor in enumerate(pickler.tensors)},
    }


def unpack_message(packed: dict[str, torch.Tensor]) -> Any:
    """Put a message together again; the inverse of :func:`pack_message`.

    Args:
        packed: Result of :func:`pack_message` from a trusted sender: the skeleton is unpickled.

    Returns:
        The message. Its tensors are those of ``packed``, aliases are aliases again.
    """
    return _SkeletonUnpickler(io.BytesIO(packed[_SKELETON].numpy().tobytes()), packed).load()


def packed_nbytes(packed: dict[str, torch.Tensor]) -> int:
    """Bytes that travel for a packed message."""
    return sum(tensor.numel() * tensor.element_size() for tensor in packed.values())


class _SkeletonPickler(pickle.Pickler):
    """Pickles everything but tensors, which it sets aside."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._index_by_id: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._index_by_id:
            self._index_by_id[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._index_by_id[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        # Views travel as the rows that they show, so the copies made for pickling are not needed.
        if isinstance(obj, CompactPickle):
            return copyreg.__newobj__, (type(obj),), vars(obj)
        return NotImplemented


class _SkeletonUnpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[str(pid)]
