"""What an environment worker asks a rollout worker: observations, and the part that is now due.

Shape symbols: B environments of one routed batch, C actions of a chunk, A the width of one action,
D = C * A.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlinf_wamrl.data.batch_values import (
    CompactPickle,
    merge_batch_values,
    move_to_cpu,
    split_batch_value,
)
from rlinf_wamrl.data.parts import EnvPart
from rlinf_wamrl.data.sources import TrajectorySource

__all__ = ["PolicyInput"]


@dataclass(kw_only=True, eq=False)
class PolicyInput(CompactPickle):
    """One routed policy request, optionally carrying completed environment data."""

    obs: dict[str, Any]  # leaves [B, ...] or lists of B
    rlt_switch_flags: torch.Tensor | None = None  # bool or int [B] or [B, C]
    intervene_flags: torch.Tensor | None = None  # bool [B, C], requested expert slots
    sources: list[TrajectorySource] = field(default_factory=list)  # sizes sum to B
    env_parts: list[EnvPart | None] = field(default_factory=list)  # one per producer request
    request_sizes: list[int] = field(default_factory=list)  # rows of each producer request
    is_last: bool = False  # closes an epoch without asking for another action
    external_actions: torch.Tensor | None = None  # float [B, C, A] or [B, D]

    def __post_init__(self) -> None:
        self.obs = move_to_cpu(self.obs)
        self.rlt_switch_flags = move_to_cpu(self.rlt_switch_flags)
        self.intervene_flags = move_to_cpu(self.intervene_flags)
        self.external_actions = move_to_cpu(self.external_actions)

    @property
    def requires_inference(self) -> bool:
        """Whether Rollout must infer actions for this request."""
        return self.external_actions is None

    def split(self, split_sizes: list[int]) -> list[PolicyInput]:
        """Split a producer's own request on its batch dimension.

        Raises:
            ValueError: The request has been merged from several producers.
        """
        if len(self.env_parts) > 1:
            raise ValueError(
                f"only a producer's own request can be split, this one has {len(self.env_parts)} "
                "environment parts."
            )
        part = self.env_parts[0] if self.env_parts else None
        names = ("obs", "rlt_switch_flags", "intervene_flags", "external_actions")
        columns = {name: split_batch_value(getattr(self, name), split_sizes) for name in names}
        columns["sources"] = TrajectorySource.split(self.sources, split_sizes)
        parts = [None] * len(split_sizes) if part is None else part.split(split_sizes)
        return [
            PolicyInput(
                env_parts=[parts[index]],
                request_sizes=[size],
                is_last=self.is_last,
                **{name: column[index] for name, column in columns.items()},
            )
            for index, size in enumerate(split_sizes)
        ]

    @classmethod
    def merge(cls, policy_inputs: list[PolicyInput]) -> PolicyInput:
        """Merge routed policy requests in source order.

        Flags that only some requests carry are filled with zeros for the others.

        Raises:
            ValueError: No requests, requests with and without external actions together, or flags
                to be filled for a request whose observation doesn't tell its rows.
        """
        if not policy_inputs:
            raise ValueError("cannot merge policy inputs: there is nothing to merge.")
        if len({request.requires_inference for request in policy_inputs}) > 1:
            raise ValueError("cannot merge policy inputs: only some of them have external actions.")
        return cls(
            obs=merge_batch_values([request.obs for request in policy_inputs]),
            rlt_switch_flags=_merge_flags(policy_inputs, "rlt_switch_flags"),
            intervene_flags=_merge_flags(policy_inputs, "intervene_flags"),
            sources=TrajectorySource.merge([request.sources for request in policy_inputs]),
            env_parts=_concatenate(request.env_parts for request in policy_inputs),
            request_sizes=_concatenate(request.request_sizes for request in policy_inputs),
            is_last=policy_inputs[0].is_last,
            external_actions=merge_batch_values(
                [request.external_actions for request in policy_inputs]
            ),
        )


def _concatenate(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


def _merge_flags(requests: list[PolicyInput], name: str) -> torch.Tensor | None:
    flags = [getattr(request, name) for request in requests]
    reference = next((value for value in flags if value is not None), None)
    if reference is None:
        return None
    return merge_batch_values(
        [
            reference.new_zeros((_observation_rows(request.obs), *reference.shape[1:]))
            if value is None
            else value
            for request, value in zip(requests, flags, strict=True)
        ]
    )


def _observation_rows(obs: dict[str, Any]) -> int:
    names = ("states", "main_images", "task_descriptions")
    for name in names:
        if isinstance(obs.get(name), torch.Tensor | np.ndarray | list):
            return len(obs[name])
    raise ValueError(f"cannot tell the rows of an observation without any of {names}.")
