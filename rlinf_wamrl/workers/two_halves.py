"""What the learner is made of: the model, an optimiser for each half, what a checkpoint holds."""

from __future__ import annotations

import math
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig
from rlinf.workers.actor.fsdp_actor_worker import EmbodiedFSDPActor
from torch import Tensor

from rlinf_wamrl.checkpoint import read_learner, write_learner
from rlinf_wamrl.data.macro_step import RecordSpec
from rlinf_wamrl.data.traffic import run_shapes
from rlinf_wamrl.files import atomic_path
from rlinf_wamrl.wam.lora import trainable_set
from rlinf_wamrl.workers.gradients import clip_gradients
from rlinf_wamrl.workers.imagination import ImaginationReward
from rlinf_wamrl.workers.training_state import load_training_state, training_state
from rlinf_wamrl.workers.video_half import VideoHalf

__all__ = ["TwoHalvesActor"]


class TwoHalvesActor(EmbodiedFSDPActor):
    """RLinf's embodied actor with two optimisers: of the action half and of the adapters."""

    def __init__(self, cfg: DictConfig) -> None:
        """Read the sizes; the model is built in ``init_worker``."""
        super().__init__(cfg)
        if cfg.actor.num_threads is not None:
            torch.set_num_threads(cfg.actor.num_threads)

    def setup_model_and_optimizer(self) -> None:
        """Build the model, its two optimisers, and what the reward and the video half need."""
        if not self.cfg.actor.wraps_model:
            self._strategy.wrap_model = lambda model, device_mesh: model.to(self.device)
        super().setup_model_and_optimizer()
        self.param_names_need_sync = self._trained_names
        self.record_spec = self._record_spec()
        rl, folder = self.cfg.RL, Path(self.cfg.runner.logger.log_path)
        self.imagination = self.video = None
        if rl.lambda_rec > 0:
            self.imagination = ImaginationReward(self.cfg, self.policy_config, self.device)
        if rl.video_sft.enabled:
            self.video = VideoHalf(self.cfg, folder / "success_buffer", self._rank)

    def _record_spec(self) -> RecordSpec:
        """Return the sizes of this run's macro-steps."""
        size = self._processor.config
        picture = (size.image_height, 2 * size.image_width)
        shapes = run_shapes(self.cfg, self.policy_config, picture)
        return RecordSpec(
            image_size=shapes.picture,
            proprio_dim=self._processor.proprio_normaliser.width,
            denoising_steps=shapes.denoising_steps,
            action_horizon=shapes.horizon,
            action_dim=shapes.action_dim,
            executed_actions=shapes.executed,
            stochastic_steps=shapes.stochastic_steps,
            future_frames=shapes.frames,
            video_latents_shape=shapes.latents,
        )

    def model_provider_func(self) -> torch.nn.Module:
        """Build the policy, and remember its sizes.

        Where FSDP casts weights for the arithmetic, what trains is kept in float32: AdamW's steps
        are smaller than the spacing of bf16 numbers.
        """
        policy = super().model_provider_func()
        if self.cfg.actor.fsdp_config.mixed_precision.param_dtype is not None:
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        # FSDP1 puts a prefix before the names
        self._trained_names = [n for n, p in policy.named_parameters() if p.requires_grad]
        self.policy_config = policy.wam.config
        self._processor = policy.processor
        self.logger_lines = str(trainable_set(policy.wam, policy.trained_parts, root=policy))
        return policy

    def _forward(self, **arguments: Any) -> Any:
        """Call the (sharded) policy.

        FSDP2 casts every tensor it finds in the arguments to the arithmetic's dtype, and a chain in
        bf16 has another log-prob. It looks into dicts, but not into read-only views of them.
        """
        views = {k: MappingProxyType(v) for k, v in arguments.items() if isinstance(v, dict)}
        return self.model(**(arguments | views))

    def build_optimizer(
        self, model: torch.nn.Module, enable_critic_warmup: bool = False
    ) -> torch.optim.Optimizer | None:
        """Build AdamW for the action half and, beside it, for the adapters.

        Returns:
            The action half's optimiser, None when it does not train.
        """
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.video_parameters = [p for n, p in named if ".lora_" in n]
        self.action_parameters = [p for n, p in named if ".lora_" not in n]
        self.video_optimizer = None
        if self.video_parameters:
            self.video_optimizer = self._adamw(self.video_parameters, self.cfg.RL.video_sft.lr)
        if not self.action_parameters:
            return None
        return self._adamw(self.action_parameters, self.cfg.actor.optim.lr)

    def _adamw(self, parameters: list[Tensor], rate: float) -> torch.optim.Optimizer:
        options = self.cfg.actor.optim
        return torch.optim.AdamW(
            parameters,
            lr=rate,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
        )

    def build_lr_scheduler(self, optimizer: Any, optim_config: Any, last_epoch: int = -1) -> Any:
        """Build the schedule of the action half; None when it does not train."""
        if optimizer is None:
            return None
        return super().build_lr_scheduler(optimizer, optim_config, last_epoch)

    def offload_optimizer(self) -> None:
        """Move the state of both optimisers off the device."""
        for optimizer in self._optimizers().values():
            self._strategy.offload_optimizer(optimizer)
        self.is_optimizer_offloaded = True

    def load_optimizer(self, device_id: Any) -> None:
        """Move the state of both optimisers back."""
        for optimizer in self._optimizers().values():
            self._strategy.onload_optimizer(optimizer, device_id)
        self.is_optimizer_offloaded = False

    def set_global_step(self, global_step: int) -> None:
        """Begin an iteration: from here on the weights are those of version ``global_step``."""
        super().set_global_step(global_step)
        self._steps_at_version = self.optimizer_steps

    def describe_training(self) -> str:
        """Return what trains and what does not, a line per part."""
        return self.logger_lines

    def _stop_at(self, message: str, batch: dict[str, Any]) -> NoReturn:
        """End the run at a number that is not finite, with what led to it saved for inspection."""
        file = Path(self.cfg.runner.logger.log_path) / f"not_finite_rank_{self._rank}.pt"
        with atomic_path(file) as temporary:
            torch.save(batch, temporary)
        raise FloatingPointError(f"iteration {self.version + 1}: {message} (batch in {file})")

    def _step(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> float:
        """Clip the gradients of one half and step; returns their norm before clipping."""
        self.grad_scaler.unscale_(optimizer)
        norm = clip_gradients(self.model, parameters, self.cfg.actor.optim.clip_grad)
        if not math.isfinite(norm):
            self._stop_at(f"the gradient norm is {norm}; lower the learning rate", {})
        self.grad_scaler.step(optimizer)
        self.grad_scaler.update()
        self.optimizer_steps += 1
        return norm

    def save_checkpoint(self, save_path: str, step: int = 0) -> None:
        """Write what training changes: weights, optimisers, schedule, normaliser, buffer index.

        Never the frozen base. What differs between ranks goes into a file of each rank.

        Args:
            save_path: folder, which exists.
            step: training iteration.
        """
        state = training_state(self.model, self._optimizers(), self.param_names_need_sync)
        if self._rank == 0:
            state.update(
                step=step,
                lr_scheduler=self.lr_scheduler.state_dict() if self.lr_scheduler else None,
                imagination=self.imagination.state_dict() if self.imagination else None,
            )
            write_learner(save_path, state)
        if self.video is not None:
            write_learner(save_path, self.video.state_dict(), rank=self._rank)

    def load_checkpoint(self, load_path: str) -> None:
        """Continue from a folder :meth:`save_checkpoint` wrote."""
        state = read_learner(load_path)
        load_training_state(
            self.model, self._optimizers(), self.param_names_need_sync, state, load_path
        )
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if self.imagination is not None:
            self.imagination.load_state_dict(state["imagination"])
        if self.video is not None:
            # run folder / checkpoints / global_step_N / actor
            source = Path(load_path).parents[2] / "success_buffer"
            self.video.load_state_dict(read_learner(load_path, rank=self._rank), source)

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        both = {"action": self.optimizer, "video": self.video_optimizer}
        return {name: optimizer for name, optimizer in both.items() if optimizer is not None}

    def _gathered(self, vector: Tensor) -> list[Tensor]:
        """Return a vector of every rank, in the order of ranks."""
        vector = vector.to(self.device)
        gathered = [torch.empty_like(vector) for _ in range(self._world_size)]
        torch.distributed.all_gather(gathered, vector)
        return [piece.cpu() for piece in gathered]

    def _agreed_count(self, count: int) -> int:
        """Return the largest ``count`` over the ranks: all must take equally many steps."""
        agreed = torch.tensor(count, device=self.device)
        torch.distributed.all_reduce(agreed, op=torch.distributed.ReduceOp.MAX)
        return int(agreed)

    def _mean_over_ranks(self, value: float) -> float:
        """Return the mean over ranks: gradients are averaged, so losses weigh by global counts."""
        total = torch.tensor(float(value), device=self.device)
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
        return float(total) / self._world_size
