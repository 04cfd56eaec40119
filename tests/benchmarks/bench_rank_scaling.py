"""One process of each kind against two: environments, policies and learners.

Baseline: one rank each. All placements train the example on the same episodes, each process on one
thread; the first iteration warms up. The policy is left as it is between iterations (a learning
rate of 1e-30), so that every placement plays the same episodes to the end.

    python tests/benchmarks/bench_rank_scaling.py --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import sys

from process_tree import logged_example

PLACEMENTS = {
    "1 env, 1 rollout, 1 learner (baseline)": {},
    "2 learners": {"actor": 2},
    "2 rollouts": {"rollout": 2},
    "2 env workers": {"env": 2},
    "2 of each": {"actor": 2, "rollout": 2, "env": 2},
}


def placement(counts: dict[str, int]) -> str:
    """Return RLinf's placement of so many processes of each kind on node 0."""
    ranks = {kind: f"0:0-{counts.get(kind, 1) - 1}" for kind in ("env", "rollout", "actor")}
    return "{" + ",".join(f"{kind}:'{places}'" for kind, places in ranks.items()) + "}"


def measure(repeats: int, *overrides: str) -> dict[str, list[dict[str, float]]]:
    """Return what each placement logged, one entry per iteration after the first."""
    measured, played = {}, None
    for name, counts in PLACEMENTS.items():
        _, rows = logged_example(
            f"runner.max_steps={repeats + 1}",
            f"cluster.component_placement={placement(counts)}",
            "env.train.rollout_epoch=2",
            "RL.degenerate=keep",
            "RL.action_lr=1e-30",
            "RL.video_sft.enabled=false",
            "actor.global_batch_size=64",
            "actor.num_threads=1",
            "rollout.num_threads=1",
            *overrides,
        )
        episodes = [(row["rollout/successes"], row["env/episode_len"]) for row in rows]
        played = played or episodes
        assert episodes == played, f"{name}: {episodes} instead of {played}"
        print(f"{name}: {len(rows)} iterations, equal episodes", file=sys.stderr)
        measured[name] = rows[1:]
    return measured


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="measured iterations of each")
    parser.add_argument("overrides", nargs="*", help="key=value, for every placement")
    options = parser.parse_args()
    measured = measure(options.repeats, *options.overrides)

    def median(rows: list[dict[str, float]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    baseline = next(iter(measured.values()))
    print("| processes | rollouts, s | ratio | learning, s | ratio | GiB per learner |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, rows in measured.items():
        cells = [name]
        for key in ("time/rollouts", "time/learning"):
            seconds = median(rows, key)
            cells += [f"{seconds:.1f}", f"{median(baseline, key) / seconds:.2f}"]
        cells.append(f"{median(rows, 'train/memory/learner_gib_max'):.2f}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
