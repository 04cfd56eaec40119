"""What a run says on the terminal: a live line for the current phase, and lines that stay."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

__all__ = ["Console", "duration", "rate_text", "wilson_interval"]


class Console:
    """Writes lines that stay and, on a terminal, one live line below them.

    Without a terminal the live line is printed only when the phase changes.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        """Write to ``stream`` (standard output by default)."""
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty()
        self._lock = threading.Lock()
        self._phase = ""
        self._phase_start = time.monotonic()

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        with self._lock:
            self._clear()
            print(text, file=self._stream, flush=True)

    def phase(self, name: str) -> None:
        """Enter a phase of the run."""
        with self._lock:
            self._phase, self._phase_start = name, time.monotonic()
            if not self._is_live:
                print(f"  … {name}", file=self._stream, flush=True)
        self.update("")

    def update(self, details: str) -> None:
        """Refresh the live line with the phase, its age and ``details``."""
        if not self._is_live:
            return
        with self._lock:
            seconds = time.monotonic() - self._phase_start
            text = f"  … {self._phase} {seconds:4.0f}s  {details}"
            width = shutil.get_terminal_size().columns
            print(f"\r{text[: width - 1]:<{width - 1}}", end="", file=self._stream, flush=True)

    def done(self) -> None:
        """Remove the live line."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_live:
            width = shutil.get_terminal_size().columns
            print(f"\r{'':<{width - 1}}\r", end="", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """Format seconds as ``42s``, ``3m10s`` or ``2h05m``."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def wilson_interval(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate (95 % by default), in [0,1]."""
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    denominator = 1.0 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / denominator
    spread = z / denominator * ((rate * (1 - rate) + z * z / (4 * trials)) / trials) ** 0.5
    return max(0.0, centre - spread), min(1.0, centre + spread)


def rate_text(successes: int, trials: int) -> str:
    """Format a success rate with its 95 % interval, as ``46/120 = 38% [30%, 47%]``."""
    low, high = wilson_interval(successes, trials)
    return f"{successes}/{trials} = {successes / trials:.0%} [{low:.0%}, {high:.0%}]"
