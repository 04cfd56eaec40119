"""What a run left behind in its folder, read back: configuration, iterations, evaluations.

A resumed run is read as one. In one folder the later record of an iteration replaces the earlier;
a folder that goes on from another folder's checkpoint takes what came before from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Evaluation", "RunLog", "flatten", "read_run"]

_ALONE = "evaluation"
"""Title of what ``runner.only_eval`` measures, which is no part of a training run."""

_SPEED = "time/episodes_per_hour"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Successes on held-out initial states."""

    iteration: int  # trained iterations before it
    per_task: Mapping[int, tuple[int, int]]  # task -> successes, episodes


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """A run from its first iteration on."""

    folder: Path
    config: Mapping[str, Any]  # by dotted key
    iterations: Sequence[Mapping[str, float]]  # 1, 2, ... without gaps
    evaluations: Sequence[Evaluation]  # in the order of iterations

    def episodes(self, iteration: int) -> int:
        """Return the training episodes played up to the end of an iteration.

        Rollouts that were drawn again because every group ended alike count, too.
        """
        return sum(
            round(row["rollout/episodes"] * (1 + row["rollout/resampled"]))
            for row in self.iterations[:iteration]
        )

    def minutes(self, iteration: int) -> float:
        """Return the minutes that rollouts and updates took up to the end of an iteration.

        Start-up, evaluations and checkpoints are left out: how often one evaluates is no property
        of a method.
        """
        return sum(
            60.0 * row["rollout/episodes"] / row[_SPEED] for row in self.iterations[:iteration]
        )

    def evaluation(self, iteration: int) -> Evaluation | None:
        """Return the evaluation after an iteration, if there was one."""
        return next((one for one in self.evaluations if one.iteration == iteration), None)


def read_run(folder: str | Path) -> RunLog:
    """Read the logs of a run.

    Args:
        folder: the run's, with ``config.yaml``, ``iterations.jsonl`` and ``evaluations.jsonl``.

    Raises:
        FileNotFoundError: one of them, or the run that this one resumes, is missing.
        ValueError: a file is damaged or incomplete.
    """
    folder = Path(folder)
    config = _read_config(folder / "config.yaml")
    wanted = ("rollout/episodes", "rollout/resampled", _SPEED)
    source = folder / "iterations.jsonl"
    iterations = _last_word(_read_records(source, wanted))
    if not iterations:
        raise ValueError(f"{source} is empty: the run did not finish its first iteration")
    records = _read_records(folder / "evaluations.jsonl", ("title", "per_task"))
    evaluations = [
        Evaluation(
            iteration=record["iteration"],
            per_task={int(task): tuple(counts) for task, counts in record["per_task"].items()},
        )
        for record in _last_word([one for one in records if one["title"] != _ALONE])
    ]
    first = iterations[0]["iteration"]
    if first > 1:
        earlier = read_run(_resumed_folder(folder, config["runner.resume_dir"], first))
        iterations = [*earlier.iterations[: first - 1], *iterations]
        evaluations = [
            *(one for one in earlier.evaluations if one.iteration < first),
            *(one for one in evaluations if one.iteration >= first),
        ]
    count = len(iterations)
    missing = sorted(set(range(1, count + 1)) - {row["iteration"] for row in iterations})
    if missing:
        raise ValueError(f"{source} lacks iteration {missing[0]}: logs of different runs are mixed")
    if evaluations and evaluations[-1].iteration > count:
        raise ValueError(
            f"{folder / 'evaluations.jsonl'} has an evaluation after iteration "
            f"{evaluations[-1].iteration}, but {source} ends at {count}: logs of different runs "
            "are mixed"
        )
    return RunLog(folder=folder, config=config, iterations=iterations, evaluations=evaluations)


def flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted key."""
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_config(file: Path) -> dict[str, Any]:
    _must_exist(file)
    try:
        content = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    config = dict(flatten(content)) if isinstance(content, Mapping) else {}
    if "runner.resume_dir" not in config:
        raise ValueError(f"{file} is no configuration of a run: it lacks runner.resume_dir")
    return config


def _read_records(file: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Read a file of one JSON record per line, each with ``iteration`` and ``keys``."""
    _must_exist(file)
    records = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file}, line {number} is no whole record ({error.msg}): the run was cut off, or "
                "is about to write it; try again, or delete the line"
            ) from error
        lacking = [key for key in ("iteration", *keys) if key not in record]
        if lacking:
            raise ValueError(f"{file}, line {number} lacks {', '.join(lacking)}")
        records.append(record)
    return records


def _must_exist(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist: a run that trained and was evaluated leaves config.yaml, "
            "iterations.jsonl and evaluations.jsonl in its folder"
        )


def _last_word(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop what a resumed run did again: records of the same or a later iteration before it."""
    kept: list[dict[str, Any]] = []
    for record in records:
        kept = [one for one in kept if one["iteration"] < record["iteration"]]
        kept.append(record)
    return kept


def _resumed_folder(folder: Path, resume_dir: str | None, first: int) -> Path:
    """Return the folder of the run that ``folder`` goes on from."""
    begins = f"{folder / 'iterations.jsonl'} begins at iteration {first}"
    if resume_dir is None:
        raise ValueError(f"{begins}, but its config.yaml resumes nothing")
    original = Path(resume_dir).parents[1]  # of <run folder>/checkpoints/global_step_N
    places = [original, folder.parent / original.name]  # or moved together with this one
    found = [place for place in places if place.is_dir() and not place.samefile(folder)]
    if not found:
        raise FileNotFoundError(
            f"{begins} and goes on from {original}, which does not exist: put that run's folder "
            f"there, or beside {folder}"
        )
    return found[0]
