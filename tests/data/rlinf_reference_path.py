"""The way of RLinf 0.3.0 from rollouts to an actor batch, fed with the messages of this package.

Its classes and functions do the work; only the loop around them, which in RLinf is tied to live
workers, is written out here.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

from omegaconf import DictConfig
from rlinf.data.embodied_io_struct import (
    ChunkStepResult,
    EmbodiedRolloutResult,
    EnvOutput,
    RolloutResult,
)

from rlinf_wamrl.data.embodied_types import EnvPart, EnvTransition


def as_rollout_result(pair) -> RolloutResult:
    """What the rollout worker sends to the environment worker."""
    output = pair.policy.output
    return RolloutResult(
        actions=output.forward_inputs["action"],
        prev_logprobs=output.prev_logprobs,
        prev_values=output.prev_values,
        forward_inputs=dict(output.forward_inputs),
        versions=output.versions,
    )


def as_env_output(transition: EnvTransition) -> EnvOutput:
    """What the environment worker keeps between two chunks."""
    return EnvOutput(
        obs={},
        rewards=transition.rewards,
        dones=transition.dones,
        terminations=transition.terminations,
        truncations=transition.truncations,
        intervene_actions=transition.intervene_actions,
        intervene_flags=transition.intervene_flags,
    )


def collect_source(epochs, cfg: DictConfig, transfer=lambda message: message):
    """Chunks of one source, epoch by epoch, as the environment worker collects them.

    Args:
        epochs: Lists of chunk pairs.
        cfg: Run config.
        transfer: Applied to each message on its way from the rollout worker.
    """
    from rlinf.workers.env.env_worker import EnvWorker

    collected = EmbodiedRolloutResult(max_episode_length=cfg.env.train.max_episode_steps)
    worker = SimpleNamespace(
        cfg=cfg,
        env_reward_weight=cfg.reward.env_reward_weight,
        reward_weight=cfg.reward.reward_weight,
        rollout_results=[collected],
        train_num_envs_per_stage=len(epochs[0][0].policy.output.prev_logprobs),
    )
    compute_rewards = inspect.unwrap(EnvWorker.compute_bootstrap_rewards)  # without its timers

    def take_outcome(part: EnvPart | None, env_output: EnvOutput, **policy_fields) -> None:
        if env_output.intervene_actions is not None:
            collected.update_last_actions(env_output.intervene_actions, env_output.intervene_flags)
        scores = None if part is None else part.transition.reward_model_output
        bootstrap = None if part is None else part.bootstrap_values
        collected.append_step_result(
            ChunkStepResult(
                dones=env_output.dones,
                truncations=env_output.truncations,
                terminations=env_output.terminations,
                rewards=compute_rewards(worker, env_output, bootstrap, scores),
                **policy_fields,
            )
        )
        if scores is not None and part.transition.reward_assign_lengths is not None:
            worker.history_lengths = [{"buffer": part.transition.reward_assign_lengths}]
            EnvWorker.assign_history_reward(worker, 0, scores)

    for pairs in epochs:
        part, env_output = None, as_env_output(pairs[0].env.initial_transition)
        for pair in pairs:
            result = transfer(as_rollout_result(pair))
            take_outcome(
                part,
                env_output,
                actions=result.forward_inputs.get("action"),
                prev_logprobs=result.prev_logprobs,
                prev_values=result.prev_values,
                forward_inputs=result.forward_inputs,
                versions=result.versions,
            )
            part, env_output = pair.env, as_env_output(pair.env.transition)
        take_outcome(part, env_output, prev_values=part.final_prev_values)
    return collected
