"""Keep libraries from observing all operations of the suite's processes.

JAX imports filelock if it is installed, for example with Ray. Since version 4.3, filelock observes all audit events of
the interpreter by a Python function. Each `id(...)`, each opened file and each import calls it, which takes a twentieth
of the time of tests that compute. The function only detects forks within a change of a lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_LIBRARY = "filelock."


def ignore() -> None:
    """Ignore audit hooks that filelock adds to this process from now on. An audit hook cannot be removed."""
    add = sys.addaudithook

    def add_others(hook: Callable[[str, tuple[Any, ...]], Any]) -> None:
        if not str(getattr(hook, "__module__", "")).startswith(_LIBRARY):
            add(hook)

    sys.addaudithook = add_others
