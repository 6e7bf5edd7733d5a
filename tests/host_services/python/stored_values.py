"""Key-value store of hosts in one process, for tests of their Python processes."""

from __future__ import annotations

import threading


class Store:
    """Key-value store. `get` waits for at most the `seconds` of the store, so that tests are short."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds
        self._values: dict[str, str] = {}
        self._change = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._change:
            self._values[key] = value
            self._change.notify_all()

    def get(self, key: str, seconds: float) -> str:
        with self._change:
            if not self._change.wait_for(lambda: key in self._values, min(seconds, self._seconds)):
                raise OSError(f"no value for {key}")
            return self._values[key]
