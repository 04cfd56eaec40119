"""The two halves of a trajectory step: what the policy owns and what the environment owns.

Shape symbols: B environments of one routed batch, C actions of a chunk, A the width of one action,
D = C * A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from rlinf_wamrl.data.batch_values import (
    CompactPickle,
    merge_batch_values,
    move_to_cpu,
    split_batch_value,
)
from rlinf_wamrl.data.sources import TrajectorySource
from rlinf_wamrl.data.transition import EnvTransition

__all__ = ["EnvPart", "PolicyOutput", "PolicyPart"]


def _single_source(fragments: Sequence[PolicyPart | EnvPart], kind: str) -> list[TrajectorySource]:
    """Sources of the merged fragments, which have to form one gap-free piece of one source."""
    if not fragments:
        raise ValueError(f"cannot merge {kind} parts: there is nothing to merge.")
    sources = TrajectorySource.merge([fragment.sources for fragment in fragments])
    if len(sources) != 1:
        raise ValueError(f"cannot merge {kind} parts: they don't join to one source: {sources}.")
    return sources


@dataclass(kw_only=True, eq=False)
class PolicyOutput(CompactPickle):
    """Policy inference output retained until its environment transition arrives.

    Tensors are detached and moved to contiguous CPU memory. The executed actions are
    ``forward_inputs["action"]``, normally float [B, D].
    """

    forward_inputs: dict[str, Any]  # what training recomputes from; leaves [B, ...]
    prev_logprobs: torch.Tensor | None = None  # float [B, 1], [B, C] or [B, C, A]
    prev_values: torch.Tensor | None = None  # float [B, 1]
    intervene_flags: torch.Tensor | None = None  # bool [B, C]
    versions: torch.Tensor | None = None  # float, shaped like prev_logprobs

    def __post_init__(self) -> None:
        for spec in fields(self):
            setattr(self, spec.name, move_to_cpu(getattr(self, spec.name), detach=True))

    def split(self, split_sizes: list[int]) -> list[PolicyOutput]:
        """Split along the batch dimension; ``split_sizes`` are the rows of each shard."""
        columns = {
            spec.name: split_batch_value(getattr(self, spec.name), split_sizes)
            for spec in fields(self)
        }
        return [
            PolicyOutput(**{name: column[index] for name, column in columns.items()})
            for index in range(len(split_sizes))
        ]

    @classmethod
    def merge(cls, outputs: list[PolicyOutput]) -> PolicyOutput:
        """Merge routed fragments in batch order.

        Raises:
            ValueError: No fragments, or a field that only some of them have.
        """
        if not outputs:
            raise ValueError("cannot merge policy outputs: there is nothing to merge.")
        return cls(
            **{
                spec.name: merge_batch_values([getattr(output, spec.name) for output in outputs])
                for spec in fields(cls)
            }
        )


@dataclass(kw_only=True, eq=False)
class PolicyPart(CompactPickle):
    """Policy-owned data for one or more routed action chunks.

    Raises:
        ValueError: Not exactly one of ``output`` and ``external_actions`` is given. The latter
            stands for an online intervention that skipped inference.
    """

    sources: list[TrajectorySource]
    obs: dict[str, Any]  # observation the policy acted on; empty when nothing needs it
    output: PolicyOutput | None = None
    external_actions: torch.Tensor | None = None  # float [B, C, A] or [B, D]

    def __post_init__(self) -> None:
        if (self.output is None) == (self.external_actions is None):
            raise ValueError(
                "a PolicyPart needs exactly one of output and external_actions, "
                f"got {'neither' if self.output is None else 'both'}."
            )
        self.obs = move_to_cpu(self.obs)
        self.external_actions = move_to_cpu(self.external_actions)

    @property
    def inferred(self) -> bool:
        """Whether this part came from model inference."""
        return self.output is not None

    def split(self) -> list[PolicyPart]:
        """Split this routed payload into one fragment per logical source."""
        sizes = [source.size for source in self.sources]
        outputs = [None] * len(sizes) if self.output is None else self.output.split(sizes)
        rows = zip(
            self.sources,
            split_batch_value(self.obs, sizes),
            outputs,
            split_batch_value(self.external_actions, sizes),
            strict=True,
        )
        return [
            PolicyPart(sources=[source], obs=obs, output=output, external_actions=actions)
            for source, obs, output, actions in rows
        ]

    @classmethod
    def merge(cls, fragments: list[PolicyPart]) -> PolicyPart:
        """Merge fragments of one source in their batch order.

        Raises:
            ValueError: No fragments, gaps between them, or inferred and external ones together.
        """
        sources = _single_source(fragments, "policy")
        if len({fragment.inferred for fragment in fragments}) > 1:
            raise ValueError("cannot merge policy parts: some are inferred, some are external.")
        inferred = fragments[0].inferred
        return cls(
            sources=sources,
            obs=merge_batch_values([fragment.obs for fragment in fragments]),
            output=(
                PolicyOutput.merge([fragment.output for fragment in fragments])
                if inferred
                else None
            ),
            external_actions=merge_batch_values(
                [fragment.external_actions for fragment in fragments]
            ),
        )


@dataclass(kw_only=True, eq=False)
class EnvPart(CompactPickle):
    """Environment-owned half of one or more routed action chunks.

    Env creates it after stepping and attaches it to the next request for actions. Rollout adds
    what only the policy can infer with :meth:`complete` and publishes the same type to the actor's
    channel.
    """

    sources: list[TrajectorySource]
    transition: EnvTransition  # kept as the object that is given
    next_obs: dict[str, Any] | None = None  # observation to infer from, or to train on
    requires_inference: bool = False  # whether Rollout has to evaluate next_obs
    next_rlt_obs: dict[str, Any] | None = None  # RLT features of the next state
    bootstrap_values: torch.Tensor | None = None  # float [B, 1]
    final_prev_values: torch.Tensor | None = None  # float, shaped like prev_values
    initial_transition: EnvTransition | None = None  # state before an epoch's first chunk

    def __post_init__(self) -> None:
        self.next_obs = move_to_cpu(self.next_obs)
        self.next_rlt_obs = move_to_cpu(self.next_rlt_obs)
        self.bootstrap_values = move_to_cpu(self.bootstrap_values)
        self.final_prev_values = move_to_cpu(self.final_prev_values)

    def complete(
        self,
        *,
        next_obs: dict[str, Any] | None,
        next_rlt_obs: dict[str, Any] | None,
        final_prev_values: torch.Tensor | None = None,
    ) -> EnvPart:
        """Return the actor-ready part after the fields owned by Rollout are resolved.

        Args:
            next_obs: Next observation, ``None`` unless training reads it.
            next_rlt_obs: RLT features of the next state, or ``None``.
            final_prev_values: Values of the final observation, float [B, n], or ``None``.

        Returns:
            A new part. All of these fields and the bootstrap values (the first column, [B, 1]) are
            replaced, by ``None`` where nothing is passed; the transition stays the same object.
        """
        return replace(
            self,
            requires_inference=False,
            next_obs=next_obs,
            next_rlt_obs=next_rlt_obs,
            final_prev_values=final_prev_values,
            bootstrap_values=None if final_prev_values is None else final_prev_values[:, :1],
        )

    def split(self, split_sizes: list[int] | None = None) -> list[EnvPart]:
        """Split by explicit route sizes, or by the represented sources when none are given."""
        sizes = (
            [source.size for source in self.sources] if split_sizes is None else list(split_sizes)
        )
        initial = self.initial_transition
        rows = zip(
            TrajectorySource.split(self.sources, sizes),
            self.transition.split(sizes),
            split_batch_value(self.next_obs, sizes),
            split_batch_value(self.next_rlt_obs, sizes),
            split_batch_value(self.bootstrap_values, sizes),
            split_batch_value(self.final_prev_values, sizes),
            [None] * len(sizes) if initial is None else initial.split(sizes),
            strict=True,
        )
        return [
            EnvPart(
                sources=sources,
                transition=transition,
                next_obs=next_obs,
                requires_inference=self.requires_inference,
                next_rlt_obs=next_rlt_obs,
                bootstrap_values=bootstrap_values,
                final_prev_values=final_prev_values,
                initial_transition=initial_transition,
            )
            for (
                sources,
                transition,
                next_obs,
                next_rlt_obs,
                bootstrap_values,
                final_prev_values,
                initial_transition,
            ) in rows
        ]

    @classmethod
    def merge(cls, fragments: list[EnvPart]) -> EnvPart:
        """Merge fragments of one source in their batch order.

        Raises:
            ValueError: No fragments, gaps between them, or fragments that disagree on what they
                carry.
        """
        sources = _single_source(fragments, "environment")
        if len({fragment.requires_inference for fragment in fragments}) > 1:
            raise ValueError("Conflicting requires_inference among the fragments of one source.")
        initial = [fragment.initial_transition for fragment in fragments]
        with_initial = sum(transition is not None for transition in initial)
        if 0 < with_initial < len(initial):
            raise ValueError(
                f"cannot merge environment parts: {with_initial} of {len(initial)} "
                "have an initial transition."
            )
        return cls(
            sources=sources,
            transition=EnvTransition.merge([fragment.transition for fragment in fragments]),
            requires_inference=fragments[0].requires_inference,
            initial_transition=EnvTransition.merge(initial) if with_initial else None,
            **{
                name: merge_batch_values([getattr(fragment, name) for fragment in fragments])
                for name in ("next_obs", "next_rlt_obs", "bootstrap_values", "final_prev_values")
            },
        )

    def compute_rewards(
        self,
        *,
        env_reward_weight: float,
        reward_weight: float,
        auto_reset: bool,
        bootstrap_type: str,
        gamma: float,
    ) -> torch.Tensor | None:
        """Training rewards of this part; :meth:`EnvTransition.compute_rewards` with its values."""
        return self.transition.compute_rewards(
            bootstrap_values=self.bootstrap_values,
            env_reward_weight=env_reward_weight,
            reward_weight=reward_weight,
            auto_reset=auto_reset,
            bootstrap_type=bootstrap_type,
            gamma=gamma,
        )
