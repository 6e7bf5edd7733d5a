"""The log of Atoll's processes, on standard error: lines of text for people, or JSON with one object per line."""

from __future__ import annotations

import calendar
import faulthandler
import logging
import re
import signal
import sys
import time
from typing import Any

import msgspec

from atoll.cluster.environment_variables import LOG, LOG_FORMAT, LogFormat
from atoll.cluster.printable import printable_text
from atoll.decodable import decodable

REPEAT_SECONDS = 60.0  # in which the same line is logged once
MAX_LINES = 256  # that are remembered
_PROBLEMS = frozenset(("warning", "error", "critical"))  # levels
FIELDS = "fields"  # attribute of a log record: a mapping of further fields, such as session, tenant and event

_TEXT_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(?P<millis>\d{3}) "
    r"atoll (?P<process>[^\[]+)\[(?P<pid>\d+)\] (?P<level>[A-Z]+) (?P<logger>[^\s:]*): (?P<message>.*)",
    re.ASCII,
)
_JSON_TIME = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.(?P<millis>\d{3}))?Z", re.ASCII)


def start_logging(process: str) -> None:
    """Log warnings and errors to standard error, more with ATOLL_LOG=info or debug. Dump all stacks at SIGUSR1.

    `process` is the name of this process's kind in each line, such as "worker".
    """
    faulthandler.register(signal.SIGUSR1, file=2)
    handler = logging.StreamHandler(sys.stderr)
    as_json = LOG_FORMAT.text() == LogFormat.JSON
    handler.setFormatter(JsonFormatter(process) if as_json else TextFormatter(process))
    handler.addFilter(Repetitions())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    level = (LOG.text() or "warning").upper()
    for logger in ("atoll", "__main__"):
        logging.getLogger(logger).setLevel(level if level in logging.getLevelNamesMapping() else "WARNING")


def logging_environment() -> dict[str, str]:
    """Return the environment of a standing cluster's processes, which log events unless ATOLL_LOG says otherwise.

    Raises SettingsError for an invalid ATOLL_LOG_FORMAT.
    """
    LOG_FORMAT.get()
    return {LOG.variable: LOG.text() or "info"}


def attributed_line(line: bytes, source: str) -> bytes:
    """Return a line that `source` has printed, for the log.

    It is indented and escaped, so that it looks like no record of the log, and controls no terminal.
    """
    return f"  {source}: {printable_text(line.decode(errors='replace').rstrip())}\n".encode()


class TextFormatter(logging.Formatter):
    """Formats lines for people. Escapes unprintable characters, which users may have put into a message.

    Indents the further lines of a message, so that no message contains a line that looks like another record.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s atoll {process}[%(process)d] %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record)).replace("\n", "\n  ")


class JsonFormatter(logging.Formatter):
    """Formats each record as a JSON object in one line, with the time in UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _utc_text(record.created, int(record.msecs)),
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _utc_text(seconds: float, millis: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{millis:03}Z"


class Repetitions(logging.Filter):
    """Drops a line that was logged in the last `REPEAT_SECONDS`, and counts it. The next one states the count."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, str], list[float]] = {}  # when it was logged, and how often since

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        key = record.name, text
        known = self._lines.get(key)
        if known is not None and 0 <= record.created - known[0] < REPEAT_SECONDS:  # the clock may have been set back
            known[1] += 1
            return False
        self._lines.pop(key, None)
        self._lines[key] = [record.created, 0]
        if len(self._lines) > MAX_LINES:
            del self._lines[next(iter(self._lines))]
        if known is not None and known[1]:
            seconds = max(0.0, record.created - known[0])
            record.msg, record.args = f"%s (and {known[1]:.0f} times more in the last {seconds:.0f} s)", (text,)
        return True


class LogLine(msgspec.Struct, frozen=True):
    """The properties of a line of a log: the time in seconds since 1970, the kind of process, and the level.

    `fields` are all fields of the line as a JSON object. A line of text has those up to `message`.
    """

    seconds: float
    process: str
    level: str  # in lower case
    fields: dict[str, Any]


def warnings_in(log: str, limit: int) -> list[str]:
    """Return the last `limit` lines of a log that are warnings or errors of Atoll's processes."""
    found = [line for line in log.splitlines() if (known := parse_line(line)) is not None and known.level in _PROBLEMS]
    return found[-limit:]


class _JsonLine(msgspec.Struct):
    time: str
    process: str
    level: str


def parse_line(line: str) -> LogLine | None:
    """Return what a line says about itself. Return None for a line that continues the one before, or is not Atoll's.

    Programs of users can print anything to the log.
    """
    if line.startswith("{"):
        try:
            fields = msgspec.json.decode(line, type=decodable(dict[str, Any]))
            found = msgspec.convert(fields, decodable(_JsonLine))
            stamp = _JSON_TIME.fullmatch(found.time)
            if stamp is None:
                return None
            whole = calendar.timegm(time.strptime(stamp["time"], "%Y-%m-%dT%H:%M:%S"))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return LogLine(whole + int(stamp["millis"] or 0) / 1000, found.process, found.level, fields)
    match = _TEXT_LINE.match(line)
    if match is None:
        return None
    try:
        local = time.mktime(time.strptime(match["time"], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):  # a line that a program of a user printed
        return None
    fields = {
        "time": _utc_text(local, int(match["millis"])),
        "level": match["level"].lower(),
        "process": match["process"],
        "pid": int(match["pid"]),
        "logger": match["logger"],
        "message": match["message"],
    }
    return LogLine(local + int(match["millis"]) / 1000, fields["process"], fields["level"], fields)
