"""Learning while collecting: pipeline and asynchronous mode against taking turns.

Baseline: the plain mode, which collects an iteration's rollouts and then learns from them. All
modes train the example as it ships, 32 environments in four rounds; the first iteration warms up.
Weights are left as they are (learning rates of 1e-30), so that all modes play the same episodes and
learn from the same macro-steps to the end.

    python tests/benchmarks/bench_pipeline.py --repeats 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass

from process_tree import logged_example

PLAIN = "plain (baseline)"
MODES = {
    PLAIN: [],
    "pipeline": ["runner.use_training_pipeline=true"],
    "asynchronous": ["algorithm.staleness_threshold=1"],
}
PHASES = {"pipeline": "rollouts and learning"}


@dataclass(frozen=True)
class Measured:
    """One mode: its iterations, the share of the cores its rollouts used, its CPU seconds."""

    rows: list[dict[str, float]]
    seconds: list[float]
    busy: list[float]
    used: list[float]

    def median(self, *names: str) -> float:
        """Return the median of a sum of recorded values."""
        return statistics.median(sum(row.get(name, 0.0) for name in names) for row in self.rows[1:])


def measure(repeats: int, *overrides: str) -> dict[str, Measured]:
    """Run every mode for one iteration more than ``repeats``."""
    measured = {}
    for mode, switches in MODES.items():
        run, rows = logged_example(
            f"runner.max_steps={repeats + 1}",
            "env.train.total_num_envs=32",
            "RL.action_lr=1e-30",
            "RL.video_sft.lr=1e-30",
            *switches,
            *overrides,
        )
        seconds = [3600 * row["rollout/episodes"] / row["time/episodes_per_hour"] for row in rows]
        busy = run.busy_shares(PHASES.get(mode, "rollouts"))
        used = run.cpu_seconds_between("… sending weights")
        measured[mode] = Measured(rows, seconds[1:], busy[1:], used[1:])
        print(f"{mode}: {' '.join(f'{value:.1f}' for value in seconds)} s", file=sys.stderr)
    baseline = measured[PLAIN].rows
    for mode, result in measured.items():
        for row, theirs in zip(result.rows, baseline, strict=True):
            for name in ("rollout/successes", "env/episode_len"):
                assert row[name] == theirs[name], f"{mode}: {name} {row[name]} not {theirs[name]}"
    ahead = measured["asynchronous"].rows[0]
    assert ahead["train/actor/policy_loss"] == baseline[0]["train/actor/policy_loss"]
    return measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="measured iterations of each mode")
    parser.add_argument("overrides", nargs="*", help="key=value, for every mode")
    options = parser.parse_args()
    measured = measure(options.repeats, *options.overrides)
    plain = measured[PLAIN]
    rollout = plain.median("time/rollouts")
    learner = plain.median("time/advantages", "time/learning")
    least = statistics.median(plain.used) / os.cpu_count()
    print(
        f"plain mode: rollouts {rollout:.1f} s, learner {learner:.1f} s per iteration; its CPU "
        f"time over all cores: {least:.1f} s, {least / max(rollout, learner):.2f} of the maximum\n"
    )
    print(
        "| mode | s per iteration | of max(rollout, learner) | of their sum | cores busy ", end=""
    )
    print("in rollouts | idle env | idle rollout | idle actor |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for mode, result in measured.items():
        seconds = statistics.median(result.seconds)
        idle = " | ".join(
            f"{result.median(f'idle/{who}'):.0%}" for who in ("env", "rollout", "actor")
        )
        print(
            f"| {mode} | {seconds:.1f} | {seconds / max(rollout, learner):.2f} | "
            f"{seconds / (rollout + learner):.2f} | {statistics.median(result.busy):.0%} | {idle} |"
        )


if __name__ == "__main__":
    main()
