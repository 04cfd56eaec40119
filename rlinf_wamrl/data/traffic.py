"""How many bytes travel between the components of a run for each macro-step.

The messages themselves are built, with empty contents, and packed as they travel. Where components
are on different nodes this says what the network between them carries. Symbols: B environments of
a request, C executed actions, H predicted ones, A the width of an action, K denoising steps, F
frames captured inside a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.data.interface import (
    EnvPart,
    EnvTransition,
    PolicyInput,
    PolicyOutput,
    PolicyPart,
    TrajectoryKey,
    TrajectorySource,
)
from rlinf_wamrl.data.wire import pack_message, packed_nbytes
from rlinf_wamrl.instructions import INSTRUCTION_BYTES

__all__ = ["MacroStepShapes", "bytes_per_macro_step", "crossing_bytes", "run_shapes"]

_IDS = ("task_id", "seed", "group_id", "episode_id", "init_state_id", "elapsed_steps")
_PROPRIO = 8
_LATENT_CELL = 16
"""Pixels per latent cell along height and width, in both autoencoders."""
_INSTRUCTION = "pick up the black bowl between the plate and the ramekin"

ENDS = {
    "observations": ("env", "rollout"),
    "actions": ("rollout", "env"),
    "chunks to score": ("env", "reward"),
    "scores": ("reward", "env"),
    "trajectories": ("rollout", "actor"),
}
"""Sender and receiver of each kind of message. RLinf keeps its channels, which lie between them, on
node 0; so a message between two components of node 0 crosses no network."""


@dataclass(frozen=True, kw_only=True)
class MacroStepShapes:
    """Sizes of what a macro-step consists of."""

    camera: tuple[int, int]
    """Height and width of one camera's picture in the simulator."""
    picture: tuple[int, int]
    """Height and width of the model's picture, both cameras side by side."""
    frames: int
    """F."""
    executed: int
    """C."""
    horizon: int
    """H."""
    action_dim: int
    """A."""
    denoising_steps: int
    """K."""
    stochastic_steps: int
    """Scored steps of a chain."""
    latents: tuple[int, int, int, int] | None
    """Channels, frames, height and width of the imagined video that a chunk is recorded with, in
    idm mode."""
    scores: bool
    """A reward component scores each chunk before it is published."""


def run_shapes(run: Any, model: Any, picture: tuple[int, int]) -> MacroStepShapes:
    """Read the sizes from a complete configuration.

    Args:
        run: the configuration.
        model: its :class:`~rlinf_wamrl.wam.config.WAMConfig`.
        picture: height and width of the model's picture, both cameras side by side.
    """
    env, rl, actor = run.env.train, run.RL, run.actor.model
    kinds = {"one_random": 1, "window": len(rl.window)}
    last = 0 if rl.ignore_last is False or rl.denoising_steps == 1 else 1
    height, width = picture
    latents = None
    if model.action_infer_mode == "idm":
        latents = (
            model.video_dit_config.in_dim,
            model.num_latent_frames,
            height // _LATENT_CELL,
            width // _LATENT_CELL,
        )
    return MacroStepShapes(
        camera=(env.image_size, env.image_size),
        picture=picture,
        frames=env.num_future_frames,
        executed=actor.num_action_chunks,
        horizon=model.action_horizon,
        action_dim=actor.action_dim,
        denoising_steps=rl.denoising_steps,
        stochastic_steps=kinds.get(rl.stochastic_steps, rl.denoising_steps - last),
        latents=latents,
        scores=rl.lambda_rec > 0 and rl.reconstruction.placement == "worker",
    )


def bytes_per_macro_step(shapes: MacroStepShapes, batch_size: int = 16) -> dict[str, float]:
    """Return the bytes of each kind of message (see ``ENDS``) per macro-step.

    Args:
        shapes: sizes of the run.
        batch_size: B, environments of one request; they share the message's skeleton.
    """
    messages: dict[str, list[Any]] = {
        "observations": [_request(shapes, batch_size)],
        "actions": [torch.zeros(batch_size, shapes.executed, shapes.action_dim)],
        "trajectories": [
            _policy_part(shapes, batch_size),
            _env_part(shapes, batch_size, _pictures(shapes, batch_size, shapes.picture)),
        ],
    }
    if shapes.scores:
        messages["chunks to score"] = [
            _observation(shapes, batch_size)
            | _pictures(shapes, batch_size, _both(shapes.camera))
            | {"executed_mask": torch.zeros(batch_size, shapes.executed, dtype=torch.bool)}
        ]
        messages["scores"] = [torch.zeros(batch_size, shapes.executed)]
    return {
        kind: sum(_nbytes(part) for part in parts) / batch_size for kind, parts in messages.items()
    }


