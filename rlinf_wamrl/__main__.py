"""``python -m rlinf_wamrl``."""

import sys

from rlinf_wamrl.cli import main

sys.exit(main())
