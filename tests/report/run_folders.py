"""Run folders as a run leaves them, with numbers made up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from omegaconf import OmegaConf

from rlinf_wamrl.config.compose import compose_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "libero_wamrl.yaml"


def write_run(
    folder: Path,
    *overrides: str,
    iterations: Iterable[int] = range(1, 5),
    evaluations: Mapping[int, Mapping[int, tuple[int, int]]] | None = None,
    resampled: Mapping[int, int] | None = None,
    metrics: Mapping[str, Sequence[float]] | None = None,
) -> Path:
    """Write a run of 8 episodes and 30 seconds per iteration; returns its folder.

    Args:
        folder: the run's; what is there is appended to, as a resumed run does.
        overrides: of the example's configuration.
        iterations: those to log.
        evaluations: iteration -> task -> successes, episodes.
        resampled: iteration -> rollouts drawn again.
        metrics: further metrics, a value per iteration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(compose_run(EXAMPLE, overrides), folder / "config.yaml")
    rows = []
    for index, iteration in enumerate(iterations):
        row = {
            "iteration": iteration,
            "rollout/episodes": 8.0,
            "rollout/resampled": float((resampled or {}).get(iteration, 0)),
            "time/episodes_per_hour": 8.0 * 120,
            "env/success_rate": 0.5,
        }
        row |= {name: values[index] for name, values in (metrics or {}).items()}
        rows.append(row)
    append(folder / "iterations.jsonl", rows)
    if evaluations is None:
        evaluations = {0: {0: (46, 120)}, 4: {0: (77, 120)}}
    append(
        folder / "evaluations.jsonl",
        [
            {"iteration": iteration, "title": "evaluation after", "per_task": tasks}
            for iteration, tasks in evaluations.items()
        ],
    )
    return folder


def append(file: Path, rows: Iterable[Mapping]) -> None:
    with file.open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)
