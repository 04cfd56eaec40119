"""The learner's part of a checkpoint: all that training changes, never the frozen base.

``<run folder>/checkpoints/global_step_N/actor/learner.pt`` holds ``step``, ``model`` (trained
weights by name), ``optimizers``, ``lr_scheduler`` and, of the reward's ``imagination``, the
normaliser and the fixed batch; ``learner_rank_R.pt`` the success buffer's index and the feature
statistics of a rank.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_learner", "read_trained_weights", "write_learner"]


def _file_name(rank: int | None) -> str:
    return "learner.pt" if rank is None else f"learner_rank_{rank}.pt"


def write_learner(folder: str | Path, state: dict[str, Any], rank: int | None = None) -> None:
    """Write the learner's state into an existing folder, flushed to disk.

    Args:
        folder: where to.
        state: what to write.
        rank: of whom, for what differs between ranks; None for what they share.
    """
    with (Path(folder) / _file_name(rank)).open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def read_learner(folder: str | Path, rank: int | None = None) -> dict[str, Any]:
    """Read what :func:`write_learner` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    file = Path(folder) / _file_name(rank)
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no learner checkpoint ({file.name})")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever damaged bytes lead it to
        raise ValueError(f"{file} is damaged: {error}") from error


def read_trained_weights(global_step_folder: str | Path) -> dict[str, Tensor]:
    """Return the trained weights of a ``global_step_N`` folder."""
    return read_learner(Path(global_step_folder) / "actor")["model"]
