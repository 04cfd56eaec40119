"""The learner's reconstruction reward: imagine the iteration's macro-steps, compare, normalise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from rlinf_wamrl.rl.moments import Moments, RunningNormaliser
from rlinf_wamrl.rl.reward import ReconstructionReward, RewardSettings
from rlinf_wamrl.rl.similarity import build_similarity
from rlinf_wamrl.workers.batches import flatten_time

__all__ = ["ImaginationReward", "model_frames"]

PICTURES = 8
"""Macro-steps whose imagined frames are kept for the run folder."""


class ImaginationReward:
    """Scores the macro-steps of each iteration; owns the running normaliser."""

    def __init__(self, cfg: DictConfig, device: Any) -> None:
        """Read ``RL.reconstruction`` and load the encoder of a learned similarity."""
        rl = cfg.RL
        self.settings = RewardSettings(
            source=rl.reconstruction.source,
            num_steps=rl.imagination_steps,
            shift=rl.sigma_shift,
            compare=rl.reconstruction.compare,
            weight=rl.reconstruction.weight,
            max_batch=rl.reconstruction.max_batch,
        )
        self.similarity = build_similarity(
            rl.reconstruction.similarity,
            model_folder=rl.reconstruction.encoder_path,
            device=device,
        )
        self.normaliser = RunningNormaliser()
        self.last: ReconstructionReward | None = None

    def score(
        self,
        forward: Callable[..., ReconstructionReward],
        batch: dict[str, Any],
        gather: Callable[[Tensor], list[Tensor]],
    ) -> dict[str, float]:
        """Add ``reconstruction_reward`` (normalised) and ``reconstruction_mask``, [T,B] each.

        Args:
            forward: the (sharded) policy's ``forward``.
            batch: the iteration's rollouts [T,B,...], with ``next_obs`` frames.
            gather: returns a vector of every rank, in the order of ranks.

        Returns:
            Metrics: mean raw reward, also of macro-steps of successes and of failures apart.
        """
        chunks, episodes = batch["prev_logprobs"].shape[:2]
        rows = flatten_time(batch)
        result = forward(
            forward_type="imagination_rewards",
            records=rows["forward_inputs"],
            frames=rows["next_obs"],
            settings=self.settings,
            similarity=self.similarity,
            keep_imagined=PICTURES,
        )
        self.last = result
        piece = Moments.of(result.reward[result.mask])
        self.normaliser.update([piece.with_vector(vector) for vector in gather(piece.to_vector())])
        normalised = self.normaliser.normalise(result.reward, result.mask)
        batch["reconstruction_reward"] = normalised.view(chunks, episodes)
        batch["reconstruction_mask"] = result.mask.view(chunks, episodes)
        succeeded = (batch["rewards"].sum(dim=(0, 2)) > 0).expand(chunks, episodes).flatten()
        return {
            "reward/reconstruction": _mean(result.reward, result.mask),
            "reward/reconstruction_success": _mean(result.reward, result.mask & succeeded),
            "reward/reconstruction_failure": _mean(result.reward, result.mask & ~succeeded),
            "reward/normaliser_mean": self.normaliser.mean,
            "reward/normaliser_std": self.normaliser.std,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the normaliser's state."""
        return self.normaliser.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved normaliser."""
        self.normaliser.load_state_dict(state)


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
