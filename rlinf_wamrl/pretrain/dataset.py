"""Training windows cut from recorded episodes, with latents computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlinf_wamrl.data.lerobot_dataset import LeRobotDataset
from rlinf_wamrl.data.recorded_episode import Episode
from rlinf_wamrl.normalisation import DatasetStatistics, compute_statistics
from rlinf_wamrl.processing import Processor, pixels_to_unit
from rlinf_wamrl.wam.text import TextEncoder
from rlinf_wamrl.wam.vae import VideoVAE

__all__ = ["Windows", "episode_videos", "load_successes", "statistics_of", "window_indices"]


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Every window of every episode, ready to be drawn: N windows of H actions."""

    latents: Tensor  # [N,C_lat,f,h,w] float16
    actions: Tensor  # [N,H,A] float32, normalised
    action_is_pad: Tensor  # [N,H] bool, past the end of the episode
    image_is_pad: Tensor  # [N,F] bool, likewise
    proprio: Tensor  # [N,P] float32, normalised
    instruction: Tensor  # [N] int64, row of ``context``
    instructions: tuple[str, ...]  # I of them
    context: Tensor  # [I,L,D] their text embeddings
    context_mask: Tensor  # [I,L] bool

    def __len__(self) -> int:
        return self.latents.shape[0]

    def sample(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the windows ``rows`` as a sample of ``WAM.training_loss``."""
        instruction = self.instruction[rows]
        return {
            "video_latents": self.latents[rows].float(),
            "action": self.actions[rows],
            "action_is_pad": self.action_is_pad[rows],
            "image_is_pad": self.image_is_pad[rows],
            "proprio": self.proprio[rows].unsqueeze(1),
            "context": self.context[instruction],
            "context_mask": self.context_mask[instruction],
        }

    def weights(self, shares: Mapping[str, float] | None) -> Tensor:
        """Return how likely each window is drawn, float64 [N], not normalised.

        Args:
            shares: instruction -> share of the windows drawn, relative to the others; None
                weighs all windows alike.

        Raises:
            ValueError: an instruction without a share, a share without windows, or none positive.
        """
        if shares is None:
            return torch.ones(len(self), dtype=torch.float64)
        if set(shares) != set(self.instructions):
            raise ValueError(
                f"train.task_weights names {sorted(shares)}, but the data shows "
                f"{sorted(self.instructions)}: give each of these a share, or none at all"
            )
        share = torch.tensor([shares[name] for name in self.instructions], dtype=torch.float64)
        if not (share >= 0).all() or not share.sum() > 0:
            raise ValueError(f"train.task_weights must not be negative, nor all 0: {dict(shares)}")
        counts = torch.bincount(self.instruction, minlength=len(share))
        return (share / counts)[self.instruction]

    @classmethod
    def build(
        cls,
        episodes: Sequence[Episode],
        processor: Processor,
        vae: VideoVAE,
        text_encoder: TextEncoder,
        *,
        horizon: int,
        num_frames: int,
    ) -> Windows:
        """Cut a window at every step of every episode.

        Args:
            episodes: recorded episodes.
            processor: prepares pictures, proprioception and actions.
            vae: encodes the frames.
            text_encoder: encodes the instructions.
            horizon: H actions.
            num_frames: F frames, the current one included, spread over the horizon.
        """
        instructions = sorted({episode.instruction for episode in episodes})
        context, mask = text_encoder.encode(instructions)
        columns: dict[str, list[Tensor]] = {
            name: []
            for name in (
                "latents",
                "actions",
                "action_is_pad",
                "image_is_pad",
                "proprio",
                "instruction",
            )
        }
        for episode in episodes:
            video = pixels_to_unit(processor.images(episode.main, episode.wrist))
            steps = len(episode.actions)
            frames, frame_pad, action_rows, action_pad = window_indices(steps, horizon, num_frames)
            clips = video[frames].transpose(1, 2)  # [T,3,F,H,W]
            columns["latents"].append(vae.encode(clips).half())
            actions = processor.normalise_actions(torch.from_numpy(episode.actions))
            columns["actions"].append(actions[action_rows])
            columns["action_is_pad"].append(action_pad)
            columns["image_is_pad"].append(frame_pad)
            columns["proprio"].append(processor.proprio(episode.proprio[:steps]))
            row = instructions.index(episode.instruction)
            columns["instruction"].append(torch.full((steps,), row))
        joined = {name: torch.cat(parts) for name, parts in columns.items()}
        return cls(instructions=tuple(instructions), context=context, context_mask=mask, **joined)


def window_indices(
    steps: int, horizon: int, num_frames: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return which frames and actions each window of an episode holds.

    Window t starts at step t: frames t, t + ratio, … (the last frame repeats past the end) and
    actions t … t + H − 1 (the last action repeats).

    Args:
        steps: T, actions of the episode (it has T + 1 frames).
        horizon: H.
        num_frames: F; ratio = H / (F − 1).

    Returns:
        Frame indices [T,F], their pad mask [T,F], action indices [T,H], their pad mask [T,H].
    """
    ratio = horizon // (num_frames - 1)
    if ratio * (num_frames - 1) != horizon:
        raise ValueError(f"{horizon} actions cannot be spread over {num_frames - 1} later frames")
    start = torch.arange(steps)[:, None]
    frames = start + ratio * torch.arange(num_frames)
    actions = start + torch.arange(horizon)
    return frames.clamp(max=steps), frames > steps, actions.clamp(max=steps - 1), actions >= steps


def load_successes(folder: str | Path) -> list[Episode]:
    """Read the successful episodes of a dataset, in order of task and number.

    Raises:
        FileNotFoundError: there is none.
    """
    try:
        dataset = LeRobotDataset(folder)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; run 'rlinf demos' first") from error
    episodes = sorted(
        dataset.episodes(only_success=True), key=lambda episode: (episode.task_id, episode.number)
    )
    if not episodes:
        raise FileNotFoundError(
            f"{folder} holds no successful episode among {len(dataset)}: run 'rlinf demos' first"
        )
    return episodes


def statistics_of(episodes: Sequence[Episode]) -> DatasetStatistics:
    """Return the statistics of actions and proprioception of the episodes."""
    return compute_statistics(
        (torch.from_numpy(episode.actions), torch.from_numpy(episode.proprio[:-1]))
        for episode in episodes
    )


def episode_videos(
    episodes: Sequence[Episode],
    processor: Processor,
    *,
    horizon: int,
    num_frames: int,
    stride: int = 1,
) -> Iterator[Tensor]:
    """Yield every ``stride``-th clip of each episode, [n,3,F,H,W] in [-1,1]."""
    for episode in episodes:
        video = pixels_to_unit(processor.images(episode.main, episode.wrist))
        frames, *_ = window_indices(len(episode.actions), horizon, num_frames)
        yield video[frames[::stride]].transpose(1, 2)
