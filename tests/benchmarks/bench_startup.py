"""From the command to the first environment step.

Baseline: every process imports its own libraries, as Ray starts workers. The first step follows the
line "rollouts" by the first reset and the first chunk's sampling, which the run records.

    python tests/benchmarks/bench_startup.py --repeats 5
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from process_tree import example, timed_run

BASELINE = "an import per process (baseline)"
OURS = "forks of one process"


@dataclass
class Startup:
    """Seconds of each run."""

    ready: list[float] = field(default_factory=list)
    first_step: list[float] = field(default_factory=list)
    cpu_until_ready: list[float] = field(default_factory=list)


@contextlib.contextmanager
def no_template(_folder: Path, _on_failure: object) -> Iterator[Path]:
    """Stand in for the template: Ray's own script starts workers."""
    import ray._private.workers

    yield Path(ray._private.workers.__file__).with_name("setup_worker.py")


def run_without_template(arguments: list[str]) -> int:
    """Run the command line in this process, with workers that import for themselves."""
    from rlinf_wamrl import cli
    from rlinf_wamrl.runtime import ray_session

    ray_session.worker_template = no_template
    return cli.main(arguments)


def measure(repeats: int) -> dict[str, Startup]:
    """Start each variant ``repeats`` times, in turn."""
    results = {BASELINE: Startup(), OURS: Startup()}
    successes = set()
    for _ in range(repeats):
        for variant, startup in results.items():
            with tempfile.TemporaryDirectory() as folder:
                command = example(
                    Path(folder),
                    "run",
                    "runner.max_steps=1",
                    "env.train.rollout_epoch=1",
                    "env.train.max_episode_steps=16",
                    "RL.video_sft.enabled=false",
                    "RL.degenerate=keep",
                )
                if variant == BASELINE:
                    command = [sys.executable, __file__, "--child", *command[3:]]
                run = timed_run(command)
                row = json.loads((Path(folder) / "run/iterations.jsonl").read_text())
            ready, used = run.first("ready after")
            chunks = 2
            first = row["time/env/reset"] + row["time/rollout/predict"] / chunks
            startup.ready.append(ready)
            startup.cpu_until_ready.append(used)
            startup.first_step.append(run.first("… rollouts")[0] + first)
            successes.add((row["rollout/successes"], row["train/actor/policy_loss"]))
            print(
                f"{variant}: ready {ready:.1f} s, first step {startup.first_step[-1]:.1f} s, "
                f"{used:.1f} CPU seconds",
                file=sys.stderr,
                flush=True,
            )
    assert len(successes) == 1, "the variants trained differently"
    return results


def help_seconds(repeats: int) -> list[float]:
    """Return how long ``rlinf --help`` takes."""
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "rlinf_wamrl", "--help"], capture_output=True, check=True
        )
        seconds.append(time.monotonic() - began)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    results = measure(repeats)
    print("| workers are | ready after | first environment step after | CPU seconds until ready |")
    print("|---|---:|---:|---:|")
    for variant, startup in results.items():
        columns = (startup.ready, startup.first_step, startup.cpu_until_ready)
        print(f"| {variant} | " + " | ".join(f"{statistics.median(c):.1f}" for c in columns) + " |")
    print(f"\n`rlinf --help`: {statistics.median(help_seconds(repeats)):.2f} s")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(run_without_template(sys.argv[2:]))
    main()
