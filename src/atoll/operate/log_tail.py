"""The end of the log of a standing cluster, for displays that show it while it grows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from atoll.cluster.printable import printable_name, printable_text
from atoll.cluster.processes.process_logging import LogLine, parse_line
from atoll.errors import ClusterError
from atoll.telemetry.log_rows import LogRow

MAX_BYTES = 512 << 10  # of the log's end that are read
MAX_ROWS = 2_000
MAX_TEXT = 4_000  # characters of a row, with the lines that continue it
_SHOWN_ELSEWHERE = frozenset({"time", "level", "process", "pid", "logger", "message"})


class LogTail:
    """The last rows of the log in `file`, which is read again only if it has changed. For one thread at a time."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_at = (-1, -1)  # size and time of the last change
        self._rows: list[LogRow] = []

    def rows(self) -> list[LogRow]:
        """Return the rows, oldest first. Raises ClusterError if the file cannot be read."""
        try:
            found = self._file.stat()
            if self._read_at != (found.st_size, found.st_mtime_ns):
                self._rows = _rows_of(self._file, found.st_size)
                self._read_at = found.st_size, found.st_mtime_ns
        except OSError as error:
            raise ClusterError(f"cannot read the log {self._file}: {error.strerror}") from None
        return self._rows


def _rows_of(file: Path, size: int) -> list[LogRow]:
    rows: list[LogRow] = []
    position = max(0, size - MAX_BYTES)
    with open(file, "rb") as log:
        log.seek(position)
        content = log.read(MAX_BYTES)
    lines = content.splitlines(keepends=True)
    for number, raw in enumerate(lines):
        line = raw.decode(errors="replace").rstrip("\n")
        found = parse_line(line) if number or position == 0 else None  # the first line may be a part of one
        if found is not None:
            rows.append(_row(position, found))
        elif rows and len(rows[-1].text) < MAX_TEXT:
            text = f"{rows[-1].text}\n{printable_text(line)}"[:MAX_TEXT]
            rows[-1] = LogRow(rows[-1].number, rows[-1].time, rows[-1].process, rows[-1].level, text)
        position += len(raw)
    return rows[-MAX_ROWS:]


def _row(number: int, found: LogLine) -> LogRow:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.seconds))
    process, level = printable_name(found.process), printable_name(found.level)
    return LogRow(number, when, process, level, printable_text(_text_of(found.fields))[:MAX_TEXT])


def _text_of(fields: dict[str, Any]) -> str:
    """Return the logger, the message and the further fields of a record, as a line of text has them."""
    others = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in _SHOWN_ELSEWHERE)
    text = f"{fields.get('logger', '')}: {fields.get('message', '')}"
    return f"{text} ({others})" if others else text
