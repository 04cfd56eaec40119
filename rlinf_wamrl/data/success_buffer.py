"""Successful episodes for video fine-tuning: bounded, crash-safe, and the same after a resume.

Shape symbols: T steps of an episode, F images of a window, H its actions, A and P widths of action
and proprioception, s the stride at which images are kept.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.data.episode_store import EpisodeStore
from rlinf_wamrl.data.success_episode import EpisodeInfo, EpisodeSlice, SuccessEpisode

__all__ = ["SuccessBuffer", "VideoWindows"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoWindows:
    """A batch of training windows; past the end of an episode its last entry is repeated."""

    video: Tensor  # uint8 [B, 3, F, height, width], every ratio-th step
    action: Tensor  # float32 [B, H, A], executed
    proprio: Tensor  # float32 [B, H, P], before each action
    image_is_pad: Tensor  # bool [B, F]
    action_is_pad: Tensor  # bool [B, H]
    task_id: Tensor  # int64 [B]
    instruction: list[str]  # B


class SuccessBuffer:
    """Keeps the newest successful episodes within a limit of bytes.

    The newest episodes stay in memory; older ones move to ``directory`` as soon as more than
    ``memory_bytes`` are held, one file each, which appears only when it is complete. When the whole
    exceeds ``capacity_bytes`` the oldest episodes are evicted.

    Checkpoints: :meth:`state_dict` writes what is only in memory and returns the index, so the
    episodes themselves are in the directory, not in the checkpoint. Files of episodes evicted since
    then are kept until the checkpoint after the next, so that a run that crashes at any moment can
    go on from its last checkpoint, or the one before it, as if nothing had happened. They come on
    top of ``capacity_bytes``.

    A new buffer on a directory with complete episodes takes them over. A directory belongs to one
    buffer.

    Args:
        capacity_bytes: Limit for all episodes together.
        memory_bytes: Limit for the episodes in memory.
        directory: Where older episodes go; without one, everything has to fit into memory.

    Raises:
        ValueError: Limits that contradict each other.
    """

    def __init__(
        self, *, capacity_bytes: int, memory_bytes: int, directory: str | Path | None = None
    ) -> None:
        if capacity_bytes < 1 or memory_bytes < 0:
            raise ValueError(
                f"capacity_bytes ({capacity_bytes}) must be positive and memory_bytes "
                f"({memory_bytes}) not negative."
            )
        if directory is None and memory_bytes < capacity_bytes:
            raise ValueError(
                f"capacity_bytes ({capacity_bytes}) above memory_bytes ({memory_bytes}) needs a "
                "directory for the episodes that don't fit into memory."
            )
        self._capacity = capacity_bytes
        self._memory_limit = memory_bytes
        self._store = None if directory is None else EpisodeStore(directory)
        self._index: OrderedDict[int, EpisodeInfo] = OrderedDict()
        self._memory: dict[int, SuccessEpisode] = {}
        # Evicted files that a checkpoint may name: since the last one, and between the last two.
        self._evicted: list[int] = []
        self._evicted_before: list[int] = []
        self._next_id = 0
        if self._store is not None:
            self._index.update(self._store.scan())
            self._next_id = max(self._index, default=-1) + 1
            self._shrink()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Bytes of all episodes, in memory and on disk."""
        return sum(info.nbytes for info in self._index.values())

    @property
    def memory_nbytes(self) -> int:
        """Bytes of the episodes in memory."""
        return sum(self._index[episode_id].nbytes for episode_id in self._memory)

    @property
    def infos(self) -> list[EpisodeInfo]:
        """What is known of every episode without its frames, oldest first."""
        return list(self._index.values())

    def add(self, episode: SuccessEpisode) -> None:
        """Take in a successful episode, moving or evicting older ones as the limits ask.

        Args:
            episode: Kept as it is, not copied, unless its tensors share memory with others.

        Raises:
            ValueError: The episode alone exceeds the capacity.
        """
        info = episode.info
        if info.nbytes > self._capacity:
            raise ValueError(
                f"an episode of {info.nbytes} bytes exceeds the buffer's capacity_bytes "
                f"({self._capacity})."
            )
        self._index[self._next_id] = info
        self._memory[self._next_id] = episode.with_own_storage()
        self._next_id += 1
        self._shrink()

    def _shrink(self) -> None:
        total = self.nbytes
        while total > self._capacity:
            episode_id, info = self._index.popitem(last=False)
            total -= info.nbytes
            self._memory.pop(episode_id, None)
            if self._store is not None and self._store.holds(episode_id):
                self._evicted.append(episode_id)
        held = self.memory_nbytes
        for episode_id in sorted(self._memory):
            if held <= self._memory_limit:
                break
            self._persist(episode_id)
            held -= self._memory.pop(episode_id).info.nbytes

    def _persist(self, episode_id: int) -> None:
        if not self._store.holds(episode_id):
            self._store.write(episode_id, self._memory[episode_id])

    def sample(
        self, batch_size: int, *, action_horizon: int, ratio: int, generator: torch.Generator
    ) -> VideoWindows:
        """Draw training windows, every start in every episode with the same probability.

        A window is H actions and the F = H / ratio + 1 images around them, the last one after the
        last action. Windows may run past the end of an episode; the masks say where.

        Args:
            batch_size: Number of windows B.
            action_horizon: H.
            ratio: Actions per image; a multiple of the stride of every episode.
            generator: Source of all randomness; equal generators and buffers give equal windows.

        Raises:
            ValueError: The buffer is empty, or sizes that don't divide.
        """
        if not self._index:
            raise ValueError("cannot sample from a success buffer without any episode.")
        if ratio < 1 or action_horizon % ratio:
            raise ValueError(
                f"action_horizon ({action_horizon}) must be a multiple of ratio ({ratio})."
            )
        for info in self._index.values():
            if ratio % info.frame_stride:
                raise ValueError(
                    f"ratio ({ratio}) must be a multiple of the stride at which episodes keep "
                    f"images ({info.frame_stride})."
                )
        starts = torch.tensor([info.num_frames for info in self._index.values()])
        ends = starts.cumsum(0)
        draws = torch.randint(int(ends[-1]), (batch_size,), generator=generator)
        positions = torch.searchsorted(ends, draws, right=True)
        ids = list(self._index)
        windows = []
        for draw, position in zip(draws.tolist(), positions.tolist(), strict=True):
            episode_id = ids[position]
            first_frame = draw - int(ends[position] - starts[position])
            windows.append(self._window(episode_id, first_frame, action_horizon, ratio))
        return _stack_windows(windows)

    def _window(
        self, episode_id: int, first_frame: int, horizon: int, ratio: int
    ) -> tuple[EpisodeInfo, EpisodeSlice, Tensor, Tensor]:
        info = self._index[episode_id]
        steps = first_frame * info.frame_stride + torch.arange(horizon)
        frames = first_frame + torch.arange(horizon // ratio + 1) * (ratio // info.frame_stride)
        episode = self._memory.get(episode_id)
        source = self._store.open(episode_id) if episode is None else episode
        rows = source.slice(
            frames.clamp(max=info.num_frames - 1), steps.clamp(max=info.num_steps - 1)
        )
        return info, rows, frames >= info.num_frames, steps >= info.num_steps

    def state_dict(self) -> dict[str, Any]:
        """Index for a checkpoint; with a directory, every episode is on disk afterwards.

        Without a directory the episodes themselves are part of the state.
        """
        state: dict[str, Any] = {
            "next_id": self._next_id,
            "episodes": {episode_id: info.to_dict() for episode_id, info in self._index.items()},
        }
        if self._store is None:
            state["data"] = {key: episode.to_tensors() for key, episode in self._memory.items()}
            return state
        for episode_id in self._memory:
            self._persist(episode_id)
        for episode_id in self._evicted_before:
            self._store.delete(episode_id)
        self._evicted_before, self._evicted = self._evicted, []
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Return to a checkpoint's content; episodes that came later are deleted.

        Args:
            state: Result of :meth:`state_dict` of a buffer on the same directory.
            strict: Whether an episode that is gone is an error; else the others are taken.

        Raises:
            ValueError: Episodes of the checkpoint are missing on disk, or the state is of a buffer
                without a directory and this one has one (or the other way round).
        """
        if ("data" in state) != (self._store is None):
            raise ValueError(
                "the success buffer's state was saved "
                f"{'without' if 'data' in state else 'with'} a directory, this buffer has been "
                f"made {'without' if self._store is None else 'with'} one."
            )
        index = {int(key): EpisodeInfo.from_dict(info) for key, info in state["episodes"].items()}
        if self._store is None:
            memory = {
                int(key): SuccessEpisode.from_tensors(tensors, index[int(key)])
                for key, tensors in state["data"].items()
            }
        else:
            missing = [key for key in index if not self._store.holds(key)]
            if missing and strict:
                raise ValueError(
                    f"episodes {missing} of the checkpoint are no longer in "
                    f"{self._store.directory}: resume from a newer checkpoint, or load with "
                    f"strict=False to go on with the other {len(index) - len(missing)}."
                )
            if missing:
                _logger.warning("success buffer goes on without the lost episodes %s", missing)
            index = {key: info for key, info in index.items() if key not in missing}
            memory = {}
        self._index = OrderedDict(sorted(index.items()))
        self._memory = memory
        self._next_id = int(state["next_id"])
        self._evicted, self._evicted_before = [], []
        if self._store is not None:
            for episode_id in self._store.ids():
                if episode_id >= self._next_id:  # came after the checkpoint
                    self._store.delete(episode_id)
                elif episode_id not in self._index:  # an earlier checkpoint may name it
                    self._evicted_before.append(episode_id)
        self._shrink()


def _stack_windows(
    windows: Sequence[tuple[EpisodeInfo, EpisodeSlice, Tensor, Tensor]],
) -> VideoWindows:
    infos, rows, image_pads, action_pads = zip(*windows, strict=True)
    return VideoWindows(
        video=torch.stack([row.frames for row in rows]).transpose(1, 2).contiguous(),
        action=torch.stack([row.executed_actions for row in rows]),
        proprio=torch.stack([row.proprio for row in rows]),
        image_is_pad=torch.stack(image_pads),
        action_is_pad=torch.stack(action_pads),
        task_id=torch.tensor([info.task_id for info in infos]),
        instruction=[info.instruction for info in infos],
    )
