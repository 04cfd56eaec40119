"""The learner's reconstruction reward: imagine the iteration's macro-steps, compare, normalise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from rlinf_wamrl.instructions import pack_instructions
from rlinf_wamrl.processing import Processor
from rlinf_wamrl.rl.moments import Moments, RunningNormaliser
from rlinf_wamrl.rl.reward import ReconstructionReward, RewardSettings, reached_frames
from rlinf_wamrl.rl.similarity import build_similarity
from rlinf_wamrl.wam.config import WAMConfig
from rlinf_wamrl.workers.batches import flatten_time, task_rewards

__all__ = ["ImaginationReward", "chunk_records", "model_frames"]

PICTURES = 8
"""Macro-steps whose imagined frames are kept for the run folder."""

FIXED_BATCH = 16
"""Macro-steps of the first iteration that are imagined again in every iteration."""

IMAGINED_FROM = ("image", "proprio", "instruction", "executed_mask", "episode_id", "elapsed_steps")
"""What an imagination needs of a record."""


class ImaginationReward:
    """Scores the macro-steps of each iteration; owns the running normaliser."""

    def __init__(self, cfg: DictConfig, model: WAMConfig, device: Any) -> None:
        """Read ``RL.reconstruction`` and load the encoder of a learned similarity.

        Args:
            cfg: the run.
            model: the model that imagines.
            device: where the encoder goes.
        """
        rl = cfg.RL
        self._captured_ratio = cfg.env.train.action_video_freq_ratio
        self.settings = RewardSettings(
            source=rl.reconstruction.source,
            num_steps=rl.imagination_steps,
            shift=rl.sigma_shift,
            compare=rl.reconstruction.compare,
            weight=rl.reconstruction.weight,
            action_video_freq_ratio=model.actions_per_frame,
            max_batch=rl.reconstruction.max_batch,
        )
        self.similarity = build_similarity(
            rl.reconstruction.similarity,
            model_folder=rl.reconstruction.encoder_path,
            device=device,
        )
        self.normaliser = RunningNormaliser()
        self.last: ReconstructionReward | None = None
        self._fixed_batch: dict[str, dict[str, Tensor]] | None = None
        self._watches_imagination = rl.video_sft.enabled

    def frames(self, captured: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep ``future_frames`` and ``future_frames_mask`` where the model imagines a frame."""
        ratio = self.settings.action_video_freq_ratio
        kept, mask = model_frames(
            captured["future_frames"], captured["future_frames_mask"], self._captured_ratio, ratio
        )
        return {"future_frames": kept, "future_frames_mask": mask}

    def score(
        self,
        forward: Callable[..., ReconstructionReward],
        batch: dict[str, Any],
        gather: Callable[[Tensor], list[Tensor]],
    ) -> dict[str, float]:
        """Add ``reconstruction_reward`` (normalised) and ``reconstruction_mask``, [T,B] each.

        Raw rewards of a reward component are taken as they are; without one they are made here.

        Args:
            forward: the (sharded) policy's ``forward``.
            batch: the iteration's rollouts [T,B,...], with ``next_obs`` frames.
            gather: returns a vector of every rank, in the order of ranks.

        Returns:
            Metrics: mean raw reward, also of macro-steps of successes and of failures apart; where
            the video expert trains and rewards are made here, the mean reward of a fixed batch.
        """
        metrics: dict[str, float] = {}
        rows = flatten_time(batch)
        records, frames = rows["forward_inputs"], self.frames(rows["next_obs"])
        if "reconstruction_raw" in rows["next_obs"]:
            reward = rows["next_obs"]["reconstruction_raw"]
            mask = reached_frames(
                records["executed_mask"],
                frames["future_frames_mask"],
                self.settings.action_video_freq_ratio,
            ).any(dim=1)
        else:
            self.last = forward(
                forward_type="imagination_rewards",
                records=records,
                frames=frames,
                settings=self.settings,
                similarity=self.similarity,
                keep_imagined=PICTURES,
            )
            reward, mask = self.last.reward, self.last.mask
            if self._watches_imagination:
                metrics = self._score_fixed_batch(forward, records, frames, gather)
        piece = Moments.of(reward[mask])
        self.normaliser.update([piece.with_vector(vector) for vector in gather(piece.to_vector())])
        shape = batch["prev_logprobs"].shape[:2]
        batch["reconstruction_reward"] = self.normaliser.normalise(reward, mask).view(shape)
        batch["reconstruction_mask"] = mask.view(shape)
        succeeded = (task_rewards(batch).sum(dim=(0, 2)) > 0).expand(shape).flatten()
        return {
            **metrics,
            "reward/reconstruction": _mean(reward, mask),
            "reward/reconstruction_success": _mean(reward, mask & succeeded),
            "reward/reconstruction_failure": _mean(reward, mask & ~succeeded),
            "reward/normaliser_mean": self.normaliser.mean,
            "reward/normaliser_std": self.normaliser.std,
        }

    def _score_fixed_batch(
        self,
        forward: Callable[..., ReconstructionReward],
        records: Mapping[str, Tensor],
        frames: Mapping[str, Tensor],
        gather: Callable[[Tensor], list[Tensor]],
    ) -> dict[str, float]:
        """Return the mean reward of the same macro-steps in every iteration, frozen and live.

        The mean over an iteration moves with what the policy does; this one moves only with what
        the video expert imagines. The frozen one does not move: it is what to compare with.
        """
        if self._fixed_batch is None:
            self._fixed_batch = {
                "records": {name: records[name][:FIXED_BATCH].clone() for name in IMAGINED_FROM},
                "frames": {name: value[:FIXED_BATCH].clone() for name, value in frames.items()},
            }
        metrics = {}
        for source in ("frozen", "live"):
            result = forward(
                forward_type="imagination_rewards",
                **self._fixed_batch,
                settings=replace(self.settings, source=source),
                similarity=self.similarity,
            )
            mean = torch.tensor([_mean(result.reward, result.mask)])
            # of the first rank alone, whose batch is the one that a checkpoint keeps
            metrics[f"reward/fixed_batch_{source}"] = float(gather(mean)[0])
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the normaliser's state and the fixed batch."""
        return {"normaliser": self.normaliser.state_dict(), "fixed_batch": self._fixed_batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what :meth:`state_dict` returned."""
        self.normaliser.load_state_dict(state["normaliser"])
        self._fixed_batch = state["fixed_batch"]


def chunk_records(
    processor: Processor, before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Prepare executed chunks for :func:`~rlinf_wamrl.policy_training.imagination_rewards`.

    Args:
        processor: prepares the pictures.
        before: the environments' observation before the chunk.
        after: that after it, with ``future_frames``, ``future_frames_mask`` and ``executed_mask``.

    Returns:
        Records and frames of B macro-steps.
    """
    main, wrist = after["future_frames"].movedim(-3, -1).chunk(2, dim=-2)
    records = {
        "image": processor.images(before["main_images"], before["wrist_images"]),
        "proprio": processor.proprio(before["states"]),
        "instruction": pack_instructions(before["task_descriptions"]),
        "executed_mask": after["executed_mask"],
        "episode_id": before["episode_id"],
        "elapsed_steps": before["elapsed_steps"],
    }
    frames = {
        "future_frames": processor.images(main, wrist),
        "future_frames_mask": after["future_frames_mask"],
    }
    return records, frames


def model_frames(
    future_frames: Tensor, frames_mask: Tensor, captured_ratio: int, model_ratio: int
) -> tuple[Tensor, Tensor]:
    """Keep the captured frames that the model imagines, too.

    Args:
        future_frames: uint8 [B,n,3,H,W], one every ``captured_ratio`` actions.
        frames_mask: bool [B,n].
        captured_ratio: actions between two captured frames.
        model_ratio: actions between two frames of the model, a multiple of the former.
    """
    every = model_ratio // captured_ratio
    return future_frames[:, every - 1 :: every], frames_mask[:, every - 1 :: every]


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else float("nan")
