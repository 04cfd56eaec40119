"""Random streams named by what they are for."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["random_stream"]


def random_stream(*key: int | str) -> torch.Generator:
    """Return a generator that is a pure function of ``key``, on every machine."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
