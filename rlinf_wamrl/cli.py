"""The command line, ``rlinf`` or ``python -m rlinf_wamrl``: verbs only.

Everything heavy is imported when its verb runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlinf_wamrl import __version__

__all__ = ["main"]

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns 0 on success, 1 on an error, 130 when interrupted."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.function(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED


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
    return parser


def _run(options: argparse.Namespace) -> int:
    from rlinf_wamrl.report.console import Console

    console = Console()
    console.line(f"rlinf-wamrl {__version__}: {options.config}")
    from rlinf_wamrl.config.compose import compose_run
    from rlinf_wamrl.config.errors import ConfigError

    try:
        cfg = compose_run(options.config, options.overrides)
    except ConfigError as error:
        return _fail(str(error))
    from rlinf_wamrl.runtime.failures import EXPECTED_ERRORS
    from rlinf_wamrl.runtime.launch import run_training

    try:
        run_training(cfg, console)
    except EXPECTED_ERRORS as error:
        console.done()
        return _fail(str(error))
    return 0


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1
