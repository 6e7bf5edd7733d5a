"""What a Python process may send to its worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.errors import FrameError
from atoll.host_services.python import process as module
from atoll.host_services.python.meeting import nowhere
from atoll.host_services.python.process import PythonProcess


def test_results_that_are_awaited_may_be_of_any_size_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_INBOX_BYTES", 100)
    options: Any = None
    process = PythonProcess("a session", options, nowhere, lambda message: None, lambda reason: None, lambda: 1000)
    process._keep(1, np.zeros(1000, np.uint8))
    process._keep(2, np.zeros(100, np.uint8))
    with pytest.raises(FrameError, match="1101 bytes that belong to no result"):
        process._keep(3, np.zeros(1, np.uint8))
