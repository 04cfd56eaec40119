"""Figures of finished or running runs, drawn from their logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlinf_wamrl.files import atomic_path, write_text_atomic
from rlinf_wamrl.report.ablation import Counts, ablation_csv, ablation_markdown, success
from rlinf_wamrl.report.logs import RunLog
from rlinf_wamrl.report.methods import Method

__all__ = ["plot", "success_figure", "training_figure"]

_CURVES = (
    ("success while training", "env/success_rate"),
    ("reconstruction reward", "train/reward/reconstruction"),
    ("approximate KL of an update", "train/actor/approx_kl_k3"),
    ("clip fraction", "train/actor/clip_fraction"),
    ("video loss", "train/video/sft_video_loss"),
    ("feature KL", "train/video/feature_kl"),
)
"""Panels of the training figure, each drawn where a run has the metric."""

_FAINT = {"linewidth": 0.8, "alpha": 0.35}

_AXES: tuple[tuple[str, Callable[[RunLog, int], float]], ...] = (
    ("training episodes", RunLog.episodes),
    ("minutes of rollouts and updates (no evaluation, checkpoint, start-up)", RunLog.minutes),
)


def plot(methods: Sequence[Method], folder: str | Path) -> list[Path]:
    """Write ``success.png``, ``training.png``, ``ablation.md`` and ``ablation.csv``.

    Args:
        methods: see :func:`~rlinf_wamrl.report.methods.read_methods`.
        folder: where to; files of the same names are replaced.

    Returns:
        The files.
    """
    folder = Path(folder)
    figures = {"success.png": success_figure(methods), "training.png": training_figure(methods)}
    for name, figure in figures.items():
        with atomic_path(folder / name) as temporary:
            figure.savefig(temporary, format="png", dpi=120)
    texts = {"ablation.md": ablation_markdown(methods), "ablation.csv": ablation_csv(methods)}
    for name, text in texts.items():
        write_text_atomic(folder / name, text)
    return [folder / name for name in (*figures, *texts)]


def success_figure(methods: Sequence[Method]) -> Figure:
    """Draw success on held-out states, a row per task, against episodes and against minutes.

    A curve is a method: all its seeds' episodes together with their 95 % Wilson interval, at the
    mean of the seeds' positions; each seed alone is faint.
    """
    tasks = sorted({task for method in methods for task in method.tasks()})
    figure = Figure(figsize=(11, 3.6 * len(tasks) + 0.6), layout="constrained")
    rows = figure.subplots(len(tasks), len(_AXES), squeeze=False, sharey=True)
    for row, task in zip(rows, tasks, strict=True):
        for axes, (label, position) in zip(row, _AXES, strict=True):
            for colour, method in zip(_colours(len(methods)), methods, strict=True):
                _draw_success(axes, method, task, position, colour)
            axes.set_xlabel(label)
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3)
        row[0].set_ylabel(f"task {task}: success on held-out states")
    _add_legend(figure, rows[0][0])
    return figure


def training_figure(methods: Sequence[Method]) -> Figure:
    """Draw the training metrics against episodes, the mean of the seeds and each one faint."""
    panels = [
        (title, key)
        for title, key in _CURVES
        if any(key in row for method in methods for run in method.runs for row in run.iterations)
    ]
    lines = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 3.0 * lines + 0.6), layout="constrained")
    axes = figure.subplots(lines, 2, squeeze=False).flatten()
    for panel, (title, key) in zip(axes, panels, strict=False):
        for colour, method in zip(_colours(len(methods)), methods, strict=True):
            _draw_metric(panel, method, key, colour)
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel("training episodes")
        panel.grid(alpha=0.3)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    _add_legend(figure, axes[0])
    return figure


def _draw_success(
    axes: Axes, method: Method, task: int, position: Callable[[RunLog, int], float], colour: str
) -> None:
    points: list[tuple[float, Counts]] = []
    for iteration in method.evaluated():
        counts = success(method.evaluations(iteration), task)
        if counts is not None:
            points.append((_mean([position(run, iteration) for run in method.runs]), counts))
    if not points:  # a task that this method's runs were not evaluated on
        return
    spans = [
        (counts.rate - counts.interval[0], counts.interval[1] - counts.rate) for _, counts in points
    ]
    axes.errorbar(
        [place for place, _ in points],
        [counts.rate for _, counts in points],
        yerr=list(zip(*spans, strict=True)),
        color=colour,
        marker="o",
        markersize=4,
        capsize=3,
        label=method.name,
    )
    if len(method.runs) == 1:
        return
    for run in method.runs:
        alone = [
            (position(run, one.iteration), success([one], task).rate)
            for one in run.evaluations
            if task in one.per_task
        ]
        axes.plot(*zip(*alone, strict=True), color=colour, **_FAINT)


def _draw_metric(axes: Axes, method: Method, key: str, colour: str) -> None:
    shared = min(len(run.iterations) for run in method.runs)
    places, means = [], []
    for index in range(shared):
        values = [run.iterations[index].get(key) for run in method.runs]
        if None not in values:  # for example before the first phase of video training
            places.append(_mean([run.episodes(index + 1) for run in method.runs]))
            means.append(_mean(values))
    axes.plot(places, means, color=colour, label=method.name)
    if len(method.runs) == 1:
        return
    for run in method.runs:
        alone = [
            (run.episodes(index + 1), row[key])
            for index, row in enumerate(run.iterations)
            if key in row
        ]
        if alone:
            axes.plot(*zip(*alone, strict=True), color=colour, **_FAINT)


def _add_legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", fontsize="small")


def _colours(count: int) -> list[str]:
    palette = colormaps["tab10" if count <= 10 else "turbo"]
    return [palette(index if count <= 10 else index / (count - 1)) for index in range(count)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
