"""Have this process fork its children from the fork server of the run. See `tests.forked_process`."""

import os
import subprocess
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])

if "ATOLL_TEST_FORK_SERVER" in os.environ:
    sys.path.append(_ROOT)
    from tests import forked_process

    sys.path.remove(_ROOT)
    forked_process.FORKING.use(os.environ["ATOLL_TEST_FORK_SERVER"])
    subprocess.Popen = forked_process.Popen  # type: ignore[misc]
