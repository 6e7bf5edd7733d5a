"""The command `atoll`. `command_line` has its commands."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command `atoll`. Ctrl-C while its modules are imported ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from atoll.operate.command import command_line

    signal.signal(signal.SIGINT, handler)
    command_line.main()
