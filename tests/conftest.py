"""Makes the helper modules of some folders importable from the tests of all."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("wam", "rl", "benchmarks")]
