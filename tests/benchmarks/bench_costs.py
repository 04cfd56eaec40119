"""The three biggest costs of a PPO step and of sampling, before and after: by torch.profiler.

Baseline: the official call pattern (see `bench_learner.py` and `bench_sampling.py`, which assert
that both ways give the same results). Shares are of the CPU time spent in operators themselves.

    python tests/benchmarks/bench_costs.py
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from bench_learner import gradients_of, learner_of
from lone_learner import recorded_rows
from model_parts import MODELS, OfficialPattern, example_run, observations, policy_of, row_of
from torch.profiler import ProfilerActivity, profile

STEP_BEFORE, STEP_AFTER = "PPO step, before", "PPO step, after"
SAMPLING_BEFORE, SAMPLING_AFTER = "sampling, before", "sampling, after"


def costs(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Return the seconds that one call of ``work`` spends in each operator itself."""
    work()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(repeats):
            work()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        spent[event.key] += event.self_cpu_time_total * 1e-6 / repeats
    return dict(spent)


def steps(model: str, rows: int) -> dict[str, Callable[[], object]]:
    """PPO steps on ``rows`` macro-steps: as the official code would, and ours."""
    pattern = partial(OfficialPattern, video_gradient=True, video_in_each_call=True)
    naive, ours = learner_of(model, rows, "none", pattern), learner_of(model, rows, "store")
    known = recorded_rows(ours.model, observations(rows))
    unknown = dict(known, forward_inputs=dict(known["forward_inputs"]))
    del unknown["forward_inputs"]["video_cache"]
    return {
        STEP_BEFORE: partial(gradients_of, naive, unknown),
        STEP_AFTER: partial(gradients_of, ours, known),
    }


def sampling(model: str, rows: int) -> dict[str, Callable[[], object]]:
    """Sampling of ``rows`` action chunks: one at a time by the official pattern, and ours."""
    run = example_run("RL.video_sft.enabled=false")
    official, ours = policy_of(model, run), policy_of(model, run)
    plain = official._modules.pop("wam")
    official.wam = OfficialPattern(plain)
    seen = observations(rows)
    single = [row_of(seen, index) for index in range(rows)]
    return {
        SAMPLING_BEFORE: lambda: [official.predict_action_batch(row) for row in single],
        SAMPLING_AFTER: lambda: ours.predict_action_batch(seen),
    }


def measure(model: str, rows: int, repeats: int) -> Mapping[str, dict[str, float]]:
    """Profile every piece of work."""
    work = {**steps(model, rows), **sampling(model, rows)}
    return {name: costs(call, repeats) for name, call in work.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {options.rows} rows | ms | biggest | second | third |")
    print("|---|---:|---|---|---|")
    for name, spent in measure(options.model, options.rows, options.repeats).items():
        total = sum(spent.values())
        largest = Counter(spent).most_common(3)
        cells = [f"{key.removeprefix('aten::')} {value / total:.0%}" for key, value in largest]
        print(f"| {name} | {1e3 * total:.1f} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
