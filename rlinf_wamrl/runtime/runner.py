"""The training loop: RLinf's embodied runner, with progress, resampling and whole checkpoints."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from PIL import Image
from rlinf.runners.embodied_runner import EmbodiedRunner

from rlinf_wamrl.envs.suites import load_suite
from rlinf_wamrl.files import atomic_folder
from rlinf_wamrl.report.console import Console, duration
from rlinf_wamrl.rl.advantage import (
    all_groups_degenerate_message,
    degenerate_groups,
    task_sampling_weights,
    update_success_average,
)
from rlinf_wamrl.runtime.failures import record_failure
from rlinf_wamrl.runtime.rlinf_compat import own_actor_channel
from rlinf_wamrl.runtime.rounds import Round, idle_shares, mean_timers
from rlinf_wamrl.runtime.summary import (
    falling_message,
    iteration_line,
    summarise_evaluation,
    training_metrics,
)

__all__ = ["NoLearningSignalError", "WAMRunner"]


class NoLearningSignalError(RuntimeError):
    """Several rollouts in a row had no group to learn from."""


class WAMRunner(EmbodiedRunner):
    """Rollout, advantages, update, evaluation, checkpoint; one summary line per iteration."""

    def __init__(
        self,
        cfg: DictConfig,
        rollout: Any,
        env: Any,
        console: Console,
        actor: Any = None,
        reward: Any = None,
    ) -> None:
        """Join the worker groups; channels are created here.

        Args:
            cfg: the run, in RLinf's terms.
            rollout: group of rollout workers.
            env: group of env workers.
            console: where progress goes.
            actor: group of learners; None when the run only evaluates.
            reward: group of reward workers; None when the learner imagines.
        """
        self.seconds: Counter[str] = Counter()  # per phase, of the present iteration
        with own_actor_channel(cfg):
            super().__init__(cfg=cfg, actor=actor, rollout=rollout, env=env, reward=reward)
        self.console = console
        self.run_folder = Path(cfg.runner.logger.log_path)
        self.rollout_index = 0
        self._episodes = cfg.env.train.total_num_envs * cfg.env.train.rollout_epoch
        env = cfg.env.train
        suite = load_suite(env.task_suite_name, env.assets_dir)
        self._tasks = list(env.task_ids) or list(range(len(suite.tasks)))
        self._eval_episodes = cfg.env.eval.total_num_envs * cfg.env.eval.rollout_epoch
        self._iteration_seconds: list[float] = []
        self._success_average: dict[str, float] = {}
        self._eval_counts: list[tuple[int, int]] = []  # successes and episodes of each evaluation
        self._ahead: Round | None = None  # rollouts of the next iteration that run already
        self._sent_version = -1  # of the weights that the rollout workers have
        self._timers: Counter[str] = Counter()  # seconds by component/timer, of this iteration

    def init_workers(self) -> None:
        """Build models and environments, and load the checkpoint of ``runner.resume_dir``."""
        if self.actor is None:
            handles = [self.rollout.init_worker(), self.env.init_worker()]
            for handle in handles:
                handle.wait()
            return
        super().init_workers()
        for line in self.actor.describe_training().wait()[0].splitlines():
            self.console.line(f"  {line}")
        resume = self.cfg.runner.resume_dir
        if resume is not None:
            state = json.loads((Path(resume) / "runner.json").read_text())
            self.rollout_index = state["rollout_index"]
            self._success_average = dict(state["success_average"])
            self._eval_counts = [(good, all_) for good, all_ in state["evaluations"]]

    def run(self) -> None:
        """Train until ``runner.max_steps``, or evaluate once."""
        if self.cfg.runner.only_eval:
            self._evaluate("evaluation")
            self._close()
            return
        if self.cfg.runner.eval_before_training and self.global_step == 0:
            self._evaluate("evaluation before training")
        while self.global_step < self.max_steps:
            started = time.monotonic()
            metrics = self._iterate()
            self.global_step += 1
            self._iteration_seconds.append(time.monotonic() - started)
            metrics |= {f"time/{name}": spent for name, spent in self._timers.items()}
            metrics |= idle_shares(self._timers, self._iteration_seconds[-1])
            self._timers.clear()
            self._report(metrics)
            if self._is_due(self.cfg.runner.save_interval, self.global_step):
                self._save_checkpoint()
            if self._is_due(self.cfg.runner.val_check_interval, self.global_step):
                self._evaluate(f"evaluation after iteration {self.global_step}")
        self._close()

    def evaluate(self) -> dict[str, list[Any]]:
        """Run the evaluation episodes; returns each worker's per-episode metrics."""
        env_handle = self.env.evaluate(
            input_channel=self.env_channel,
            rollout_channel=self.rollout_channel,
            progress_channel=self.actor_channel,
            video=str(self.run_folder / "videos" / f"evaluation_{self.global_step:04d}.mp4"),
        )
        rollout_handle = self.rollout.evaluate(
            input_channel=self.rollout_channel, output_channel=self.env_channel
        )
        results = env_handle.wait()
        rollout_handle.wait()
        return results

    def _iterate(self) -> dict[str, float]:
        """Collect until something teaches, and learn from it; returns the iteration's metrics."""
        self.actor.set_global_step(self.global_step).wait()
        attempts = self.cfg.RL.max_resample
        for attempt in range(attempts):
            if self.cfg.runner.use_training_pipeline:
                metrics = self._collect_and_learn()
            else:
                metrics = self._collect_then_learn()
            if metrics["train/macro_steps"] > 0:
                self._read_timers("actor", self.actor)
                metrics.update({f"time/{name}": spent for name, spent in self.seconds.items()})
                self.seconds.clear()
                return {**metrics, "rollout/resampled": float(attempt)}
            self.console.line(
                f"  every group ended alike ({metrics['rollout/successes']:.0f}/"
                f"{metrics['rollout/episodes']:.0f} successes): sampling other initial states"
            )
        raise NoLearningSignalError(
            all_groups_degenerate_message(
                attempts, int(metrics["rollout/successes"]), int(metrics["rollout/episodes"])
            )
        )

    def _collect_then_learn(self) -> dict[str, float]:
        """Learn from one round, while the next one is collected if the staleness bound allows."""
        current = self._ahead or self._start_round()
        self._ahead = None
        with self._phase("rollouts", self._rollout_progress):
            self.actor.recv_rollout_trajectories(input_channel=self.actor_channel).wait()
            metrics = self._finish_round(current)
        if self._may_roll_ahead():
            self._ahead = self._start_round()
        with self._phase("advantages"):
            counted = self.actor.compute_advantages_and_returns().wait()
        if sum(rank["macro_steps"] for rank in counted) == 0:
            return {**metrics, "train/macro_steps": 0.0}
        with self._phase("learning"):
            trained = self.actor.run_training().wait()
        return {**metrics, **training_metrics(trained)}

    def _may_roll_ahead(self) -> bool:
        """Whether the next round may start before this iteration's update.

        Nothing runs across a checkpoint or an evaluation, so that a resumed run goes on as if it
        had not stopped.
        """
        upcoming, runner = self.global_step + 1, self.cfg.runner
        return (
            self.cfg.algorithm.staleness_threshold > 0
            and upcoming < self.max_steps
            and not self._is_due(runner.save_interval, upcoming)
            and not self._is_due(runner.val_check_interval, upcoming)
        )

    def _collect_and_learn(self) -> dict[str, float]:
        current = self._start_round()
        with self._phase("rollouts and learning", self._rollout_progress):
            trained = self.actor.run_training(input_channel=self.actor_channel).wait()
            metrics = self._finish_round(current)
        return {**metrics, **training_metrics(trained)}

    def _choose_tasks(self) -> None:
        """Draw the next iteration's tasks by how well each has gone so far."""
        choice = self.cfg.RL.task_choice
        if choice.mode == "uniform":
            return
        tasks = self._tasks
        average = torch.tensor([self._success_average.get(str(task), math.nan) for task in tasks])
        weights = task_sampling_weights(
            average, choice.mode, epsilon=choice.epsilon, beta=choice.beta
        )
        self.env.set_task_weights(weights.tolist()).wait()

    def _follow_tasks(self, tasks: torch.Tensor, outcome: torch.Tensor) -> dict[str, float]:
        """Update the success average of each task; returns this iteration's rates."""
        rates = {}
        for task in sorted(set(tasks.tolist())):
            mine = outcome[tasks == task]
            before = torch.tensor([self._success_average.get(str(task), math.nan)])
            after = update_success_average(
                before,
                mine.sum().view(1),
                torch.tensor([mine.numel()]),
                self.cfg.RL.task_choice.decay,
            )
            self._success_average[str(task)] = after.item()
            rates[f"env/success_rate/task_{task}"] = float(mine.mean())
        return rates

    def _start_round(self) -> Round:
        """Send the learner's weights, if they are due, and start the next round of rollouts."""
        is_due = self._sent_version < 0 or self.global_step % self.weight_sync_interval == 0
        if self._sent_version != self.global_step and is_due:
            with self._phase("sending weights"):
                self.update_rollout_weights()
            self._sent_version = self.global_step
        return self._start_rollouts()

    def _start_rollouts(self) -> Round:
        self._choose_tasks()
        step = self.rollout_index
        self.env.set_global_step(step).wait()
        self.rollout_index += 1
        env_handle = self.env.interact(
            input_channel=self.env_channel,
            rollout_channel=self.rollout_channel,
            reward_channel=self.reward_channel,
            actor_channel=self.actor_channel,
        )
        rollout_handle = self.rollout.generate(
            input_channel=self.rollout_channel,
            output_channel=self.env_channel,
            actor_channel=self.actor_channel,
        )
        if self.reward is not None:
            self.reward.compute_rewards(
                input_channel=self.reward_channel, output_channel=self.env_channel
            )
        return Round(step, env_handle, rollout_handle)

    def _finish_round(self, current: Round) -> dict[str, float]:
        current.rollout.wait()
        results = current.env.wait()
        for part in self._left_out(current.step):
            self.console.line(f"warning: left out of the trajectories of this iteration: {part}")
        self._read_timers("env", self.env)
        self._read_timers("rollout", self.rollout)
        if self.reward is not None:
            self._read_timers("reward", self.reward)
        return self._episode_metrics(results)

    def _left_out(self, step: int) -> list[str]:
        return ray.get(self._collecting_worker.finish_step.remote(step))

    def _read_timers(self, component: str, group: Any) -> None:
        self._timers.update(mean_timers(component, group.pop_execution_times().wait()))

    def _episode_metrics(self, env_results: list[dict[str, Any]]) -> dict[str, float]:
        outcome = torch.cat([result["success_once"] for result in env_results]).float()
        lengths = torch.cat([result["episode_len"] for result in env_results]).float()
        tasks = torch.cat([result["task_id"] for result in env_results])
        degenerate = degenerate_groups(outcome, self.cfg.RL.group_size)
        return {
            **self._follow_tasks(tasks, outcome),
            "rollout/episodes": float(outcome.numel()),
            "rollout/successes": float(outcome.sum()),
            "rollout/groups": float(degenerate.numel()),
            "rollout/groups_degenerate": float(degenerate.sum()),
            "env/success_rate": float(outcome.mean()),
            "env/episode_len": float(lengths.mean()),
        }

    def _evaluate(self, title: str) -> None:
        with self._phase(title, self._eval_progress):
            if self.actor is not None:
                self.update_rollout_weights()
            results = self.evaluate()
            for group in (self.env, self.rollout):
                group.pop_execution_times().wait()  # no part of an iteration
        self.seconds.clear()
        metrics, record, text = summarise_evaluation(results)
        self.metric_logger.log(metrics, self.global_step)
        with (self.run_folder / "evaluations.jsonl").open("a") as stream:
            entry = {"iteration": self.global_step, "title": title, **record}
            stream.write(json.dumps(entry) + "\n")
        self.console.line(f"{title}: {text}")
        self._eval_counts.append((record["successes"], record["episodes"]))
        fallen = falling_message(self._eval_counts)
        if fallen:
            self.console.line(f"warning: {fallen}")

    def _report(self, metrics: dict[str, float]) -> None:
        seconds = self._iteration_seconds[-1]
        metrics["time/episodes_per_hour"] = 3600.0 * metrics["rollout/episodes"] / seconds
        self.metric_logger.log(metrics, self.global_step)
        self._show_picture()
        with (self.run_folder / "iterations.jsonl").open("a") as stream:
            stream.write(json.dumps({"iteration": self.global_step, **metrics}) + "\n")
        recent = self._iteration_seconds[-5:]
        left = (self.max_steps - self.global_step) * sum(recent) / len(recent)
        self.console.line(
            f"iteration {self.global_step}/{self.max_steps}  {iteration_line(metrics)}  "
            f"{seconds:.0f}s" + (f"  left {duration(left)}" if left else "")
        )

    def _show_picture(self) -> None:
        """Put this iteration's imagined and executed frames into TensorBoard, where it is on."""
        picture = self.run_folder / "pictures" / f"iteration_{self.global_step:04d}.png"
        board = self.metric_logger.logger.get("tensorboard")
        if picture.is_file() and board is not None:
            pixels = np.asarray(Image.open(picture))
            board.writer.add_image("imagined_executed", pixels, self.global_step, dataformats="HWC")

    def _is_due(self, interval: int, step: int) -> bool:
        return interval > 0 and (step % interval == 0 or step == self.max_steps)

    def _save_checkpoint(self) -> None:
        """Write the checkpoint under a temporary name and rename it when it is complete."""
        folder = self.run_folder / "checkpoints" / f"global_step_{self.global_step}"
        with self._phase("saving"), atomic_folder(folder, overwrite=True) as partial:
            (partial / "actor").mkdir()
            self.actor.save_checkpoint(str(partial / "actor"), self.global_step).wait()
            state = {
                "rollout_index": self.rollout_index,
                "success_average": self._success_average,
                "evaluations": self._eval_counts,
            }
            (partial / "runner.json").write_text(json.dumps(state))
        self.console.line(f"checkpoint {folder}")

    def _close(self) -> None:
        self._finish_run()
        self.console.done()

    @contextmanager
    def _phase(self, name: str, progress: Callable[[], str] | None = None) -> Iterator[None]:
        """Time a phase and keep the live line going while it lasts."""
        self.console.phase(name)
        stop = threading.Event()

        def refresh() -> None:
            while not stop.wait(0.5):
                self.console.update(progress() if progress else "")

        thread = threading.Thread(target=refresh, daemon=True)
        thread.start()
        began = time.monotonic()
        try:
            yield
        finally:
            # a phase may come several times in an iteration, when its rollouts are drawn again
            self.seconds[name.split(" after ")[0].replace(" ", "_")] += time.monotonic() - began
            stop.set()
            thread.join()
            self.console.done()

    @property
    def _collecting_worker(self) -> Any:
        return self.actor_channel._main_channel_worker_actor

    def _rollout_progress(self) -> str:
        return self._progress(self._episodes)

    def _eval_progress(self) -> str:
        return self._progress(self._eval_episodes)

    def _progress(self, total: int) -> str:
        asked = self._collecting_worker.progress.remote()
        try:
            episodes, successes = ray.get(asked, timeout=2.0)
        except ray.exceptions.RayTaskError as error:  # consumers would wait for ever
            record_failure("trajectory channel", "put", error)
            return ""
        except Exception:  # a dead process is reported by whoever waits for the worker
            return ""
        return f"iteration {self.global_step + 1}  episodes {episodes}/{total}  success {successes}"
