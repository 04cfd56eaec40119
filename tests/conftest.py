"""Makes the helper modules of two folders importable from the tests of all."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("wam", "benchmarks")]
