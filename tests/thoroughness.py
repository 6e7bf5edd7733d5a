"""How many examples tests of properties try: few in the suite, and many more in `make thorough`."""

from __future__ import annotations

import os

# By how many times more than in the suite.
TIMES = int(os.environ.get("ATOLL_TEST_THOROUGHNESS", "1"))
DEFAULT = 100


def examples(count: int = DEFAULT) -> int:
    return count * TIMES
