"""Counts the work of a call in instructions of Python, which do not depend on the machine or on its load."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def instructions_of(call: Callable[[], object]) -> int:
    """Return the number of instructions that the call executes on this thread. Loops in C, as in `set`, count once."""
    count = _monitored(call) if sys.version_info >= (3, 12) else _traced(call)
    assert count, "instructions are reported"
    return count


def _monitored(call: Callable[[], object]) -> int:
    """Count with `sys.monitoring`, because trace functions of Python 3.13.0 miss most instructions."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore] # new in Python 3.12
    thread, count = threading.get_ident(), 0

    def on_instruction(code: CodeType, offset: int) -> None:
        nonlocal count
        count += threading.get_ident() == thread

    tool = next(each for each in range(6) if monitoring.get_tool(each) is None)
    event = monitoring.events.INSTRUCTION
    monitoring.use_tool_id(tool, "instructions_of")
    try:
        monitoring.register_callback(tool, event, on_instruction)
        monitoring.set_events(tool, event)
        call()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)
    return count


def _traced(call: Callable[[], object]) -> int:
    """Count with a trace function."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
