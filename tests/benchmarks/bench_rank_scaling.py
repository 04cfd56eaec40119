"""One process of each kind against two: environments, policies and learners.

Baseline: one rank each. All placements train the example on the same initial states and noise, each
process on one thread; the first iteration warms up. The policy is left as it is between iterations
(a learning rate of 1e-30), so that every placement has the same work to the end. Processors may
round a row otherwise in a batch of another size (4e-6 in an action), which an episode that turns on
a contact amplifies: two policies, each with half the batch, end a few episodes in a thousand at
another step. So mean lengths are asserted equal to 3 %, numbers of episodes exactly.

    python tests/benchmarks/bench_rank_scaling.py --repeats 5
"""

from __future__ import annotations

import argparse
import math
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


def assert_like(value: float, expected: float, name: str) -> None:
    """Raise ``AssertionError`` unless the two are within 3 % of each other."""
    assert math.isclose(value, expected, rel_tol=0.03), f"{name} {value} instead of {expected}"


def measure(repeats: int, *overrides: str) -> dict[str, list[dict[str, float]]]:
    """Return what each placement logged, one entry per iteration after the first."""
    measured: dict[str, list[dict[str, float]]] = {}
    baseline = None
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
        baseline = baseline or rows
        for row, theirs in zip(rows, baseline, strict=True):
            assert row["rollout/episodes"] == theirs["rollout/episodes"], name
            assert_like(row["env/episode_len"], theirs["env/episode_len"], f"{name}: episode_len")
        print(f"{name}: {len(rows)} iterations of like episodes", file=sys.stderr)
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
