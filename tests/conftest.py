"""Makes the helper modules in ``wam/`` and ``rl/`` importable from the tests of every folder."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("wam", "rl")]
