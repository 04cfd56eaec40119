"""Writing files and folders so that a reader never sees half of them."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_folder", "atomic_path", "set_aside", "write_text_atomic"]


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
    temporary = _beside(target, "tmp")
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


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that becomes ``target`` when the block succeeds.

    Every file in it is flushed to disk before the rename. A folder cannot be replaced in one step:
    with ``overwrite`` the old one is moved aside first and deleted last, so that after a crash in
    between its content still lies beside ``target`` under a name that ends in ``.old``.

    Args:
        target: folder to write; missing parent folders are created.
        overwrite: whether an existing ``target`` may be replaced.

    Raises:
        FileExistsError: ``target`` exists and ``overwrite`` is false.
    """
    target = Path(target)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already: choose another folder or overwrite it")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target, "tmp")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            _sync(path, os.O_RDONLY)
        old = _beside(target, "old") if target.exists() else None
        if old is not None:
            target.replace(old)
        temporary.replace(target)
        _sync(target.parent, os.O_RDONLY)
        if old is not None:
            shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a folder to its name and the first free number, ``run.1``; returns the new path."""
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _beside(target: Path, ending: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.{ending}")


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
