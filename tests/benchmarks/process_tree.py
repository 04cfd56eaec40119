"""CPU time of a process and all below it, and runs whose phases are timed by what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "libero_wamrl.yaml"
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds of a process, its living descendants and the children that ended."""
    children, used = defaultdict(list), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        fields = text.rpartition(")")[2].split()
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(map(int, fields[11:15])) / TICKS
    total, left = 0.0, [root]
    while left:
        pid = left.pop()
        total += used.get(pid, 0.0)
        left += children[pid]
    return total


@dataclass
class TimedRun:
    """When a run said what, and how much CPU time its processes had used by then."""

    moments: list[tuple[str, float, float]] = field(default_factory=list)

    def first(self, words: str) -> tuple[float, float]:
        """Return seconds and CPU seconds until the first line with ``words``."""
        return next((at, used) for line, at, used in self.moments if words in line)

    def cpu_seconds_between(self, words: str) -> list[float]:
        """Return the CPU seconds from each line with ``words`` to the next one."""
        used = [cpu for line, _, cpu in self.moments if words in line]
        return [after - before for before, after in zip(used, used[1:], strict=False)]

    def busy_shares(self, phase: str) -> list[float]:
        """Return the share of all cores that the run used, in each phase of this name."""
        shares = []
        for (line, began, before), (_, ended, after) in zip(
            self.moments, self.moments[1:], strict=False
        ):
            if line.strip() == f"… {phase}":
                shares.append((after - before) / (ended - began) / os.cpu_count())
        return shares


def timed_run(command: list[str]) -> TimedRun:
    """Run a command to its end and note when it printed each line.

    Raises:
        RuntimeError: it failed.
    """
    began, run = time.monotonic(), TimedRun()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
    reader.start()
    for line in process.stdout:
        run.moments.append((line.rstrip(), time.monotonic() - began, cpu_seconds(process.pid)))
    reader.join()
    if process.wait() != 0:
        said = "\n".join(line for line, *_ in run.moments[-5:])
        raise RuntimeError(f"{' '.join(command)} failed:\n{said}\n{errors[0][-2000:]}")
    return run


def example(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the command that trains the example without evaluations or checkpoints."""
    return [
        *(sys.executable, "-m", "rlinf_wamrl", "run", str(EXAMPLE)),
        f"runner.logger.log_path={folder}",
        f"runner.logger.experiment_name={name}",
        "runner.eval_before_training=false",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "env.train.total_num_envs=16",  # what the tables were measured with
        *overrides,
    ]


def logged_example(*overrides: str) -> tuple[TimedRun, list[dict[str, float]]]:
    """Train the example in a folder of its own; return its phases and the iterations it logged."""
    with tempfile.TemporaryDirectory() as folder:
        run = timed_run(example(Path(folder), "run", *overrides))
        lines = (Path(folder) / "run/iterations.jsonl").read_text().splitlines()
    return run, [json.loads(line) for line in lines]
