"""The learner's video half: adapters trained on videos of successes, held by a feature KL."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from rlinf_wamrl.data.success_buffer import SuccessBuffer
from rlinf_wamrl.data.success_episode import SuccessEpisode
from rlinf_wamrl.instructions import unpack_instructions
from rlinf_wamrl.policy_training import VideoLoss
from rlinf_wamrl.rl.losses import FeatureStatistics
from rlinf_wamrl.rl.moments import Moments
from rlinf_wamrl.workers.batches import task_rewards

__all__ = ["VideoHalf", "success_episodes"]

CALIBRATION_ROWS = 64
MIB = 2**20


class VideoHalf:
    """Keeps the successes of one rank and takes the video losses of its training steps."""

    def __init__(self, cfg: DictConfig, folder: Path, rank: int) -> None:
        """Open the success buffer in ``folder``."""
        self.options = cfg.RL.video_sft
        self.stride = cfg.env.train.action_video_freq_ratio
        self._seed = cfg.actor.seed
        self._rank = rank
        self.folder = folder / f"rank_{rank}"
        self.buffer = self._open_buffer()
        self.statistics: FeatureStatistics | None = None

    def collect(self, batch: Mapping[str, Any]) -> int:
        """Keep the successful episodes of a rollout [T,B,...]; returns how many there were."""
        episodes = success_episodes(batch, self.stride)
        for episode in episodes:
            self.buffer.add(episode)
        return len(episodes)

    def is_due(self, iteration: int) -> bool:
        """Whether iteration ``iteration`` (from 0) ends with video training."""
        options = self.options
        return iteration >= options.warmup and (iteration - options.warmup) % options.every == 0

    def calibrate(
        self,
        forward: Callable[..., Any],
        records: Mapping[str, Tensor],
        gather: Callable[[Tensor], list[Tensor]],
    ) -> None:
        """Measure the frozen features' variances, once, over all ranks.

        Args:
            forward: calls the policy.
            records: [N,...] in time-major order; rows spread evenly over it are taken, as the first
                ones would show the initial states alone.
            gather: returns a vector of every rank.
        """
        if self.statistics is not None or self.options.lambda_kl == 0:
            return
        ran = records["executed_mask"].any(dim=1).nonzero().squeeze(1)
        spread = torch.linspace(0, len(ran) - 1, min(CALIBRATION_ROWS, len(ran))).round().long()
        few = {name: value[ran[spread]] for name, value in records.items()}
        mine: Moments = forward(forward_type="calibration_moments", records=few)
        pieces = [mine.with_vector(vector) for vector in gather(mine.to_vector())]
        merged = pieces[0]
        for piece in pieces[1:]:
            merged = merged.merge(piece)
        self.statistics = FeatureStatistics.calibrate(merged)

    def loss(
        self, forward: Callable[..., VideoLoss], horizon: int, ratio: int, iteration: int, step: int
    ) -> VideoLoss:
        """Return the loss of one step on fresh windows, with gradient to the adapters."""
        generator = torch.Generator().manual_seed(
            self._seed + 7_919 * iteration + 104_729 * step + 15_485_863 * self._rank
        )
        windows = self.buffer.sample(
            self.options.batch_size, action_horizon=horizon, ratio=ratio, generator=generator
        )
        return forward(
            forward_type="video_loss",
            windows=windows,
            generator=generator,
            lambda_action=self.options.lambda_action,
            lambda_kl=self.options.lambda_kl,
            statistics=self.statistics,
        )

    def follow(self, loss: VideoLoss) -> None:
        """Move the live variance of the feature KL after a step."""
        if loss.live is not None:
            self.statistics = self.statistics.update(
                loss.live, loss.frozen, decay=self.options.kl_decay
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the buffer's index and the feature statistics."""
        statistics = None if self.statistics is None else self.statistics.state_dict()
        return {"buffer": self.buffer.state_dict(), "statistics": statistics}

    def _open_buffer(self) -> SuccessBuffer:
        return SuccessBuffer(
            capacity_bytes=self.options.buffer_mib * MIB,
            memory_bytes=min(self.options.buffer_memory_mib, self.options.buffer_mib) * MIB,
            directory=self.folder,
        )

    def load_state_dict(self, state: Mapping[str, Any], source: Path) -> None:
        """Continue from :meth:`state_dict`.

        Args:
            state: what to continue from.
            source: success buffers of the run that saved it; copied when it was another run.
        """
        theirs = source / self.folder.name
        if theirs.resolve() != self.folder.resolve() and theirs.is_dir():
            shutil.copytree(theirs, self.folder, dirs_exist_ok=True)
            self.buffer = self._open_buffer()
        self.buffer.load_state_dict(state["buffer"])
        if state["statistics"] is not None:
            self.statistics = FeatureStatistics.from_state_dict(state["statistics"])


def success_episodes(batch: Mapping[str, Any], stride: int) -> list[SuccessEpisode]:
    """Cut the successful episodes out of a rollout.

    Pictures come from before each chunk and from the frames captured inside it, one every
    ``stride`` actions; C must be a multiple of ``stride``.

    Args:
        batch: [T,B,...] with ``rewards``, ``forward_inputs`` (``image``, ``proprio``, ``action``,
            ``executed_mask``, ``instruction``, ids) and ``next_obs`` (``future_frames``,
            ``future_states`` normalised).
        stride: actions between two captured frames.
    """
    records, after = batch["forward_inputs"], batch["next_obs"]
    executed = records["executed_mask"]
    chunk = executed.shape[2]
    inside = chunk // stride - 1
    episodes = []
    solved = task_rewards(batch).sum(dim=(0, 2)) > 0
    for column in solved.nonzero().flatten().tolist():
        counts = executed[:, column].sum(dim=1)
        chunks, steps = int((counts > 0).sum()), int(counts.sum())
        frames = torch.cat(
            [
                records["image"][:chunks, column, None],
                after["future_frames"][:chunks, column, :inside],
            ],
            dim=1,
        ).flatten(0, 1)
        proprio = torch.cat(
            [
                records["proprio"][:chunks, column, None],
                after["future_states"][:chunks, column, :inside],
            ],
            dim=1,
        ).flatten(0, 1)
        actions = records["action"][:chunks, column].view(chunks, chunk, -1).flatten(0, 1)
        needed = -(-steps // stride)
        episodes.append(
            SuccessEpisode(
                frames=frames[:needed].contiguous(),
                executed_actions=actions[:steps].contiguous(),
                # windows start where there is a picture; between pictures the state is repeated
                proprio=proprio[:needed].repeat_interleave(stride, dim=0)[:steps].contiguous(),
                task_id=int(records["task_id"][0, column]),
                instruction=unpack_instructions(records["instruction"][0, column : column + 1])[0],
                initial_state_id=int(records["init_state_id"][0, column]),
                seed=int(records["seed"][0, column]),
                frame_stride=stride,
            )
        )
    return episodes
