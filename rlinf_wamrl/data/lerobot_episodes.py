"""From vectorised action chunks to finished episodes, frame by frame.

A frame is the dict that RLinf's LeRobot writer takes, and two things more where the environment
gives them: the integers that name the episode, and in the last frame what was observed after it
(``final_image``, ``final_wrist_image``, ``final_state``). Shape symbols: B environments of one
source, C actions of a chunk, A the width of one action.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlinf_wamrl.data.parts import PolicyOutput

__all__ = ["EPISODE_IDS", "Episode", "EpisodeRecorder"]

Frame = dict[str, Any]
Episode = list[Frame]

EPISODE_IDS = ("task_id", "init_state_id", "seed", "episode_id")
"""Entries of an observation, int64 [B], that frames take over as they are."""

_SUCCESS_KEYS = ("success_once", "success_at_end", "success")
_OBSERVATION_NAMES = {
    "image": ("main_images", "image", "full_image"),
    "wrist_image": ("wrist_images", "wrist_image"),
    "extra_view_image": ("extra_view_images", "extra_view_image"),
    "state": ("states", "state"),
}


@dataclass(frozen=True, kw_only=True)
class _RecordedFrame:
    """A frame before the end of its episode is known."""

    data: Frame
    success: bool


@dataclass(frozen=True, kw_only=True)
class _Running:
    """One environment's unfinished episode; replaced, never changed."""

    frames: tuple[_RecordedFrame, ...] = ()
    seed_observation: Any = None  # observation for the next action, known from a reset
    segment: int = 0


@dataclass(frozen=True, kw_only=True)
class _LowLevelStep:
    """One environment's share of one low-level step."""

    observation: Any
    info: Any
    action: np.ndarray  # [A], executed unless an expert took over
    expert_action: np.ndarray | None  # [A]
    intervened: bool
    terminated: bool
    truncated: bool
    reset_observation: Any  # first observation of the next episode, if it came along
    final_observation: Any  # observation after the episode's last action, likewise


