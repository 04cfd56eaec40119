"""Actor-facing data: one resolved step per action chunk, and their stack.

Shape symbols: T chunks of E rollout epochs, B environments, C actions of a chunk, A the width of
one action, D = C * A.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from rlinf_wamrl.data.batch_values import CompactPickle, merge_batch_values, split_batch_value
from rlinf_wamrl.data.trajectory_step import TrajectoryStep

__all__ = ["InconsistentKeysError", "Trajectory"]

_STEP_FIELDS = ("actions", "intervene_flags", "rewards", "prev_logprobs", "versions")
_BOUNDARY_FIELDS = ("dones", "truncations", "terminations")
_DICT_FIELDS = ("forward_inputs", "curr_obs", "next_obs")


class InconsistentKeysError(KeyError, ValueError):
    """Some chunks of a trajectory carry a key that others lack.

    Both kinds, because callers of RLinf expect the ``KeyError`` that stacking used to give, and
    everything else that is wrong with the data is a ``ValueError``.
    """

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(eq=False)
class Trajectory(CompactPickle):
    """Consecutive action chunks of B environments; may span several episodes."""

    max_episode_length: int = 0
    model_weights_id: str = ""  # identifies the versions of the weights that acted
    actions: torch.Tensor | None = None  # float [T, B, D]
    intervene_flags: torch.Tensor | None = None  # bool [T, B, D]
    rewards: torch.Tensor | None = None  # float [T, B, C]
    terminations: torch.Tensor | None = None  # bool [T + E, B, C]
    truncations: torch.Tensor | None = None  # bool [T + E, B, C]
    dones: torch.Tensor | None = None  # bool [T + E, B, C]
    prev_logprobs: torch.Tensor | None = None  # float [T, B, ...]
    prev_values: torch.Tensor | None = None  # float [T + E, B, 1], T without final values
    versions: torch.Tensor | None = None  # float [T, B, ...]
    forward_inputs: dict[str, Any] = field(default_factory=dict)  # leaves [T, B, ...]
    curr_obs: dict[str, Any] = field(default_factory=dict)  # leaves [T, B, ...]
    next_obs: dict[str, Any] = field(default_factory=dict)  # leaves [T, B, ...]

    @classmethod
    def from_steps(
        cls, steps: Sequence[TrajectoryStep], *, max_episode_length: int = 0
    ) -> Trajectory:
        """Stack complete chunk steps in the given order.

        The state before an epoch's first chunk precedes that chunk's own flags, and the value after
        an epoch follows its last value; ordinary fields keep one entry per chunk.

        Args:
            steps: Complete steps of the same environments.
            max_episode_length: Step limit of an episode, passed on to the actor.

        Raises:
            InconsistentKeysError: A dict entry exists on only some of the chunks.
            ValueError: A dict entry that cannot be stacked.
        """
        trajectory = cls(max_episode_length=max_episode_length)
        for name in _STEP_FIELDS:
            setattr(trajectory, name, _stack([getattr(step, name) for step in steps]))
        for name in _BOUNDARY_FIELDS:
            sequence = [
                flags
                for step in steps
                for flags in (getattr(step, f"initial_{name}"), getattr(step, name))
            ]
            setattr(trajectory, name, _stack(sequence))
        trajectory.prev_values = _stack(
            [value for step in steps for value in (step.prev_values, step.final_prev_values)]
        )
        # A chunk without forward inputs would shift all later ones; observations are optional.
        forward_inputs = [step.forward_inputs for step in steps]
        if any(forward_inputs):
            trajectory.forward_inputs = _stack_dicts(forward_inputs, "forward_inputs")
        for name in ("curr_obs", "next_obs"):
            present = [getattr(step, name) for step in steps if getattr(step, name)]
            setattr(trajectory, name, _stack_dicts(present, name) if present else {})
        versions = torch.zeros(1) if trajectory.versions is None else trajectory.versions
        trajectory.model_weights_id = _weights_id(versions)
        return trajectory

    def split(self, split_sizes: int | list[int]) -> list[Trajectory]:
        """Split the batch dimension into shards for several actors.

        Args:
            split_sizes: Number of equal shards, or the environments of each shard.

        Returns:
            Trajectories with all chunks of their environments.

        Raises:
            ValueError: The sizes don't fit the batch, or the trajectory is empty.
        """
        batch = self._batch_size()
        if isinstance(split_sizes, int):
            if split_sizes < 1 or batch % split_sizes:
                raise ValueError(
                    f"cannot split {batch} environments into {split_sizes} equal shards."
                )
            split_sizes = [batch // split_sizes] * split_sizes
        columns = {
            spec.name: split_batch_value(getattr(self, spec.name), split_sizes, dim=1)
            for spec in fields(self)
        }
        return [
            Trajectory(**{name: column[index] for name, column in columns.items()})
            for index in range(len(split_sizes))
        ]

    def _batch_size(self) -> int:
        for spec in fields(self):
            leaf = _first_tensor(getattr(self, spec.name))
            if leaf is not None:
                return leaf.shape[1]
        raise ValueError("cannot split a trajectory without any tensor: its batch is unknown.")

    @classmethod
    def to_batch(cls, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Concatenate trajectories into one actor batch.

        Args:
            trajectories: Trajectories of the same length, in batch order.

        Returns:
            Dict of tensors [T, B, ...] and of the non-empty dict fields; empty without
            trajectories. The first trajectory decides which tensor fields there are. A single
            trajectory's tensors are passed on without a copy.
        """
        batch: dict[str, Any] = {}
        for name in _DICT_FIELDS:
            merged = _merge_by_key([getattr(item, name) for item in trajectories])
            if merged:
                batch[name] = merged
        for name, value in vars(trajectories[0]).items() if trajectories else ():
            if isinstance(value, torch.Tensor):
                present = [getattr(item, name) for item in trajectories]
                batch[name] = merge_batch_values(
                    [tensor for tensor in present if tensor is not None], dim=1
                )
        return batch

    def extract_intervene_traj(self, mode: str = "any") -> list[Trajectory] | None:
        """Keep the chunks in which an expert intervened, one trajectory per environment.

        Args:
            mode: "any" keeps a chunk with at least one expert action, "all" only entirely expert
                ones.

        Returns:
            Trajectories with B = 1 of the environments with such chunks, ``None`` without any.
            Flags and values keep each epoch's extra entry.

        Raises:
            ValueError: Unknown mode.
        """
        if mode not in ("any", "all"):
            raise ValueError(f"mode must be 'any' or 'all', got {mode!r}.")
        if self.intervene_flags is None:
            return None
        flags = self.intervene_flags
        kept = flags.any(dim=-1) if mode == "any" else flags.all(dim=-1)
        return [
            self._select_chunks(env_id, kept[:, env_id])
            for env_id in range(kept.shape[1])
            if kept[:, env_id].any()
        ] or None

    def _select_chunks(self, env_id: int, kept: torch.Tensor) -> Trajectory:
        def rows(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return tensor[mask, env_id].unsqueeze(1)

        selected = Trajectory(
            max_episode_length=self.max_episode_length, model_weights_id=self.model_weights_id
        )
        for name in _STEP_FIELDS:
            value = getattr(self, name)
            setattr(selected, name, None if value is None else rows(value, kept))
        for name in (*_BOUNDARY_FIELDS, "prev_values"):
            value = getattr(self, name)
            if value is not None:
                mask = _boundary_mask(kept, len(value), extra_first=name != "prev_values")
                setattr(selected, name, rows(value, mask))
        for name in _DICT_FIELDS:
            setattr(selected, name, _map_tensors(getattr(self, name), lambda t: rows(t, kept)))
        return selected


def _stack(values: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [value for value in values if value is not None]
    return torch.stack(present) if present else None


def _stack_dicts(dicts: list[dict[str, Any]], path: str) -> dict[str, Any]:
    """Stack the leaves of dicts with equal keys along a new first dimension; ``None``s vanish."""
    keys = {key: None for entries in dicts for key, value in entries.items() if value is not None}
    stacked: dict[str, Any] = {}
    for key in keys:
        values = [entries.get(key) for entries in dicts]
        lacking = sum(value is None for value in values)
        if lacking:
            raise InconsistentKeysError(
                f"{path}[{key!r}] is present on {len(values) - lacking} of {len(values)} chunks "
                "only; the policy has to return the same keys for every chunk."
            )
        if all(isinstance(value, dict) for value in values):
            stacked[key] = _stack_dicts(values, f"{path}[{key!r}]")
        elif all(isinstance(value, torch.Tensor) for value in values):
            stacked[key] = torch.stack(values)
        else:
            kinds = sorted({type(value).__name__ for value in values})
            raise ValueError(f"{path}[{key!r}] has to be tensors to be stacked, got {kinds}.")
    return stacked


def _merge_by_key(dicts: list[dict[str, Any]]) -> dict[str, Any]:
    """Concatenate along the batch whatever entries there are, key by key."""
    keys = {key: None for entries in dicts for key in entries}
    merged: dict[str, Any] = {}
    for key in keys:
        values = [entries[key] for entries in dicts if key in entries]
        nested = all(isinstance(value, dict) for value in values)
        merged[key] = _merge_by_key(values) if nested else merge_batch_values(values, dim=1)
    return merged


def _weights_id(versions: torch.Tensor) -> str:
    raw = versions.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, raw.hex()))


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, dict):
        leaves = (_first_tensor(item) for item in value.values())
        return next((leaf for leaf in leaves if leaf is not None), None)
    return value if isinstance(value, torch.Tensor) else None


def _map_tensors(
    value: dict[str, Any], function: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    return {
        key: _map_tensors(item, function) if isinstance(item, dict) else function(item)
        for key, item in value.items()
    }


def _boundary_mask(kept: torch.Tensor, length: int, *, extra_first: bool) -> torch.Tensor:
    """Spread a mask of T chunks over T + E entries, keeping each epoch's extra entry.

    With two epochs of two chunks, ``kept`` [a, b, c, d] becomes [1, a, b, 1, c, d] for flags (the
    state before the epoch comes first) and [a, b, 1, c, d, 1] for values.
    """
    epochs = length - len(kept)
    if epochs == 0:
        return kept
    if epochs < 0 or len(kept) % epochs:
        raise ValueError(f"{length} boundary entries don't belong to {len(kept)} chunks.")
    chunks = kept.reshape(epochs, -1)
    extra = torch.ones(epochs, 1, dtype=torch.bool)
    return torch.cat([extra, chunks] if extra_first else [chunks, extra], dim=1).reshape(-1)
