"""Episodes on disk, one safetensors file each; a file that exists is complete."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlinf_wamrl.data.success_episode import EpisodeInfo, EpisodeSlice, SuccessEpisode
from rlinf_wamrl.files import atomic_path

__all__ = ["EpisodeStore", "StoredEpisode"]

_logger = logging.getLogger(__name__)
_NAME = re.compile(r"episode_(\d+)\.safetensors")


class EpisodeStore:
    """A folder of numbered episodes.

    Files are written under a temporary name, flushed and renamed, so a crash leaves either a
    complete file or none. What a crashed writer left behind is removed on opening the folder.

    Args:
        directory: Folder, made when missing.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob(".episode_*.tmp"):
            leftover.unlink()
        self._ids = {
            int(match.group(1))
            for path in self.directory.iterdir()
            if (match := _NAME.fullmatch(path.name))
        }

    def ids(self) -> list[int]:
        """Numbers of the episodes in the folder, ascending."""
        return sorted(self._ids)

    def holds(self, episode_id: int) -> bool:
        """Whether an episode is on disk."""
        return episode_id in self._ids

    def scan(self) -> dict[int, EpisodeInfo]:
        """Read the headers of all episodes, oldest first.

        Files that can't be read, damaged by something else than this class, are named in a warning
        and left out.
        """
        infos = {}
        for episode_id in self.ids():
            try:
                infos[episode_id] = self.open(episode_id).info
            except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
                _logger.warning("%s is left out: %s", self._path(episode_id), error)
                self._ids.discard(episode_id)
        return infos

    def write(self, episode_id: int, episode: SuccessEpisode) -> None:
        """Store an episode; it is on disk and complete when this returns."""
        header = {key: str(value) for key, value in episode.info.to_dict().items()}
        tensors = {name: tensor.contiguous() for name, tensor in episode.to_tensors().items()}
        with atomic_path(self._path(episode_id)) as temporary:
            save_file(tensors, temporary, metadata=header)
        self._ids.add(episode_id)

    def open(self, episode_id: int) -> StoredEpisode:
        """Episode on disk, for reading parts of it."""
        return StoredEpisode(self._path(episode_id))

    def delete(self, episode_id: int) -> None:
        """Remove an episode's file."""
        self._path(episode_id).unlink(missing_ok=True)
        self._ids.discard(episode_id)

    def _path(self, episode_id: int) -> Path:
        return self.directory / f"episode_{episode_id:08d}.safetensors"


class StoredEpisode:
    """An episode on disk, of which only the rows that are asked for are read.

    Args:
        path: Its file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def info(self) -> EpisodeInfo:
        """What the file's header says of the episode."""
        with safe_open(self._path, framework="pt") as file:
            return EpisodeInfo.from_dict(file.metadata())

    def slice(self, frames: Tensor, steps: Tensor) -> EpisodeSlice:
        """Rows by index; see :meth:`SuccessEpisode.slice`."""
        with safe_open(self._path, framework="pt") as file:
            images = file.get_slice("frames")
            return EpisodeSlice(
                frames=torch.stack([images[index] for index in frames.tolist()]),
                executed_actions=file.get_tensor("executed_actions")[steps],
                proprio=file.get_tensor("proprio")[steps],
            )

    def load(self) -> SuccessEpisode:
        """The whole episode."""
        with safe_open(self._path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return SuccessEpisode.from_tensors(tensors, EpisodeInfo.from_dict(file.metadata()))
