"""The ablation table: success before and after training, by method and task."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlinf_wamrl.report.console import rate_text, wilson_interval
from rlinf_wamrl.report.logs import Evaluation
from rlinf_wamrl.report.methods import Method

__all__ = ["Counts", "ablation_csv", "ablation_markdown", "success"]


@dataclass(frozen=True)
class Counts:
    """Successes of a number of episodes."""

    successes: int
    episodes: int

    @property
    def rate(self) -> float:
        """Share of successes."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval of the rate."""
        return wilson_interval(self.successes, self.episodes)

    def __str__(self) -> str:
        return rate_text(self.successes, self.episodes)


def success(evaluations: Sequence[Evaluation | None], task: int) -> Counts | None:
    """Add up the seeds' episodes of a task; None where a seed was not evaluated on it."""
    counts = [None if one is None else one.per_task.get(task) for one in evaluations]
    if None in counts:
        return None
    return Counts(sum(count[0] for count in counts), sum(count[1] for count in counts))


def ablation_markdown(methods: Sequence[Method]) -> str:
    """Return the table in Markdown, one row per method.

    The interval is of all seeds' episodes together; where there are several seeds, each one's rate
    follows in brackets, as the interval knows nothing of how far seeds lie apart.
    """
    tasks = _tasks(methods)
    heads = ["method", "seeds (learner/environments)", "episodes per seed"]
    heads += [f"task {task} {when}" for task in tasks for when in ("before", "after")]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method in methods:
        last = method.evaluated()[-1]
        played = sorted({run.episodes(last) for run in method.runs})
        cells = [method.name, method.seeds(), "/".join(str(count) for count in played)]
        for task in tasks:
            cells += [_cell(method, 0, task), _cell(method, last, task)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def ablation_csv(methods: Sequence[Method]) -> str:
    """Return the table as CSV: a row per method and task, and per seed of it."""
    output = io.StringIO()
    writer = csv.DictWriter(output, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for method in methods:
        for task in method.tasks():
            for seeds in (method, *method.single_seeds()):
                writer.writerow(_csv_row(seeds, method.evaluated()[-1], task))
    return output.getvalue()


_COLUMNS = ("method", "seeds", "task", "iterations", "episodes", "minutes") + tuple(
    f"{when}_{what}"
    for when in ("before", "after")
    for what in ("successes", "episodes", "rate", "low", "high")
)


def _csv_row(method: Method, last: int, task: int) -> dict[str, object]:
    count = len(method.runs)
    row = {
        "method": method.name,
        "seeds": method.seeds(),
        "task": task,
        "iterations": last,
        "episodes": round(sum(run.episodes(last) for run in method.runs) / count),
        "minutes": f"{sum(run.minutes(last) for run in method.runs) / count:.2f}",
    }
    for when, iteration in (("before", 0), ("after", last)):
        counts = success(method.evaluations(iteration), task)
        if counts is not None:
            values = (counts.successes, counts.episodes, counts.rate, *counts.interval)
            names = ("successes", "episodes", "rate", "low", "high")
            shown = (f"{value:.4f}" if isinstance(value, float) else value for value in values)
            row |= {f"{when}_{name}": value for name, value in zip(names, shown, strict=True)}
    return row


def _cell(method: Method, iteration: int, task: int) -> str:
    counts = success(method.evaluations(iteration), task)
    if counts is None:
        return "–"
    if len(method.runs) == 1:
        return str(counts)
    return f"{counts} ({', '.join(_seed_rates(method, iteration, task))})"


def _seed_rates(method: Method, iteration: int, task: int) -> Iterator[str]:
    for evaluation in method.evaluations(iteration):
        yield f"{success([evaluation], task).rate:.0%}"


def _tasks(methods: Sequence[Method]) -> list[int]:
    return sorted({task for method in methods for task in method.tasks()})
