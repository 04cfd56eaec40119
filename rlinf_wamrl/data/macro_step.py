"""The record of one macro-step: one policy query and the C actions it executed.

Between workers the record travels inside ``forward_inputs`` and the environment's transition, as
plain tensors. :class:`MacroStep` is the typed view of both, checked where data changes hands, so
that a wrong shape is reported by the name of its field and not from inside a kernel.

Shape symbols: * any leading batch dimensions, K denoising steps, H horizon, A and P widths of
action and proprioception, C executed actions, S stochastic steps (``K_sde``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlinf_wamrl.data.interface import EnvTransition

__all__ = ["MacroStep", "RecordSpec"]

_INTEGER_DTYPES = (torch.int64, torch.int32)


@dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """Sizes that every record of a run has; the defaults are FastWAM's on LIBERO."""

    image_size: tuple[int, int] = (224, 448)  # height and width, cameras side by side
    proprio_dim: int = 8  # P
    denoising_steps: int = 10  # K
    action_horizon: int = 32  # H
    action_dim: int = 7  # A
    executed_actions: int = 10  # C
    stochastic_steps: int = 1  # S
    future_frames: int = 2  # executed frames kept for the reconstruction reward
    video_latents_shape: tuple[int, ...] | None = None  # [c, f, h, w] of an imagined video

    def __post_init__(self) -> None:
        for name in (
            "proprio_dim",
            "denoising_steps",
            "action_horizon",
            "action_dim",
            "executed_actions",
            "stochastic_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"RecordSpec.{name} must be positive, got {getattr(self, name)}.")
        if self.future_frames < 0:
            raise ValueError(f"RecordSpec.future_frames is {self.future_frames}, must be >= 0.")
        if self.executed_actions > self.action_horizon:
            raise ValueError(
                f"RecordSpec.executed_actions ({self.executed_actions}) is longer than the horizon "
                f"({self.action_horizon})."
            )
        if self.stochastic_steps > self.denoising_steps:
            raise ValueError(
                f"RecordSpec.stochastic_steps ({self.stochastic_steps}) exceeds the "
                f"denoising_steps ({self.denoising_steps})."
            )

    def layout(self) -> dict[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
        """Accepted dtypes and shape after the batch dimensions, per field of the record."""
        image = (3, *self.image_size)
        steps = () if self.stochastic_steps == 1 else (self.stochastic_steps,)
        single = (torch.float32,)
        layout = {
            "image": ((torch.uint8,), image),
            "proprio": (single, (self.proprio_dim,)),
            "task_id": (_INTEGER_DTYPES, ()),
            "seed": (_INTEGER_DTYPES, ()),
            "group_id": (_INTEGER_DTYPES, ()),
            "chain": (single, (self.denoising_steps + 1, self.action_horizon, self.action_dim)),
            "k_star": (_INTEGER_DTYPES, steps),
            "logp_old": (single, (self.stochastic_steps,)),
            "r_task": (single, ()),
            "done": ((torch.bool,), ()),
            "executed_mask": ((torch.bool,), (self.executed_actions,)),
            "future_frames": ((torch.uint8,), (self.future_frames, *image)),
            "future_frames_exist": ((torch.bool,), (self.future_frames,)),
            "r_rec": (single, ()),
            "R": (single, ()),
            "A_hat": (single, ()),
        }
        if self.video_latents_shape is not None:
            layout["video_latents"] = ((torch.float16,), tuple(self.video_latents_shape))
        return layout


@dataclass(frozen=True, kw_only=True, eq=False)
class MacroStep:
    """Rollout record of one macro-step, or of a batch of them."""

    image: Tensor  # uint8 [*, 3, height, width], seen by the policy
    proprio: Tensor  # float32 [*, P], normalised
    task_id: Tensor  # int [*]
    seed: Tensor  # int [*]
    group_id: Tensor  # int [*], same task and initial state
    chain: Tensor  # float32 [*, K + 1, H, A], from noise to actions
    k_star: Tensor  # int [*], or [*, S]: the stochastic step or steps
    logp_old: Tensor  # float32 [*, S]
    r_task: Tensor  # float32 [*], environment reward of the executed actions
    done: Tensor  # bool [*], an episode ended within the chunk
    executed_mask: Tensor | None = None  # bool [*, C], False where an action did not run
    future_frames: Tensor | None = None  # uint8 [*, n, 3, height, width], what happened
    future_frames_exist: Tensor | None = None  # bool [*, n], False past the end of an episode
    video_latents: Tensor | None = None  # float16 [*, c, f, h, w], the imagined video
    r_rec: Tensor | None = None  # float32 [*], reconstruction reward; from the learner
    R: Tensor | None = None  # float32 [*], return; from the learner
    A_hat: Tensor | None = None  # float32 [*], advantage; from the learner

    @classmethod
    def from_record(
        cls, forward_inputs: Mapping[str, Any], *, rewards: Tensor, dones: Tensor, spec: RecordSpec
    ) -> MacroStep:
        """View a record as it reaches the learner.

        Args:
            forward_inputs: Tensors by field name, as the policy returned them and the environment
                completed them; entries that are no field are left alone.
            rewards: Environment rewards, float [*, C]; summed over the chunk.
            dones: Ends of episodes after each action, bool [*, C].
            spec: Sizes of the run.

        Raises:
            ValueError: A field is missing, or has another dtype or shape than the spec says, or
                values that can't be right.
        """
        names = {spec_field.name for spec_field in fields(cls)}
        values = {key: value for key, value in forward_inputs.items() if key in names}
        k_star = values.get("k_star")
        if spec.stochastic_steps == 1 and k_star is not None and k_star.dim() == rewards.dim():
            values["k_star"] = k_star.squeeze(-1)
        values["r_task"] = rewards.to(torch.float32).sum(dim=-1)
        values["done"] = dones.bool().any(dim=-1)
        required = [field.name for field in fields(cls) if field.default is not None]
        missing = [name for name in required if name not in values]
        if missing:
            raise ValueError(
                f"the macro-step record lacks {missing}, "
                f"forward_inputs has {sorted(forward_inputs)}."
            )
        return cls(**values).check(spec)

    @classmethod
    def from_transition(
        cls, forward_inputs: Mapping[str, Any], transition: EnvTransition, spec: RecordSpec
    ) -> MacroStep:
        """View the two halves of one chunk, before they are stacked; see :meth:`from_record`."""
        if transition.rewards is None or transition.dones is None:
            raise ValueError("a macro-step needs rewards and dones on its transition.")
        record = dict(forward_inputs)
        if transition.executed_mask is not None:
            record["executed_mask"] = transition.executed_mask
        return cls.from_record(
            record, rewards=transition.rewards, dones=transition.dones, spec=spec
        )

    def to_forward_inputs(self) -> dict[str, Tensor]:
        """Flat dict of the fields that travel from rollout to learner; absent ones are left out."""
        kept_by_learner = ("r_task", "done", "r_rec", "R", "A_hat")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in kept_by_learner and getattr(self, field.name) is not None
        }

    def with_learning_targets(
        self,
        spec: RecordSpec,
        *,
        r_rec: Tensor | None = None,
        R: Tensor | None = None,
        A_hat: Tensor | None = None,
    ) -> MacroStep:
        """Copy with what the learner adds, float32 [*] each; ``None`` keeps what is there."""
        targets = {"r_rec": r_rec, "R": R, "A_hat": A_hat}
        given = {name: value for name, value in targets.items() if value is not None}
        return replace(self, **given).check(spec)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dimensions that all fields share."""
        return tuple(self.task_id.shape)

    def check(self, spec: RecordSpec) -> MacroStep:
        """Compare every field with the spec.

        Returns:
            The record itself.

        Raises:
            ValueError: The first field that doesn't fit, in words.
        """
        layout = spec.layout()
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if field.name not in layout:
                raise ValueError(
                    f"{field.name} is in the record, but the run's RecordSpec has no size for it."
                )
            dtypes, trailing = layout[field.name]
            expected = (*self.batch_shape, *trailing)
            if not isinstance(value, Tensor) or value.dtype not in dtypes:
                found = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"{field.name} must be {' or '.join(map(str, dtypes))}, got {found}."
                )
            if tuple(value.shape) != expected:
                raise ValueError(
                    f"{field.name} must be {list(expected)} (batch {list(self.batch_shape)}, then "
                    f"{list(trailing)}), got {list(value.shape)}."
                )
            if value.is_floating_point() and not torch.isfinite(value).all():
                raise ValueError(f"{field.name} holds values that are not finite.")
        if ((self.k_star < 0) | (self.k_star >= spec.denoising_steps)).any():
            raise ValueError(
                f"k_star must be in 0 .. {spec.denoising_steps - 1}, "
                f"got {self.k_star.min().item()} .. {self.k_star.max().item()}."
            )
        return self
