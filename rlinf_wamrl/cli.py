"""The command line, ``rlinf`` or ``python -m rlinf_wamrl``: verbs only.

Everything heavy is imported when its verb runs.
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from rlinf_wamrl import __version__

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlinf_wamrl.report.console import Console

__all__ = ["main"]

INTERRUPTED = 130
TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status: 0, 1 on an error, 130 or 143 when stopped."""
    parser = _parser()
    options = parser.parse_args(arguments)
    terminations: list[int] = []

    def terminate(number: int, _frame: object) -> NoReturn:
        # as Ctrl-C; recorded, because a wait inside Ray raises an interrupt of its own instead
        terminations.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    try:
        return options.function(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return TERMINATED if terminations else INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlinf", description="Online RL for World-Action Models on RLinf."
    )
    parser.add_argument("--version", action="version", version=f"rlinf-wamrl {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    run = verbs.add_parser("run", help="train or evaluate what a configuration file describes")
    run.add_argument("config", help="YAML file, for example examples/libero_wamrl.yaml")
    run.add_argument("overrides", nargs="*", help="key=value, for example runner.max_steps=3")
    run.set_defaults(function=_run)

    collect = verbs.add_parser(
        "collect", help="roll out a policy and write its episodes as a LeRobot dataset"
    )
    collect.add_argument("config", help="YAML file of a run; runner.resume_dir takes a checkpoint")
    collect.add_argument("overrides", nargs="*", help="key=value, as for run")
    collect.add_argument(
        "--episodes",
        type=int,
        default=None,
        help="how many to play, rounded up to rounds of env.train.total_num_envs (default: one)",
    )
    collect.add_argument("--output", help="dataset folder (default: in the run's folder)")
    collect.add_argument("--explore", action="store_true", help="sample as training does")
    collect.add_argument("--only-success", action="store_true", help="write successes only")
    collect.set_defaults(function=_collect)

    for name, function, summary in (
        ("demos", _demos, "record scripted-expert episodes of the demo suite"),
        ("pretrain", _pretrain, "train a small World-Action Model on recorded episodes"),
    ):
        verb = verbs.add_parser(name, help=summary)
        verb.add_argument("--config", help="YAML file (default: the recipe of the shipped model)")
        verb.add_argument("overrides", nargs="*", help="key=value, for example train.steps=500")
        verb.set_defaults(function=function)

    imagine = verbs.add_parser(
        "imagine", help="compare imagined with executed frames on held-out initial states"
    )
    imagine.add_argument("config", help="YAML file of a run; runner.resume_dir takes a checkpoint")
    imagine.add_argument("overrides", nargs="*", help="key=value, as for run")
    imagine.add_argument("--output", help="folder (default: imagination, in the run's folder)")
    imagine.set_defaults(function=_imagine)

    plot = verbs.add_parser("plot", help="draw curves and an ablation table from runs' logs")
    plot.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder; runs that differ in the seed alone are one method. NAME=RUN,RUN names "
        "a method and its seeds",
    )
    plot.add_argument("--output", default="runs/plot", help="folder (default: runs/plot)")
    plot.set_defaults(function=_plot)
    return parser


def _run(options: argparse.Namespace) -> int:
    from rlinf_wamrl.runtime.launch import run_training

    return _with_run(options, run_training)


def _collect(options: argparse.Namespace) -> int:
    from rlinf_wamrl.runtime.collection import Collection
    from rlinf_wamrl.runtime.launch import run_collection

    collection = Collection(
        episodes=options.episodes,
        folder=options.output,
        explore=options.explore,
        only_success=options.only_success,
    )
    return _with_run(options, lambda cfg, console: run_collection(cfg, collection, console))


def _with_run(options: argparse.Namespace, start: Callable[[DictConfig, Console], None]) -> int:
    """Compose the configuration and start what is to be done with it."""
    from rlinf_wamrl.report.console import Console

    console = Console()
    console.line(f"rlinf-wamrl {__version__}: {options.config}")
    from rlinf_wamrl.config.compose import compose_run
    from rlinf_wamrl.config.errors import ConfigError

    try:
        with warnings.catch_warnings(record=True) as doubts:
            cfg = compose_run(options.config, options.overrides)
    except ConfigError as error:
        return _fail(str(error))
    for doubt in doubts:
        console.line(f"warning: {doubt.message}")
    from rlinf_wamrl.runtime.failures import EXPECTED_ERRORS

    try:
        start(cfg, console)
    except EXPECTED_ERRORS as error:
        console.done()
        return _fail(str(error))
    return 0


def _demos(options: argparse.Namespace) -> int:
    from rlinf_wamrl.report.console import Console

    console = Console()
    cfg = _pretrain_config(options)
    if cfg is None:
        return 1
    from rlinf_wamrl.pretrain.demos import record_demos

    console.phase(f"recording to {cfg.demos_dir}")

    def report(done: int, total: int, successes: int) -> None:
        console.update(f"episodes {done}/{total}  success {successes}")

    try:
        successes, total = record_demos(cfg.demos, cfg.demos_dir, report)
    except ValueError as error:
        console.done()
        return _fail(str(error))
    console.line(f"{total} episodes in {cfg.demos_dir}, {successes} successful")
    return 0


def _pretrain(options: argparse.Namespace) -> int:
    from rlinf_wamrl.report.console import Console

    console = Console()
    cfg = _pretrain_config(options)
    if cfg is None:
        return 1
    from rlinf_wamrl.pretrain.train import pretrain

    try:
        pretrain(cfg, console.line)
    except (FileNotFoundError, ValueError, FloatingPointError) as error:
        return _fail(str(error))
    return 0


def _imagine(options: argparse.Namespace) -> int:
    def start(cfg: DictConfig, console: Console) -> None:
        from rlinf_wamrl.pretrain.imagine import imagine_run

        imagine_run(cfg, options.output, console.line)

    return _with_run(options, start)


def _plot(options: argparse.Namespace) -> int:
    from rlinf_wamrl.report.methods import read_methods
    from rlinf_wamrl.report.plot import plot

    try:
        methods = read_methods(options.runs)
    except (FileNotFoundError, ValueError) as error:
        return _fail(str(error))
    for file in plot(methods, options.output):
        print(file)
    return 0


def _pretrain_config(options: argparse.Namespace) -> DictConfig | None:
    from rlinf_wamrl.config.compose import compose_typed, shipped_config
    from rlinf_wamrl.config.errors import ConfigError
    from rlinf_wamrl.pretrain.config import PretrainConfig

    path = options.config or shipped_config("pretrain/small")
    try:
        return compose_typed(path, options.overrides, PretrainConfig)
    except ConfigError as error:
        _fail(str(error))
        return None


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