def crossing_bytes(traffic: Mapping[str, float], nodes: Mapping[str, int]) -> float:
    """Return how many of these bytes cross the network between nodes, per macro-step.

    A message goes from its sender to a channel on node 0 and from there to its receiver.

    Args:
        traffic: result of :func:`bytes_per_macro_step`.
        nodes: node of each component.
    """
    return sum(
        size * sum(nodes[component] != 0 for component in ENDS[kind])
        for kind, size in traffic.items()
    )


def _nbytes(message: Any) -> int:
    if isinstance(message, Tensor):
        return message.numel() * message.element_size()
    return packed_nbytes(pack_message(message))


def _both(camera: tuple[int, int]) -> tuple[int, int]:
    return camera[0], 2 * camera[1]


def _sources(batch_size: int) -> list[TrajectorySource]:
    return [TrajectorySource(TrajectoryKey(0, 0, 0, 0, 0), batch_size)]


def _observation(shapes: MacroStepShapes, batch_size: int) -> dict[str, Any]:
    picture = (batch_size, *shapes.camera, 3)
    return {
        "main_images": torch.zeros(picture, dtype=torch.uint8),
        "wrist_images": torch.zeros(picture, dtype=torch.uint8),
        "extra_view_images": None,
        "states": torch.zeros(batch_size, _PROPRIO),
        "task_descriptions": [_INSTRUCTION] * batch_size,
        **{name: torch.zeros(batch_size, dtype=torch.int64) for name in _IDS},
    }


def _pictures(shapes: MacroStepShapes, batch_size: int, size: tuple[int, int]) -> dict[str, Tensor]:
    captured = (batch_size, shapes.frames)
    return {
        "future_frames": torch.zeros(*captured, 3, *size, dtype=torch.uint8),
        "future_states": torch.zeros(*captured, _PROPRIO),
        "future_frames_mask": torch.zeros(captured, dtype=torch.bool),
    }


def _env_part(shapes: MacroStepShapes, batch_size: int, pictures: dict[str, Tensor]) -> EnvPart:
    chunk = (batch_size, shapes.executed)
    flags = {
        name: torch.zeros(chunk, dtype=torch.bool)
        for name in ("dones", "terminations", "truncations", "executed_mask")
    }
    score = {"reward_model_output": torch.zeros(chunk)} if shapes.scores else {}
    if shapes.scores:
        pictures = pictures | {
            name: torch.zeros(batch_size) for name in ("task_reward", "reconstruction_raw")
        }
    return EnvPart(
        sources=_sources(batch_size),
        transition=EnvTransition(rewards=torch.zeros(chunk), **flags, **score),
        next_obs=pictures,
    )


def _request(shapes: MacroStepShapes, batch_size: int) -> PolicyInput:
    pictures = _pictures(shapes, batch_size, _both(shapes.camera))
    return PolicyInput(
        obs=_observation(shapes, batch_size),
        sources=_sources(batch_size),
        env_parts=[_env_part(shapes, batch_size, pictures)],
        request_sizes=[batch_size],
    )


def _policy_part(shapes: MacroStepShapes, batch_size: int) -> PolicyPart:
    chain = (shapes.denoising_steps + 1, shapes.horizon, shapes.action_dim)
    scored = shapes.stochastic_steps
    record = {
        "action": torch.zeros(batch_size, shapes.executed * shapes.action_dim),
        "chain": torch.zeros(batch_size, *chain),
        "k_star": torch.zeros(batch_size, scored, dtype=torch.int64),
        "logp_old": torch.zeros(batch_size, scored),
        "image": torch.zeros(batch_size, 3, *shapes.picture, dtype=torch.uint8),
        "proprio": torch.zeros(batch_size, _PROPRIO),
        "instruction": torch.zeros(batch_size, INSTRUCTION_BYTES, dtype=torch.uint8),
        **{name: torch.zeros(batch_size, dtype=torch.int64) for name in _IDS},
    }
    if shapes.latents is not None:
        record["video_latents"] = torch.zeros(batch_size, *shapes.latents, dtype=torch.float16)
    logprobs = torch.zeros(batch_size, shapes.executed, shapes.action_dim)
    output = PolicyOutput(
        forward_inputs=record, prev_logprobs=logprobs, versions=torch.zeros_like(logprobs)
    )
    return PolicyPart(sources=_sources(batch_size), obs={}, output=output)
