"""What LeRobot mode records of a chunk: a picture and a state from before every action."""

from __future__ import annotations

from typing import Any

import torch

from rlinf_wamrl.data.interface import EnvOutput
from rlinf_wamrl.policy import RECORD_IDS

__all__ = ["episode_payload", "policy_observation"]

_OBSERVED = ("main_images", "wrist_images", "states")


def policy_observation(output: EnvOutput) -> dict[str, Any]:
    """Return what the policy reads: RLinf's five keys, plus the integers that name the episode."""
    observation = output.prepare_observations(output.obs)
    observation.update({name: output.obs[name] for name in RECORD_IDS if name in output.obs})
    return observation


def episode_payload(
    before: EnvOutput, after: EnvOutput, actions: torch.Tensor, episode: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Build ``episode_data`` of a chunk: observations from before each action, and which ran.

    Args:
        before: output before the chunk.
        after: output after it, with pictures captured at every step inside
            (``future_frames`` uint8 [N, >= C-1, 3, H, 2W], ``future_states`` [N, >= C-1, 8]).
        actions: [N, C, A].
        episode: the environment's episode information, tensors [N].

    Raises:
        ValueError: Pictures are missing inside the chunk.
    """
    length = actions.shape[1]
    pictures, states = after.obs["future_frames"], after.obs["future_states"]
    if pictures.shape[1] < length - 1:
        raise ValueError(
            f"a chunk of {length} actions needs {length - 1} pictures inside it, got "
            f"{pictures.shape[1]}: set env.train.action_video_freq_ratio=1 and "
            f"env.train.num_future_frames={length - 1}."
        )
    start = policy_observation(before)
    observations = [start]
    for step in range(length - 1):
        main, wrist = pictures[:, step].movedim(1, -1).chunk(2, dim=2)
        inside = {
            "main_images": main.contiguous(),
            "wrist_images": wrist.contiguous(),
            "states": states[:, step].contiguous(),
        }
        observations.append({**start, **inside})
    info = {"episode": episode}
    final = {name: after.obs[name] for name in _OBSERVED}
    return {
        "chunk_actions": actions,
        "obs_list": observations,
        "terminations": after.transition.terminations,
        "truncations": after.transition.truncations,
        "valid_action_mask": after.transition.executed_mask,
        "infos_list": [{**info, "final_observation": final, "final_info": info}] * length,
    }
