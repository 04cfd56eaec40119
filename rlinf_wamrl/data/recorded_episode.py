"""One recorded episode with a picture of every step, as demonstrations and collections have it.

Shape symbols: T steps, H and W the size of one camera's picture, A and P the widths of action and
proprioception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Episode"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """One recorded episode of T steps.

    Raises:
        ValueError: Another dtype or shape than the fields say, or no steps.
    """

    main: np.ndarray  # uint8 [T+1, H, W, 3], before each step and after the last
    wrist: np.ndarray  # uint8 [T+1, H, W, 3]
    proprio: np.ndarray  # float32 [T+1, P]
    actions: np.ndarray  # float32 [T, A] what the expert wanted; the label
    executed_actions: np.ndarray  # float32 [T, A] what ran
    instruction: str
    task_id: int
    init_state_id: int
    success: bool
    number: int  # of its task's recording, or of its collection
    seed: int  # root of the recording's randomness, or of the environment

    def __post_init__(self) -> None:
        steps = len(self.actions)
        layout = {
            "main": (np.uint8, 4, steps + 1),
            "wrist": (np.uint8, 4, steps + 1),
            "proprio": (np.float32, 2, steps + 1),
            "actions": (np.float32, 2, steps),
            "executed_actions": (np.float32, 2, steps),
        }
        for name, (dtype, dims, rows) in layout.items():
            value = getattr(self, name)
            if value.dtype != dtype or value.ndim != dims or len(value) != rows or steps < 1:
                raise ValueError(
                    f"{name} of an episode of {steps} steps must be {np.dtype(dtype)} with {dims} "
                    f"dimensions and {rows} rows, got {value.dtype} {list(value.shape)}."
                )

    @classmethod
    def from_frames(cls, frames: Sequence[Mapping[str, Any]]) -> Episode:
        """Build an episode from the frames that the collector emits in LeRobot mode.

        What ran is the label too, whoever chose it.

        Args:
            frames: Frames in order of time, observed before their actions, with the ids and the
                final observation that :class:`~rlinf_wamrl.data.lerobot_episodes.EpisodeRecorder`
                adds.

        Raises:
            ValueError: No frames, or frames without those additions.
        """
        if not frames:
            raise ValueError("an episode needs at least one frame.")
        first, last = frames[0], frames[-1]
        needed = {"final_image", "final_wrist_image", "final_state"} - set(last)
        needed |= {"task_id", "init_state_id", "seed", "episode_id"} - set(first)
        if needed:
            raise ValueError(
                f"the frames lack {sorted(needed)}: the environment must report ids in its "
                "observations and the final observation in its infos."
            )

        def observed(name: str) -> np.ndarray:
            return np.stack([*(frame[name] for frame in frames), last[f"final_{name}"]])

        actions = np.stack([frame["actions"] for frame in frames])
        return cls(
            main=observed("image"),
            wrist=observed("wrist_image"),
            proprio=observed("state"),
            actions=actions,
            executed_actions=actions,
            instruction=first["task"],
            task_id=int(first["task_id"]),
            init_state_id=int(first["init_state_id"]),
            success=bool(last["is_success"].all()),
            number=int(first["episode_id"]),
            seed=int(first["seed"]),
        )
