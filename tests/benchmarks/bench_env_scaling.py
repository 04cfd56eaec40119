"""How time and memory of `chunk_step` grow, and how many processes are fastest.

Baseline of each table is its first row. Random actions on the demo suite, episodes of full length;
an environment's results are asserted to be the same whatever runs beside it.

    python tests/benchmarks/bench_env_scaling.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from bench_env import children_made_by, our_config

from rlinf_wamrl.envs.rlinf_env import WAMLiberoEnv

SIZE, LENGTH = 64, 8  # pixels, actions per chunk


@dataclass
class Cost:
    """What chunks of one configuration cost."""

    milliseconds: float  # wall time per environment step, median over chunks
    cpu: float  # ms per environment step, in the processes
    busy: float  # share of the wall time in which the processes were on a core
    wanted: float  # the same, plus the time in which other programs held the core
    megabytes: float  # all environment processes, shared pages counted in part
    last: dict  # observation at the end


def make_env(num_envs, num_processes, size, **changes):
    """Environments and their processes, started."""
    section = our_config("wamrl_demo", size, num_envs, num_processes=num_processes, **changes)
    env = WAMLiberoEnv(section, num_envs, 0, 1, None)
    _, processes = children_made_by(env.reset)
    return env, processes


def actions_of(env, seed):
    """A chunk [N, C, 7] whose first rows do not depend on how many follow."""
    rows = [np.random.default_rng([seed, n]).uniform(-0.3, 0.3, (LENGTH, 7)) for n in range(env)]
    return np.stack(rows)


def core_seconds(processes):
    """(on a core, waiting for a core) of all threads of processes, s."""
    on_core = waiting = 0
    for process in processes:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            ran, waited, _ = file.read_text().split()
            on_core += int(ran)
            waiting += int(waited)
    return np.array([on_core, waiting]) / 1e9


def megabytes(processes):
    """Memory of all processes, MB."""
    return sum(process.memory_full_info().pss for process in processes) / 2**20


def cost_of_chunks(num_envs, num_processes, chunks, size=SIZE):
    """Run chunks in fresh environments that do not end."""
    env, processes = make_env(num_envs, num_processes, size)
    env.chunk_step(actions_of(num_envs, 0))
    before, walls = core_seconds(processes), []
    for seed in range(1, chunks + 1):
        actions = actions_of(num_envs, seed)
        started = time.perf_counter()
        [last], *_ = env.chunk_step(actions)
        walls.append(time.perf_counter() - started)
    on_core, waiting = core_seconds(processes) - before
    held = sum(walls) * num_processes
    cost = Cost(
        milliseconds=statistics.median(walls) / (num_envs * LENGTH) * 1e3,
        cpu=on_core / (chunks * num_envs * LENGTH) * 1e3,
        busy=on_core / held,
        wanted=(on_core + waiting) / held,
        megabytes=megabytes(processes),
        last=last,
    )
    env.close()
    return cost


def assert_first_alike(cost, other):
    """The first environment shows the same in both."""
    for key in ("main_images", "wrist_images", "states", "future_frames"):
        assert torch.equal(cost.last[key][0], other.last[key][0])


def scale_environments(counts, chunks, size=SIZE):
    """Rows (environments, processes, cost), at most two processes."""
    rows = [(n, min(n, 2), cost_of_chunks(n, min(n, 2), chunks, size)) for n in counts]
    for row in rows[1:]:
        assert_first_alike(row[2], rows[0][2])
    return rows


def scale_processes(num_envs, counts, chunks, size=SIZE):
    """Rows (environments, processes, cost) for the same environments in more processes."""
    rows = [(num_envs, p, cost_of_chunks(num_envs, p, chunks, size)) for p in counts]
    for row in rows[1:]:
        assert_first_alike(row[2], rows[0][2])
    return rows


def scale_length(num_envs, limits, size=SIZE):
    """Rows (limit, ms per environment step, MB) of whole episodes."""
    rows = []
    for limit in limits:
        env, processes = make_env(num_envs, 2, size, max_episode_steps=limit)
        started = time.perf_counter()
        steps = 0
        for seed in range(-(-limit // LENGTH)):
            [observation], *_ = env.chunk_step(actions_of(num_envs, seed))
            steps += int(observation["executed_mask"].sum())
        wall = time.perf_counter() - started
        rows.append((limit, wall / steps * 1e3, megabytes(processes)))
        env.close()
    return rows


def scale_iterations(num_envs, iterations, limit, size=SIZE):
    """MB after each iteration of a reset to new initial states and whole episodes."""
    env, processes = make_env(
        num_envs, 2, size, max_episode_steps=limit, init_state_range=[0, 80], num_settle_steps=None
    )
    grown = []
    for _ in range(iterations):
        env.reset()
        for seed in range(-(-limit // LENGTH)):
            env.chunk_step(actions_of(num_envs, seed))
        env.update_reset_state_ids()
        grown.append(megabytes(processes))
    env.close()
    return grown


def print_costs(title, rows):
    """A Markdown table of costs, ratios to the first row."""
    print(f"\n{title}\n")
    print(
        "| environments | processes | ms/step | ratio | CPU ms/step | busy | wanted | MB in all |"
    )
    print("|---:" * 8 + "|")
    for envs, processes, cost in rows:
        ratio = cost.milliseconds / rows[0][2].milliseconds
        print(
            f"| {envs} | {processes} | {cost.milliseconds:.2f} | {ratio:.2f} | {cost.cpu:.2f} "
            f"| {cost.busy:.0%} | {cost.wanted:.0%} | {cost.megabytes:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=12, help="chunks per configuration")
    args = parser.parse_args()
    print(f"wamrl_demo at {SIZE}, light pictures, chunks of {LENGTH}, medians of {args.repeats}")
    print_costs("environments", scale_environments((1, 2, 4, 8, 16), args.repeats))
    print_costs("processes", scale_processes(16, (1, 2, 3, 4, 16), args.repeats))
    print(
        "\nepisode length, 16 environments\n\n| steps | ms/step | ratio | MB |\n"
        + "|---:" * 4
        + "|"
    )
    rows = scale_length(16, (88, 176, 352))
    for limit, milliseconds, memory in rows:
        print(f"| {limit} | {milliseconds:.2f} | {milliseconds / rows[0][1]:.2f} | {memory:.0f} |")
    grown = scale_iterations(16, 12, 16)
    print("\niterations: MB after each of 12:", ", ".join(f"{memory:.0f}" for memory in grown))


if __name__ == "__main__":
    main()
