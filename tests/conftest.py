"""Makes helper modules importable from all tests, and the commands they start interruptible."""

import signal
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("wam", "rl", "benchmarks")]

# A shell starts `pytest &` with the interrupt ignored, which every process it starts would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