@dataclass(frozen=True, kw_only=True)
class EpisodeRecorder:
    """Cuts the chunks of one source into episodes; episodes may span chunks and iterations.

    Instances are values: :meth:`append` returns a new recorder and leaves this one alone, so that a
    failed emission can be repeated.

    Two layouts of the payload are understood. Without ``valid_action_mask`` the observations are
    those *after* each action, as RLinf's environments return them: an environment that ends finds
    its own in ``infos["final_observation"]``, and the listed one, already of the next episode,
    goes with that episode's first action. With the mask, observations are those each action was
    chosen from, and slots that did not run give no frame; terminal flags of a partly executed chunk
    count on its last executed slot; ``infos["final_observation"]`` is what was observed after it.
    """

    num_envs: int
    action_dim: int
    only_success: bool = False
    running: tuple[_Running, ...] = field(default=())

    def append(
        self, payload: Mapping[str, Any], policy_output: PolicyOutput | None
    ) -> tuple[EpisodeRecorder, list[Episode]]:
        """Record one chunk of all environments.

        Args:
            payload: ``chunk_actions`` [B, C, A] or [B, C * A], ``obs_list`` and ``infos_list`` with
                one batch per low-level step, ``terminations`` and ``truncations`` [B, C], [B] or
                scalar, optionally ``valid_action_mask`` [B, C].
            policy_output: Source of expert actions that the environment doesn't report.

        Returns:
            The recorder after the chunk, and the episodes that ended in it, in order of their end.

        Raises:
            ValueError: Step lists of different lengths, or actions of another layout.
        """
        chunk = _Chunk.decode(payload, policy_output, self.num_envs, self.action_dim)
        running = list(self.running) or [_Running() for _ in range(self.num_envs)]
        finished: list[Episode] = []
        for env_id, step in chunk.steps():
            running[env_id], episode = self._advance(running[env_id], step)
            if episode:
                finished.append(episode)
        return replace(self, running=tuple(running)), finished

    def _advance(self, state: _Running, step: _LowLevelStep) -> tuple[_Running, Episode]:
        """One environment's state after a step, and the episode that the step ended."""
        if _flag(step.info, "record_reset"):
            return _Running(seed_observation=step.observation), []
        if _flag(step.info, "pre_record"):
            if step.reset_observation is not None:
                state = replace(state, seed_observation=step.reset_observation)
            return state, []
        if _flag(step.info, "segment_advance"):
            state = replace(state, segment=state.segment + 1)
        seed = state.seed_observation
        data = _frame(step, step.observation if seed is None else seed, state.segment)
        state = replace(state, seed_observation=step.reset_observation)
        if data is None:
            return state, []
        recorded = _RecordedFrame(data=data, success=bool(_success(step.info)))
        frames = (*state.frames, recorded)
        if not (step.terminated or step.truncated):
            return replace(state, frames=frames), []
        success = any(frame.success for frame in frames)
        kept = not self.only_success or (success and step.terminated)
        return (
            _Running(seed_observation=state.seed_observation),
            _finish(frames, success, step.final_observation) if kept else [],
        )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """One action chunk of all environments as arrays."""

    actions: np.ndarray  # float [B, C, A]
    observations: list[Any]
    infos: list[Any]
    terminations: np.ndarray  # bool [B, C]
    truncations: np.ndarray  # bool [B, C]
    valid: np.ndarray | None  # bool [B, C]
    expert_actions: np.ndarray | None  # float [B, C, A]
    expert_flags: np.ndarray | None  # bool [B, C]

    @classmethod
    def decode(
        cls,
        payload: Mapping[str, Any],
        policy_output: PolicyOutput | None,
        num_envs: int,
        action_dim: int,
    ) -> _Chunk:
        observations = _as_list(payload["obs_list"])
        infos = _as_list(payload["infos_list"])
        steps = len(observations)
        if len(infos) != steps:
            raise ValueError(
                f"episode data has {steps} observations but {len(infos)} infos for one chunk."
            )
        actions = _chunked_actions(payload["chunk_actions"], num_envs, action_dim)
        if actions.shape[1] != steps:
            raise ValueError(
                f"episode data has {steps} observations for {actions.shape[1]} actions per chunk."
            )
        valid = payload.get("valid_action_mask")
        terminations = _step_flags(payload["terminations"], num_envs, steps)
        truncations = _step_flags(payload["truncations"], num_envs, steps)
        if valid is not None:
            valid = _step_flags(valid, num_envs, steps)
            terminations = _on_last_valid(terminations, valid)
            truncations = _on_last_valid(truncations, valid)
        expert_actions = expert_flags = None
        if policy_output is not None and policy_output.intervene_flags is not None:
            expert_flags = _step_flags(policy_output.intervene_flags, num_envs, steps)
            expert_actions = _chunked_actions(
                policy_output.forward_inputs["action"], num_envs, action_dim
            )
        return cls(
            actions=actions,
            observations=observations,
            infos=infos,
            terminations=terminations,
            truncations=truncations,
            valid=valid,
            expert_actions=expert_actions,
            expert_flags=expert_flags,
        )

    def steps(self) -> Iterator[tuple[int, _LowLevelStep]]:
        """Low-level steps in order of time, then environment; slots that did not run left out."""
        for index in range(len(self.observations)):
            for env_id in range(len(self.actions)):
                if self.valid is None or self.valid[env_id, index]:
                    yield env_id, self._step(index, env_id)

    def _step(self, index: int, env_id: int) -> _LowLevelStep:
        num_envs, width = len(self.actions), self.actions.shape[2]
        terminated = bool(self.terminations[env_id, index])
        truncated = bool(self.truncations[env_id, index])
        infos = self.infos[index]
        observation, reset_observation = self.observations[index], None
        final_observation = None
        if isinstance(infos, dict) and "final_observation" in infos:
            if terminated or truncated:
                if self.valid is None:
                    reset_observation = _row(observation, env_id, num_envs)
                    observation = infos["final_observation"]
                else:
                    final_observation = _row(infos["final_observation"], env_id, num_envs)
                infos = infos.get("final_info", {})
            else:
                hidden = ("final_observation", "final_info")
                infos = {key: value for key, value in infos.items() if key not in hidden}
        info = _row(infos, env_id, num_envs)
        expert_action, intervened = _reported_intervention(info, index, width)
        if expert_action is None and self.expert_flags is not None:
            expert_action = self.expert_actions[env_id, index]
            intervened = bool(self.expert_flags[env_id, index])
        return _LowLevelStep(
            observation=_row(observation, env_id, num_envs),
            info=info,
            action=self.actions[env_id, index],
            expert_action=expert_action,
            intervened=intervened,
            terminated=terminated,
            truncated=truncated,
            reset_observation=reset_observation,
            final_observation=final_observation,
        )


def _frame(step: _LowLevelStep, observation: Any, segment: int) -> Frame | None:
    """Frame without its episode's outcome; ``None`` where the observation has no state."""
    observed = _observed(observation)
    if "state" not in observed:
        return None
    action = step.expert_action if step.intervened else step.action
    return {
        **observed,
        "actions": np.asarray(action, dtype=np.float32).reshape(-1),
        "task": _task(observation.get("task_descriptions")),
        "intervene_flag": np.array([step.intervened]),
        "segment_id": np.array([segment], dtype=np.uint8),
        **{name: int(observation[name]) for name in EPISODE_IDS if name in observation},
    }


