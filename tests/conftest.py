"""Makes the helper modules in ``wam/`` importable from the tests of every folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "wam"))
