"""Writing a file so that a reader never sees half of it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_path", "write_text_atomic"]


@contextmanager
def atomic_path(target: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that becomes ``target`` when the block succeeds.

    The content is flushed to disk before the rename, so after a crash ``target`` holds either the
    old content or the new one, never a part. Several processes may write the same target: each
    has its own temporary name and the last rename wins. When the block raises, the temporary file
    is removed and ``target`` stays as it was.

    Args:
        target: file to write; missing parent folders are created.

    Yields:
        Path of the temporary file, in the same folder (a rename is atomic only within one).
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        _sync(temporary, os.O_RDWR)
        temporary.replace(target)
        _sync(target.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomic(target: str | Path, text: str) -> None:
    """Write ``text`` to ``target`` as UTF-8 through :func:`atomic_path`."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
