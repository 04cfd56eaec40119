"""One successful episode: what the cameras saw and which actions were executed.

Shape symbols: T steps, A and P widths of action and proprioception, s the stride of the images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["EpisodeInfo", "EpisodeSlice", "SuccessEpisode"]

_TENSORS = ("frames", "executed_actions", "proprio")


@dataclass(frozen=True, kw_only=True)
class EpisodeInfo:
    """What is known of an episode without its tensors."""

    task_id: int
    instruction: str
    initial_state_id: int
    seed: int
    frame_stride: int  # s: image i was seen before action i * s
    num_steps: int  # T
    num_frames: int  # ceil(T / s)
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a file's header."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpisodeInfo:
        """Invert :meth:`to_dict`; numbers may come as text, as a file's header has them."""
        numbers = {key: int(value) for key, value in values.items() if key != "instruction"}
        return cls(instruction=str(values["instruction"]), **numbers)


@dataclass(frozen=True, kw_only=True, eq=False)
class EpisodeSlice:
    """Selected rows of an episode."""

    frames: Tensor  # uint8 [F, 3, height, width]
    executed_actions: Tensor  # float32 [n, A]
    proprio: Tensor  # float32 [n, P]


@dataclass(frozen=True, kw_only=True, eq=False)
class SuccessEpisode:
    """An episode that reached its goal.

    Row t of the actions is what was executed at step t, row t of the proprioception and the image
    of step t are what was observed before it.

    Raises:
        ValueError: Another dtype or shape than the fields say, or no steps.
    """

    frames: Tensor  # uint8 [ceil(T / s), 3, height, width]; [T, 3, height, width] at s = 1
    executed_actions: Tensor  # float32 [T, A]
    proprio: Tensor  # float32 [T, P]
    task_id: int
    instruction: str
    initial_state_id: int
    seed: int = 0
    frame_stride: int = 1  # s

    def __post_init__(self) -> None:
        layout = {
            "frames": (torch.uint8, 4),
            "executed_actions": (torch.float32, 2),
            "proprio": (torch.float32, 2),
        }
        for name, (dtype, dims) in layout.items():
            value = getattr(self, name)
            if value.dtype != dtype or value.dim() != dims:
                raise ValueError(
                    f"{name} of a successful episode must be {dtype} with {dims} dimensions, got "
                    f"{value.dtype} {list(value.shape)}."
                )
        steps = len(self.executed_actions)
        if steps < 1 or self.frame_stride < 1:
            raise ValueError(
                f"a successful episode needs steps and a positive frame_stride, got {steps} and "
                f"{self.frame_stride}."
            )
        if self.frames.shape[1] != 3:
            raise ValueError(
                f"frames must be [T, 3, height, width], got {list(self.frames.shape)}."
            )
        expected = {"frames": math.ceil(steps / self.frame_stride), "proprio": steps}
        for name, rows in expected.items():
            if len(getattr(self, name)) != rows:
                raise ValueError(
                    f"{steps} executed actions with images every {self.frame_stride} steps need "
                    f"{rows} rows of {name}, got {len(getattr(self, name))}."
                )

    @property
    def info(self) -> EpisodeInfo:
        """What is known of the episode without its tensors."""
        return EpisodeInfo(
            task_id=self.task_id,
            instruction=self.instruction,
            initial_state_id=self.initial_state_id,
            seed=self.seed,
            frame_stride=self.frame_stride,
            num_steps=len(self.executed_actions),
            num_frames=len(self.frames),
            nbytes=sum(tensor.nbytes for tensor in self.to_tensors().values()),
        )

    def slice(self, frames: Tensor, steps: Tensor) -> EpisodeSlice:
        """Rows by index: ``frames`` int64 [F] of the images, ``steps`` int64 [n] of the others."""
        return EpisodeSlice(
            frames=self.frames[frames],
            executed_actions=self.executed_actions[steps],
            proprio=self.proprio[steps],
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: getattr(self, name) for name in _TENSORS}

    def with_own_storage(self) -> SuccessEpisode:
        """The episode with every tensor in memory of its own, copied only where it isn't yet.

        A slice of a larger recording would keep all of that in memory, uncounted.
        """
        owned: dict[str, Tensor] = {}
        taken: set[int] = set()
        for name, tensor in self.to_tensors().items():
            storage = tensor.untyped_storage()
            if storage.nbytes() > tensor.nbytes or storage.data_ptr() in taken:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            taken.add(tensor.untyped_storage().data_ptr())
            owned[name] = tensor
        return replace(self, **owned)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], info: EpisodeInfo) -> SuccessEpisode:
        """Invert :meth:`to_tensors` together with :attr:`info`."""
        return cls(
            **{name: tensors[name] for name in _TENSORS},
            task_id=info.task_id,
            instruction=info.instruction,
            initial_state_id=info.initial_state_id,
            seed=info.seed,
            frame_stride=info.frame_stride,
        )

    @classmethod
    def from_frames(
        cls,
        frames: Sequence[Mapping[str, Any]],
        *,
        task_id: int | None = None,
        initial_state_id: int | None = None,
        seed: int | None = None,
        views: Sequence[str] = ("image", "wrist_image"),
    ) -> SuccessEpisode:
        """Build an episode from the frames that the collector emits in LeRobot mode.

        Args:
            frames: Frames in order of time, observed before their actions.
            task_id: Task of the episode; by default what the frames say.
            initial_state_id: Stored initial state it began from; likewise.
            seed: Seed of the environment; likewise, and 0 where they say nothing.
            views: Cameras to put side by side, uint8 [height, width, 3] each.

        Raises:
            ValueError: No frames, a failed episode, a camera that frames lack, or ids that neither
                they nor the caller give.
        """
        if not frames:
            raise ValueError("a successful episode needs at least one frame.")
        if not frames[-1]["is_success"].all():
            raise ValueError("the episode is not marked as a success.")
        missing = [view for view in views if view not in frames[0]]
        if missing:
            raise ValueError(f"the frames have no {missing}; they have {sorted(frames[0])}.")
        given = {"task_id": task_id, "init_state_id": initial_state_id}
        ids = {
            name: frames[0].get(name) if value is None else value for name, value in given.items()
        }
        unknown = [name for name, value in ids.items() if value is None]
        if unknown:
            raise ValueError(f"the frames do not say the episode's {unknown}: pass them.")
        pictures = np.stack([np.concatenate([f[view] for view in views], axis=1) for f in frames])
        return cls(
            frames=torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous(),
            executed_actions=torch.from_numpy(np.stack([frame["actions"] for frame in frames])),
            proprio=torch.from_numpy(np.stack([frame["state"] for frame in frames])),
            task_id=int(ids["task_id"]),
            instruction=frames[0]["task"],
            initial_state_id=int(ids["init_state_id"]),
            seed=int(frames[0].get("seed", 0) if seed is None else seed),
        )
