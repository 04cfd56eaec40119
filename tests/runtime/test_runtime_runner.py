"""The runner's own decisions, without Ray: tasks, resampling, what it sums up."""

import io
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from rlinf_wamrl.report.console import Console
from rlinf_wamrl.runtime.runner import NoLearningSignalError, WAMRunner


class Handle:
    def __init__(self, value=None):
        self.value = value

    def wait(self):
        return self.value


class FakeEnv:
    def __init__(self):
        self.weights = []

    def set_task_weights(self, weights):
        self.weights.append(weights)
        return Handle()


def runner(**rl):
    made = WAMRunner.__new__(WAMRunner)
    choice = {"mode": "learnable", "epsilon": 0.05, "beta": 1.0, "decay": 0.5}
    made.cfg = OmegaConf.create(
        {
            "RL": {"group_size": 2, "max_resample": 3, "task_choice": choice, **rl},
            "runner": {"use_training_pipeline": False},
        }
    )
    made.env = FakeEnv()
    made._tasks = [0, 1, 2]
    made._success_average = {}
    return made


def results(tasks, outcome):
    return [
        {
            "task_id": torch.tensor(tasks),
            "success_once": torch.tensor(outcome, dtype=torch.bool),
            "episode_len": torch.tensor([10] * len(tasks)),
        }
    ]


def test_success_per_task_drives_the_next_iterations_tasks():
    made = runner()
    metrics = made._episode_metrics(results([0, 0, 1, 1], [1, 1, 1, 0]))
    assert metrics["env/success_rate/task_0"] == 1.0
    assert metrics["env/success_rate/task_1"] == 0.5
    made._choose_tasks()
    (weights,) = made.env.weights
    expected = torch.tensor([0.05, 0.3, 0.3]) / 0.65  # solved, half solved, never tried
    assert weights == pytest.approx(expected.tolist(), rel=1e-5)
    made._episode_metrics(results([0, 0, 1, 1], [0, 0, 1, 1]))
    assert made._success_average == pytest.approx({"0": 0.5, "1": 0.75})


def test_uniform_choice_leaves_the_environments_alone():
    made = runner(task_choice={"mode": "uniform"})
    made._choose_tasks()
    assert made.env.weights == []


def test_groups_that_ended_alike_are_counted():
    metrics = runner()._episode_metrics(results([0, 0, 0, 0], [1, 1, 1, 0]))
    assert metrics["rollout/groups"] == 2 and metrics["rollout/groups_degenerate"] == 1
    assert metrics["rollout/successes"] == 3 and metrics["env/episode_len"] == 10


def iterating(counts):
    """A runner whose successive rollouts have these numbers of macro-steps to learn from."""
    made, left = runner(), iter(counts)
    made.global_step, made.weight_sync_interval = 0, 1
    made.actor = SimpleNamespace(
        set_global_step=lambda step: Handle(), pop_execution_times=lambda: Handle([{}])
    )
    made.console = SimpleNamespace(line=lines.append, phase=lambda _: None, done=lambda: None)
    made.seconds, made._timers = Counter(), Counter()

    def collect():
        with made._phase("rollouts"):
            time.sleep(0.02)
        macro_steps = next(left)
        return {
            "train/macro_steps": macro_steps,
            "rollout/successes": 0.0,
            "rollout/episodes": 8.0,
        }

    made._collect_then_learn = collect
    return made


lines: list[str] = []


def test_rollouts_without_any_signal_are_drawn_again_and_counted():
    lines.clear()
    metrics = iterating([0, 0, 12])._iterate()
    assert metrics["rollout/resampled"] == 2.0 and metrics["train/macro_steps"] == 12
    assert len(lines) == 2 and "ended alike" in lines[0]
    assert metrics["time/rollouts"] >= 3 * 0.02


def test_it_gives_up_in_words_and_never_loops():
    with pytest.raises(NoLearningSignalError, match="after 3 rollouts: every episode failed"):
        iterating([0, 0, 0])._iterate()


class Recorder:
    """A worker group that writes down what it is asked for."""

    def __init__(self, name, calls, results):
        self._name, self._calls, self._results = name, calls, results

    def __getattr__(self, method):
        def call(*_, **__):
            self._calls.append(f"{self._name}.{method}")
            return Handle(self._results.get(method, [{}]))

        return call


def asynchronous(threshold, steps=3, save_interval=-1):
    """A runner with recorded worker groups, and the list of its calls."""
    made, calls = runner(task_choice={"mode": "uniform", "decay": 0.5}), []
    made.cfg.algorithm = {"staleness_threshold": threshold}
    made.cfg.runner.update({"save_interval": save_interval, "val_check_interval": -1})
    made.max_steps, made.global_step, made.weight_sync_interval = steps, 0, 1
    made.rollout_index, made._ahead, made._sent_version = 0, None, -1
    made.seconds, made._timers = Counter(), Counter()
    made.console = SimpleNamespace(line=lines.append, phase=lambda _: None, done=lambda: None)
    made._left_out = lambda step: [f"a part of step {step}"]
    made.env = Recorder("env", calls, {"interact": results([0, 0], [1, 0])})
    made.rollout, made.reward = Recorder("rollout", calls, {}), None
    made.env_channel = made.rollout_channel = made.reward_channel = made.actor_channel = None
    counted = [{"macro_steps": 4.0}]
    made.actor = Recorder(
        "actor", calls, {"compute_advantages_and_returns": counted, "run_training": counted}
    )
    made.update_rollout_weights = lambda: calls.append("weights")
    for step in range(steps):
        made.global_step = step
        made._iterate()
    return made, [
        call for call in calls if call in ("weights", "env.interact", "actor.run_training")
    ]


PLAIN = ["weights", "env.interact", "actor.run_training"]


def test_collecting_and_learning_take_turns_without_staleness():
    made, calls = asynchronous(0)
    assert calls == 3 * PLAIN and made.rollout_index == 3


def test_parts_that_joined_nothing_are_reported_in_their_own_iteration():
    lines.clear()
    asynchronous(1)
    assert [line.split("iteration: ")[1] for line in lines] == [
        f"a part of step {step}" for step in range(3)
    ]


def test_with_staleness_the_next_round_starts_before_the_update_and_no_round_is_wasted():
    made, calls = asynchronous(1)
    assert calls == [
        *("weights", "env.interact"),  # round 0, by the first weights
        *("env.interact", "actor.run_training"),  # round 1 by the same ones, update 1
        *("weights", "env.interact", "actor.run_training"),  # round 2 by update 1's, update 2
        "actor.run_training",
    ]
    assert made.rollout_index == 3 and made._ahead is None


def test_nothing_rolls_across_a_checkpoint():
    _, calls = asynchronous(1, save_interval=1)
    assert calls == 3 * PLAIN


@pytest.mark.parametrize(
    ("sent", "step", "expected"), [(-1, 3, True), (2, 3, False), (2, 4, True), (4, 4, False)]
)
def test_weights_are_sent_when_due_and_always_at_the_start_of_a_resumed_run(sent, step, expected):
    made = runner()
    made._sent_version, made.global_step, made.weight_sync_interval = sent, step, 2
    made.seconds, made.console = Counter(), Console(io.StringIO())
    calls = []
    made.update_rollout_weights = lambda: calls.append(step)
    made._start_rollouts = lambda: "round"
    assert made._start_round() == "round"
    assert bool(calls) is expected
    assert made._sent_version == (step if expected else sent)
