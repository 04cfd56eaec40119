"""One joined action chunk, resolved into what training needs of it.

Shape symbols: B environments, C actions of a chunk, A the width of one action, D = C * A.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from rlinf_wamrl.data.batch_values import CompactPickle, move_to_cpu
from rlinf_wamrl.data.parts import EnvPart, PolicyPart

__all__ = ["TrajectoryStep"]

_RLT_KEYS = ("z_rl", "proprio", "ref_chunk")


@dataclass(kw_only=True, eq=False)
class TrajectoryStep(CompactPickle):
    """Complete training data for one joined action chunk."""

    actions: torch.Tensor | None = None  # float [B, D]
    intervene_flags: torch.Tensor | None = None  # bool [B, D]
    prev_logprobs: torch.Tensor | None = None  # float [B, 1], [B, C] or [B, C, A]
    prev_values: torch.Tensor | None = None  # float [B, 1]
    dones: torch.Tensor | None = None  # bool [B, C]
    truncations: torch.Tensor | None = None  # bool [B, C]
    terminations: torch.Tensor | None = None  # bool [B, C]
    rewards: torch.Tensor | None = None  # float [B, C]
    forward_inputs: dict[str, Any] = field(default_factory=dict)  # leaves [B, ...]
    versions: torch.Tensor | None = None  # float, shaped like prev_logprobs
    curr_obs: dict[str, Any] = field(default_factory=dict)  # leaves [B, ...]
    next_obs: dict[str, Any] = field(default_factory=dict)  # leaves [B, ...]
    initial_dones: torch.Tensor | None = None  # bool [B, C], before an epoch's first chunk
    initial_truncations: torch.Tensor | None = None  # bool [B, C]
    initial_terminations: torch.Tensor | None = None  # bool [B, C]
    final_prev_values: torch.Tensor | None = None  # float [B, 1], after an epoch's last chunk

    def __post_init__(self) -> None:
        for spec in fields(self):
            setattr(self, spec.name, move_to_cpu(getattr(self, spec.name)))
        if self.actions is not None and self.intervene_flags is None:
            self.intervene_flags = torch.zeros_like(self.actions, dtype=torch.bool)

    @classmethod
    def from_parts(
        cls,
        policy: PolicyPart,
        env: EnvPart,
        *,
        rewards: torch.Tensor | None,
        collect_prev_infos: bool,
        collect_transitions: bool,
        enable_rlt: bool,
        include_final_value: bool,
    ) -> TrajectoryStep:
        """Resolve one joined policy/env pair into self-contained step data.

        The one place where policy statistics, environment boundaries, interventions and optional
        transitions become training data. Where the environment says that actions did not run
        (``executed_mask``), their log-probs become exactly 0; the mask goes to
        ``forward_inputs["executed_mask"]``, and the model has to apply it to what it recomputes.
        Later changes of the step's ``forward_inputs`` don't reach the part.

        Args:
            policy: Policy half, from inference.
            env: Environment half, completed.
            rewards: Training rewards, float [B, C].
            collect_prev_infos: Keep log-probs and values of the acting policy.
            collect_transitions: Keep raw current and next observations.
            enable_rlt: Keep RLT features as the transition instead.
            include_final_value: Keep the value after the epoch's last chunk.

        Raises:
            ValueError: A part that skipped inference, log-probs that don't begin with the mask's
                [B, C], or missing transition data.
        """
        output = policy.output
        if output is None:
            raise ValueError(
                "a trajectory step needs a policy output, this part skipped inference."
            )
        transition, initial = env.transition, env.initial_transition
        forward_inputs = dict(output.forward_inputs)
        logprobs = output.prev_logprobs if collect_prev_infos else None
        if transition.executed_mask is not None:
            forward_inputs["executed_mask"] = transition.executed_mask
            if logprobs is not None:
                logprobs = _mask_unexecuted(logprobs, transition.executed_mask)
        step = cls(
            actions=forward_inputs.get("action"),
            prev_logprobs=logprobs,
            prev_values=output.prev_values if collect_prev_infos else None,
            dones=transition.dones,
            truncations=transition.truncations,
            terminations=transition.terminations,
            rewards=rewards,
            forward_inputs=forward_inputs,
            versions=output.versions,
            initial_dones=None if initial is None else initial.dones,
            initial_truncations=None if initial is None else initial.truncations,
            initial_terminations=None if initial is None else initial.terminations,
            final_prev_values=(
                env.final_prev_values if include_final_value and collect_prev_infos else None
            ),
        )
        if transition.intervene_actions is not None:
            step.apply_interventions(transition.intervene_actions, transition.intervene_flags)
        if output.intervene_flags is not None:
            step.set_intervention_flags(output.intervene_flags)
        step.set_transition_observations(
            policy, env, collect_transitions=collect_transitions, enable_rlt=enable_rlt
        )
        return step

    def apply_interventions(
        self, intervene_actions: torch.Tensor, intervene_flags: torch.Tensor | None
    ) -> None:
        """Replace executed actions by the expert's and keep their training metadata in step.

        Whole action slots are replaced. ``forward_inputs["action"]`` becomes the same tensor as
        ``actions``; ``model_action``, which nothing executed, is dropped.

        Args:
            intervene_actions: Expert actions, float [B, D].
            intervene_flags: Slots the expert took, bool [B] or [B, C].

        Raises:
            ValueError: No flags, or actions or flags of another layout.
        """
        if self.actions is None:
            return
        if intervene_flags is None:
            raise ValueError("expert actions came without flags saying which slots they replaced.")
        for name, value in (("actions", self.actions), ("intervene_actions", intervene_actions)):
            if value.dim() != 2:
                raise ValueError(
                    f"{name} must be flattened to [B, C * A], got {list(value.shape)}."
                )
        expanded = _expand_flags(intervene_flags, self.actions)
        expert = move_to_cpu(intervene_actions).to(self.actions.dtype)
        self.actions = torch.where(expanded, expert, self.actions)
        self.intervene_flags = expanded
        if "action" in self.forward_inputs:
            self.forward_inputs["action"] = self.actions
        self.forward_inputs.pop("model_action", None)

    def set_intervention_flags(self, intervene_flags: torch.Tensor) -> None:
        """Expand flags per action slot, bool [B] or [B, C], to the layout of the actions [B, D]."""
        if self.actions is not None:
            self.intervene_flags = _expand_flags(intervene_flags, self.actions)

    def set_transition_observations(
        self, policy: PolicyPart, env: EnvPart, *, collect_transitions: bool, enable_rlt: bool
    ) -> None:
        """Extract the transition that the algorithm trains on.

        RLT features win over raw observations; with neither, both dicts stay as they are.

        Args:
            policy: Policy half; its observation is the current one.
            env: Environment half; its ``next_obs`` or ``next_rlt_obs`` is the next one.
            collect_transitions: Whether raw observations are wanted.
            enable_rlt: Whether RLT features are wanted.

        Raises:
            ValueError: What is wanted isn't in the parts.
        """
        if enable_rlt:
            missing = [key for key in _RLT_KEYS if key not in self.forward_inputs]
            if missing:
                raise ValueError(f"RLT transitions need {missing} in forward_inputs.")
            if env.next_rlt_obs is None:
                raise ValueError("RLT transitions need next_rlt_obs on the environment part.")
            self.curr_obs = {key: self.forward_inputs[key] for key in _RLT_KEYS}
            self.curr_obs["ref_chunk"] = self._reference_with_interventions()
            self.next_obs = dict(env.next_rlt_obs)
        elif collect_transitions:
            if env.next_obs is None:
                raise ValueError("raw transitions need next_obs on the environment part.")
            self.curr_obs = _without_task(policy.obs)
            self.next_obs = _without_task(env.next_obs)

    def _reference_with_interventions(self) -> torch.Tensor:
        """The reference chunk with the expert's actions in the slots that they replaced."""
        reference = self.forward_inputs["ref_chunk"]
        if self.actions is None or not self.intervene_flags.any():
            return reference
        flat = reference.reshape(len(reference), -1).clone()
        width = min(flat.shape[1], self.actions.shape[1])
        flat[:, :width] = torch.where(
            self.intervene_flags[:, :width],
            self.actions[:, :width].to(flat.dtype),
            flat[:, :width],
        )
        return flat.reshape(reference.shape)

    def add_reward(self, env_id: int, reward: torch.Tensor) -> None:
        """Add one delayed reward, float [C], to an environment in this step, in place.

        Raises:
            ValueError: The step has no rewards.
        """
        if self.rewards is None:
            raise ValueError(f"cannot add a reward for environment {env_id}: the step has none.")
        self.rewards[env_id] += reward.to(self.rewards.dtype)


def _mask_unexecuted(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if logprobs.shape[:2] != mask.shape:
        raise ValueError(
            f"executed_mask {list(mask.shape)} needs log-probs that begin with [B, C], "
            f"got {list(logprobs.shape)}."
        )
    trailing = mask.reshape(*mask.shape, *[1] * (logprobs.dim() - 2))
    return logprobs.masked_fill(~trailing, 0.0)


def _expand_flags(flags: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Repeat flags per action slot over the action's width: [B] or [B, C] to [B, D]."""
    flags = move_to_cpu(flags).bool()
    if flags.dim() == 1:
        flags = flags[:, None]
    width = actions.reshape(len(actions), -1).shape[1]
    if flags.dim() != 2 or len(flags) != len(actions) or width % flags.shape[1]:
        raise ValueError(
            f"intervention flags must be [B] or [B, C] for actions {list(actions.shape)}, "
            f"got {list(flags.shape)}."
        )
    return flags.repeat_interleave(width // flags.shape[1], dim=1)


def _without_task(obs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in obs.items() if key != "task_descriptions"}
