"""The learner's part of a checkpoint: one file with all that training changes.

``<run folder>/checkpoints/global_step_N/actor/learner.pt`` holds ``step``, ``model`` (trained
weights by name), ``optimizer`` and ``lr_scheduler``. The frozen base is never written.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_learner", "read_trained_weights", "write_learner"]

LEARNER_FILE = "learner.pt"


def write_learner(folder: str | Path, state: dict[str, Any]) -> None:
    """Write the learner's state into an existing folder, flushed to disk."""
    with (Path(folder) / LEARNER_FILE).open("wb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def read_learner(folder: str | Path) -> dict[str, Any]:
    """Read what :func:`write_learner` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    file = Path(folder) / LEARNER_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no learner checkpoint ({LEARNER_FILE})")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def read_trained_weights(global_step_folder: str | Path) -> dict[str, Tensor]:
    """Return the trained weights of a ``global_step_N`` folder."""
    return read_learner(Path(global_step_folder) / "actor")["model"]
