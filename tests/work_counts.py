"""Counts the work of a call in instructions of Python, which do not depend on the machine or on its load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def instructions_of(call: Callable[[], object]) -> int:
    """Return the number of instructions that the call executes on this thread. Loops in C, as in `set`, count once."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reports instructions only if a frame asks for them before
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    assert count, "instructions are reported"
    return count
