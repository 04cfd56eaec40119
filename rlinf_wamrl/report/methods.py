"""Which runs are seeds of one method: read from their configurations, or said by the user."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlinf_wamrl.config.schema import RunConfig
from rlinf_wamrl.report.logs import Evaluation, RunLog, flatten, read_run

__all__ = ["Method", "read_methods"]

_SEEDS = ("actor.seed", "env.train.seed")

_LOOP_KEYS = ("runner.weight_sync_interval", "runner.use_training_pipeline")
"""Of the training loop, what changes the numbers; the rest is how long and how watched it runs."""

_MACHINE_KEYS = {
    "seed",
    "num_threads",
    "num_processes",
    "max_built_tasks",
    "restart_dead_processes",
    "watchdog_seconds",
    "group_name",
}
"""Last parts of keys that say where a run ran, not what it did; and the seed."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its runs, one per seed."""

    name: str
    runs: Sequence[RunLog]

    def seeds(self) -> str:
        """Say how many seeds there are, and which (of the learner / of the environments)."""
        names = ("/".join(str(run.config.get(key)) for key in _SEEDS) for run in self.runs)
        return f"{len(self.runs)} ({', '.join(names)})"

    def evaluated(self) -> list[int]:
        """Return the iterations after which every run was evaluated."""
        shared = set.intersection(
            *({one.iteration for one in run.evaluations} for run in self.runs)
        )
        return sorted(shared)

    def single_seeds(self) -> list[Method]:
        """Return the runs one by one; of a single run, nothing."""
        return [replace(self, runs=[run]) for run in self.runs] if len(self.runs) > 1 else []

    def evaluations(self, iteration: int) -> list[Evaluation | None]:
        """Return each run's evaluation after an iteration, None where it has none."""
        return [run.evaluation(iteration) for run in self.runs]

    def tasks(self) -> list[int]:
        """Return the tasks that were evaluated."""
        return sorted(
            {task for run in self.runs for one in run.evaluations for task in one.per_task}
        )


def read_methods(arguments: Sequence[str]) -> list[Method]:
    """Read the runs on a command line and group them.

    Args:
        arguments: run folders, grouped by what their configurations have in common apart from the
            seed and named by where the groups differ; or ``NAME=RUN,RUN,...``, a method and its
            seeds.

    Raises:
        FileNotFoundError: a log is missing.
        ValueError: a log is damaged, or a name comes twice.
    """
    named, alone = [], []
    for argument in arguments:
        name, is_named, folders = argument.partition("=")
        if is_named and not Path(argument).is_dir():
            runs = [read_run(folder) for folder in folders.split(",")]
            named.append(Method(name=name, runs=runs))
        else:
            alone.append(read_run(argument))
    methods = named + _grouped(alone)
    names = [method.name for method in methods]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two methods are called {twice[0]!r}: give them names, NAME=RUN,RUN")
    unmeasured = [method.name for method in methods if not method.evaluated()]
    if unmeasured:
        raise ValueError(
            f"the runs of {unmeasured[0]!r} have no iteration after which all were evaluated"
        )
    return methods


def _grouped(runs: Sequence[RunLog]) -> list[Method]:
    schema = dict(flatten(OmegaConf.to_container(OmegaConf.structured(RunConfig))))
    groups: dict[str, list[RunLog]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_switches(run.config, schema), sort_keys=True), []).append(run)
    switches = [json.loads(key) for key in groups]
    if len(groups) < 2:
        return [Method(name=group[0].folder.name, runs=group) for group in groups.values()]
    keys = sorted({key for one in switches for key in one})
    differing = [key for key in keys if len({json.dumps(one.get(key)) for one in switches}) > 1]
    return [
        Method(name=_name(one, differing), runs=group)
        for one, group in zip(switches, groups.values(), strict=True)
    ]


def _switches(config: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return what distinguishes the method of a run from others.

    Keys that repeat another key, as the schema has it, are left out where they do. A key that an
    older configuration does not have yet had the default of today.
    """
    known = {key: value for key, value in schema.items() if not _is_open(value)} | dict(config)
    return {
        key: value
        for key, value in known.items()
        if _tells_methods_apart(key) and not _repeats(key, value, known, schema)
    }


def _is_open(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(("${", "???"))


def _tells_methods_apart(key: str) -> bool:
    if key.startswith(("runner.", "cluster.")):
        return key in _LOOP_KEYS
    return key.rpartition(".")[2] not in _MACHINE_KEYS and ".video_cfg." not in key


def _repeats(key: str, value: Any, config: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    reference = re.fullmatch(r"\$\{([\w.]+)\}", str(schema.get(key)))
    return reference is not None and config.get(reference[1]) == value


def _name(switches: Mapping[str, Any], keys: Iterable[str]) -> str:
    shown = {key.removeprefix("RL."): switches.get(key) for key in keys}
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in shown.items())
