"""Where the meshes and textures of the real LIBERO suites come from."""

from __future__ import annotations

from pathlib import Path

__all__ = ["resolve_libero_root"]


def resolve_libero_root(suite: str, assets_dir: str | Path | None) -> Path:
    """Folder that holds ``assets/`` for a suite."""
    raise FileNotFoundError(suite)