def _observed(observation: Any) -> Frame:
    """State and pictures of one environment's observation, by the names that frames have."""
    if not isinstance(observation, dict):
        return {}
    values = {
        name: _array(next((observation[key] for key in keys if key in observation), None))
        for name, keys in _OBSERVATION_NAMES.items()
    }
    state = values.pop("state")
    frame = {} if state is None else {"state": state.astype(np.float32)}
    for name, images in values.items():
        if images is None:
            continue
        if images.ndim == 4 and len(images) > 1:
            frame.update({f"{name}-{view}": _to_uint8(image) for view, image in enumerate(images)})
        else:
            frame[name] = _to_uint8(images[0] if images.ndim == 4 else images)
    return frame


def _finish(frames: tuple[_RecordedFrame, ...], success: bool, final_observation: Any) -> Episode:
    after = {f"final_{name}": value for name, value in _observed(final_observation).items()}
    return [
        {
            **frame.data,
            "is_success": np.array([success]),
            "done": np.array([index == len(frames) - 1]),
            **(after if index == len(frames) - 1 else {}),
        }
        for index, frame in enumerate(frames)
    ]


def _array(value: Any) -> np.ndarray | None:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return None if value is None else np.asarray(value)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _chunked_actions(actions: Any, num_envs: int, action_dim: int) -> np.ndarray:
    array = _array(actions)
    if array is None or array.size % (num_envs * action_dim) or len(array) != num_envs:
        shape = None if array is None else list(array.shape)
        raise ValueError(
            f"chunk actions must be [{num_envs}, C, {action_dim}] or flattened to "
            f"[{num_envs}, C * {action_dim}], got {shape}."
        )
    return array.reshape(num_envs, -1, action_dim)


def _step_flags(flags: Any, num_envs: int, steps: int) -> np.ndarray:
    """Flags [B, C], [B] or scalar as bool [B, C]."""
    array = _array(flags).astype(bool)
    if array.ndim == 1:
        array = array[:, None]
    return np.broadcast_to(array, (num_envs, steps))


def _on_last_valid(flags: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Move an environment's flag, wherever in the chunk, to its last executed slot."""
    moved = np.zeros_like(flags)
    for env_id in range(len(flags)):
        executed = np.flatnonzero(valid[env_id])
        if len(executed):
            moved[env_id, executed[-1]] = flags[env_id].any()
    return moved


def _row(value: Any, env_id: int, num_envs: int) -> Any:
    """One environment's share of nested batch data; what isn't batched is shared by all."""
    if isinstance(value, dict):
        return {key: _row(item, env_id, num_envs) for key, item in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        return value
    if isinstance(value, torch.Tensor | np.ndarray | list) and len(value) == num_envs:
        return value[env_id]
    return value


def _flag(info: Any, key: str) -> bool:
    value = _array(info.get(key)) if isinstance(info, dict) else None
    return value is not None and bool(value.any())


def _success(info: Any) -> bool | None:
    if not isinstance(info, dict):
        return None
    for source in (info.get("episode"), info):
        if isinstance(source, dict):
            for key in _SUCCESS_KEYS:
                if source.get(key) is not None:
                    return bool(_array(source[key]).any())
    return None


def _reported_intervention(info: Any, index: int, width: int) -> tuple[np.ndarray | None, bool]:
    """Expert action that the environment reports for a slot, and whether the expert took it.

    Infos hold either the slot's own action [A] or the whole chunk's [C, A] or [C * A].
    """
    if not isinstance(info, dict):
        return None, False
    action, flag = _array(info.get("intervene_action")), _array(info.get("intervene_flag"))
    if action is None or flag is None:
        return None, False
    slots = action.reshape(-1, width)
    flags = np.broadcast_to(flag.reshape(-1), (len(slots),)) if flag.size == 1 else flag.reshape(-1)
    slot = min(index, len(slots) - 1)
    return slots[slot], bool(flags[min(slot, len(flags) - 1)])


def _task(descriptions: Any) -> str:
    if isinstance(descriptions, list | tuple):
        descriptions = descriptions[0] if descriptions else None
    return "unknown task" if descriptions is None else str(descriptions)


def _to_uint8(image: np.ndarray) -> np.ndarray:
    if image.dtype == np.uint8:
        return image
    scale = 255.0 if image.max() <= 1.0 else 1.0
    return np.rint(image * scale).astype(np.uint8)
