"""The process that starts a detached script, and waits for its end: see `atoll.operate.detached_scripts`."""

from __future__ import annotations

import sys
from pathlib import Path

from atoll.operate.detached_scripts import keep

if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[3:])  # sys.argv[2] is the script's name, for `ps`
