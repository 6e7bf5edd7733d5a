"""How many examples tests of properties try: half of them in the suite, which tries the same each time.

`make thorough` tries many more.
"""

from __future__ import annotations

import os

# By how many times more than in the suite.
TIMES = int(os.environ.get("ATOLL_TEST_THOROUGHNESS", "1"))
DEFAULT = 100


def examples(count: int = DEFAULT) -> int:
    return count * TIMES if TIMES > 1 else count // 2
