"""Where a checkpoint named in a configuration lies."""

from __future__ import annotations

from pathlib import Path

__all__ = ["checkpoint_folder", "shipped_checkpoints"]

_ROOT = Path(__file__).parent.parent / "pretrained"


def shipped_checkpoints() -> list[str]:
    """Return the names of the checkpoints that ship with the package."""
    if not _ROOT.is_dir():
        return []
    return sorted(entry.name for entry in _ROOT.iterdir() if (entry / "config.json").is_file())


def checkpoint_folder(name_or_path: str) -> Path:
    """Return the folder of a shipped checkpoint, or ``name_or_path`` itself.

    Raises:
        FileNotFoundError: it is neither.
    """
    if name_or_path in shipped_checkpoints():
        return _ROOT / name_or_path
    if not Path(name_or_path).is_dir():
        raise FileNotFoundError(
            f"{name_or_path!r} is neither a folder nor a checkpoint that ships with the package "
            f"({', '.join(shipped_checkpoints()) or 'none'})"
        )
    return Path(name_or_path)
