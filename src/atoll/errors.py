"""The exception classes of Atoll, and the status that carries an error between processes.

    AtollError
    +-- AddressError (ValueError)       an address cannot be parsed, or listening on it is not allowed
    |   +-- ListenError                 the operating system refuses to listen at an address
    +-- ConnectError (ConnectionError)  no process answers at an address, or the cluster refuses the connection
    |   +-- VersionError                the two sides have no protocol version in common
    |   +-- AccessError                 the token is missing or wrong
    |   |   +-- HandshakeCutError       the other side closed the connection during the TLS handshake
    |   +-- UnreachableError            no process listens at an address
    |   +-- NotServingError             the controller admits nobody now: the same request can succeed later
    |   +-- FrameError                  a peer sent bytes that are not a message of the protocol
    +-- ClusterError (RuntimeError)     a cluster did not start, has ended, or is not the expected one
    |   +-- SettingsError (ValueError)  invalid settings of a cluster: islands, platform, engine, memory, dispatch
    |   +-- JournalError                a journal cannot be read, or is in use by another controller
    |   |   +-- IncompatibleJournalError  a journal is intact, and has another protocol or key
    |   +-- SupersededError             another controller of the same cluster has taken over
    |   +-- LeaseError                  an external lease is held by another controller, or its server fails
    |   +-- BackendError                JAX does not run on Atoll in this process
    +-- ProgramError (TypeError)        `atoll.program` cannot trace a function, or a call does not match its program
    +-- PipelineError (ValueError)      a model cannot be cut into the requested stages, or a schedule cannot run
    +-- RecoveryError (RuntimeError)    all copies of replicated arrays are lost, or an elastic run has no island
    +-- SliceError (ValueError)         the request for a slice is invalid, or the slice has been released
    +-- StatusError                     a request to a cluster failed; has a `Status`

The built-in class in parentheses is a second base class.

Failures on the cluster while a script runs (a computation, an allocation, a failed island) reach the script through
jaxlib, as `jax.errors.JaxRuntimeError`. jaxlib creates that exception from a `Status`: an absl status code, a message
and payloads. Its text begins with the name of the `Code`. The message says what failed, where, and what to do next.

Code that reacts to a failure reads its `Details`, never its text. Between Atoll's processes, the details are a payload
of the status. jaxlib's client drops payloads, so a session appends them to the message that it sends to its client::

    [atoll: island 0, host 1, retriable, in jit_step]

`details_of(error)` returns them for a caught exception.
"""

from __future__ import annotations

import enum
import os
import re
import traceback
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from atoll.decodable import decodable

MAX_TEXT = 64 * 1024  # maximum number of characters of a status
Failure = TypeVar("Failure", bound=OSError)
DETAILS = "atoll.details"  # key of the `Details` in the payloads of a status


class Code(enum.IntEnum):
    """The absl status codes, with their numbers on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Kind(enum.StrEnum):
    """The kinds of failures that programs react to."""

    OTHER = "other"  # the code says all
    ISLAND = "island"  # an island failed or was removed, and its arrays are lost
    LINK = "link"  # a connection between two processes broke or did not open, and its contents are lost
    CONTENTS = "contents"  # the contents of an array were lost in a file, in a host's memory or with their cluster
    PYTHON = "python"  # the session's Python process on a host ended
    SESSION = "session"  # the session has ended or lost its controller
    LIMIT = "limit"  # a limit or a quota was reached
    REFUSED = "refused"  # the cluster refuses a function that crashed, or its tenant for a while


LOSSES = frozenset((Kind.ISLAND, Kind.LINK, Kind.CONTENTS))  # arrays are lost, and can be made again from copies


class Details(msgspec.Struct, frozen=True, omit_defaults=True):
    """The properties of a failure that a program can react to.

    Args:
      kind: the kind of the failure.
      islands: the islands that failed.
      hosts: the hosts that failed, or whose connection failed.
      limit: the name of the quota, the setting or the resource that was exhausted.
      retriable: whether the same request can succeed later.
      program: the program that failed, or that was to make the lost array.
    """

    kind: Kind = Kind.OTHER
    islands: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    limit: str = ""
    retriable: bool = False
    program: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether arrays were lost that the script can make again from copies."""
        return self.kind in LOSSES

    def in_text(self, message: str) -> str:
        """Return `message` with these details appended, in the form that `details_in` parses."""
        if self.kind is Kind.OTHER and _OPENING not in message:
            return message
        islands, hosts = (" ".join(map(str, numbers)) for numbers in (self.islands, self.hosts))
        kind_says_island = self.kind is Kind.ISLAND and islands
        fields = [] if kind_says_island else [self.kind.value]
        fields += [f"island {islands}"] if islands else []
        fields += [f"host {hosts}"] if hosts else []
        fields += [f"of {quote(self.limit, safe=_PLAIN)}"] if self.limit else []
        fields += ["retriable"] if self.retriable else []
        fields += [f"in {quote(self.program, safe=_PLAIN)}"] if self.program else []
        return f"{message} {_OPENING}{', '.join(fields)}]"


_PLAIN = " !#$&'()*+/:;<=>?@^`{|}~"  # characters of names that need no escape in the text of details
_OPENING = "[atoll: "
_IN_TEXT = re.compile(
    r" ?\[atoll: (?P<kind>\w+)(?:(?:(?<=: island)|, island) (?P<islands>[0-9 ]{1,999}))?"
    r"(?:, host (?P<hosts>[0-9 ]{1,999}))?"
    r"(?:, of (?P<limit>[^,\[\]]+))?(?P<retriable>, retriable)?(?:, in (?P<program>[^,\[\]]+))?\]"
)
_KINDS = {kind.value: kind for kind in Kind}
_NO_DETAILS = Details()


def details_in(text: str) -> tuple[str, Details]:
    """Return the text of an error without the last details in it, and these details."""
    found = None
    for each in _IN_TEXT.finditer(text):
        found = each
    if found is None:
        return text, _NO_DETAILS
    numbers = ((found[name] or "").split() for name in ("islands", "hosts"))
    islands, hosts = (tuple(map(int, each)) for each in numbers)
    limit, program = (unquote(found[name] or "") for name in ("limit", "program"))
    details = Details(
        _KINDS.get(found["kind"], Kind.OTHER), islands, hosts, limit, found["retriable"] is not None, program
    )
    return text[: found.start()] + text[found.end() :], details


class Status(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a request: an absl `code`, and for errors a message that a user can act on."""

    code: int = 0
    message: str = ""
    payloads: dict[str, bytes] = {}

    @property
    def ok(self) -> bool:
        return self.code == Code.OK

    def exception(self) -> StatusError:
        """Return the exception for this error, with its payloads."""
        return StatusError(Code(self.code), self.message, self.payloads)

    def raise_if_error(self) -> None:
        if self.code:
            raise self.exception()

    @property
    def details(self) -> Details:
        """The details of this error. Invalid ones, which only a client can send, count as none."""
        encoded = self.payloads.get(DETAILS)
        if encoded is None:
            return _NO_DETAILS
        try:
            return msgspec.msgpack.decode(encoded, type=decodable(Details))
        except msgspec.MsgspecError:
            return _NO_DETAILS

    def with_details(self, details: Details) -> Status:
        return Status(self.code, self.message, {**self.payloads, DETAILS: msgspec.msgpack.encode(details)})

    def reworded(self, message: str) -> Status:
        """Return this error with another message."""
        return Status(self.code, message, self.payloads)

    def within(self, program: str) -> Status:
        """Return this error with the name of the program that failed, unless it has one already."""
        details = self.details
        if not program or details.program:
            return self
        error = Status(self.code or int(Code.INTERNAL), f"{self.message} (in {program})", self.payloads)
        return error.with_details(msgspec.structs.replace(details, program=program))

    def __str__(self) -> str:
        return "OK" if self.ok else f"{Code(self.code).name}: {self.message}"


OK = Status()


class AtollError(Exception):
    """The base class of all exceptions that Atoll raises on purpose."""


class AddressError(AtollError, ValueError):
    """An address cannot be parsed, or listening on it is not allowed."""


class ListenError(AddressError):
    """The operating system refuses to listen at an address, for example because a port is taken. This may change."""


class ConnectError(AtollError, ConnectionError):
    """A connection could not be established. The message names the address and what to start."""


class VersionError(ConnectError):
    """The two sides have no protocol version in common."""


class AccessError(ConnectError):
    """One side refused the other side's token."""


class HandshakeCutError(AccessError):
    """The other side closed the connection during the TLS handshake: it does not use TLS, or it was killed."""


class UnreachableError(ConnectError):
    """No process listens at an address, or its machine cannot be reached."""


class NotServingError(ConnectError):
    """The controller admits nobody now, for instance because it does not hold its lease. Try again later."""


class FrameError(ConnectError):
    """A peer sent bytes that are not a message of the protocol, or too many bytes."""


class ClusterError(AtollError, RuntimeError):
    """A cluster, or one of its processes, did not start or has ended."""


class SettingsError(ClusterError, ValueError):
    """A setting of a cluster is invalid. The message names the setting, its value and what is expected."""


class JournalError(ClusterError):
    """A controller's journal cannot be read, or is in use by another controller."""


class IncompatibleJournalError(JournalError):
    """Data on disk has another protocol or another key. The error names the version, or the key file to restore."""


class SupersededError(ClusterError):
    """The cluster has another controller, which has taken over. Start a standby instead, with `atoll up --standby`."""


class LeaseError(ClusterError):
    """The external lease of a cluster is held by another controller, or its server does not answer as expected."""


class BackendError(ClusterError):
    """JAX does not run on Atoll in this process. The message says how to start the process so that it does."""


class ProgramError(AtollError, TypeError):
    """A function cannot be made into a program, or a call does not match its program.

    The message names the user's lines and says what to do.
    """


class PipelineError(AtollError, ValueError):
    """A model cannot be cut into the requested stages, or a schedule cannot run.

    The message names the value, the parameter or the entry, and the user's lines.
    """


class RecoveryError(AtollError, RuntimeError):
    """All copies of replicated arrays were lost, or an elastic run has no islands left."""


class SliceError(AtollError, ValueError):
    """A request for a slice is invalid on any cluster, or a released slice is used."""


class StatusError(AtollError):
    """A request failed with a status, which the session sends to its client."""

    def __init__(self, code: Code, message: str, payloads: dict[str, bytes] | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.status = Status(int(code), message, payloads or {})


def failure(code: Code, message: str, details: Details) -> Status:
    """Return the status of a failure that programs can react to."""
    return Status(code, message).with_details(details)


def failed(code: Code, message: str, details: Details) -> StatusError:
    """Return the exception of a failure that programs can react to."""
    return StatusError(code, message, failure(code, message, details).payloads)


def invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message)


def exhausted(message: str) -> StatusError:
    return StatusError(Code.RESOURCE_EXHAUSTED, message)


def not_found(message: str) -> StatusError:
    return StatusError(Code.NOT_FOUND, message)


def unimplemented(message: str) -> StatusError:
    return StatusError(Code.UNIMPLEMENTED, message)


def refusal(status: Status, prefix: str = "") -> ConnectError:
    """Return the exception for a connection that the controller refused with `status`."""
    if status.code == Code.UNAVAILABLE and status.details.retriable:
        return NotServingError(prefix + status.message)
    kinds: dict[int, type[ConnectError]] = {Code.UNAUTHENTICATED: AccessError, Code.FAILED_PRECONDITION: VersionError}
    return kinds.get(status.code, ConnectError)(prefix + status.message)


_REPORTED: tuple[type[AtollError], ...] = (
    AtollError,
    AddressError,
    ListenError,
    ConnectError,
    VersionError,
    AccessError,
    HandshakeCutError,
    UnreachableError,
    NotServingError,
    FrameError,
    ClusterError,
    SettingsError,
    IncompatibleJournalError,
    JournalError,
    SupersededError,
    LeaseError,
    BackendError,
    ProgramError,
    PipelineError,
    RecoveryError,
    SliceError,
)
_REPORTED_BY_NAME = {kind.__name__: kind for kind in _REPORTED}


def reported_name(error: Exception) -> str:
    """Return the name under which another process learns of the error: that of its nearest class in the tree."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind in _REPORTED), type(error).__name__)


def error_kind(name: str) -> type[AtollError] | None:
    """Return the exception class that another process reports by `name`, or None if it reports no error of Atoll."""
    return _REPORTED_BY_NAME.get(name)


def details_of(error: BaseException) -> Details:
    """Return the details of an exception of Atoll, or of jaxlib's exception for a failure on the cluster."""
    return error.status.details if isinstance(error, StatusError) else details_in(str(error))[1]


# With this begins the text of an exception that Abseil raises if XLA uses a value without looking at its status.
_BAD_ACCESS = "Bad StatusOr access: "


def status_of(error: BaseException) -> Status:
    """Return the status for any exception. The text of XLA's errors begins with the name of their code."""
    if isinstance(error, StatusError):
        return error.status
    text = str(error) or type(error).__name__
    name, colon, rest = text.removeprefix(_BAD_ACCESS).partition(": ")
    code = Code.__members__.get(name)
    if colon and code:  # not OK, since an exception is a failure whatever its text says
        return Status(int(code), rest)
    if isinstance(error, MemoryError):
        return Status(int(Code.RESOURCE_EXHAUSTED), text)
    if isinstance(error, NotImplementedError):
        return Status(int(Code.UNIMPLEMENTED), text)
    if isinstance(error, ValueError | TypeError):
        return Status(int(Code.INVALID_ARGUMENT), text)
    return Status(int(Code.INTERNAL), f"{type(error).__name__}: {text}")


def status_in_text(error: BaseException) -> Status:
    """Return the status for jaxlib's exception for a failure on the cluster, with the details in the exception's text.

    Others must not use the text: the error may be that of a user's function, which can raise any text.
    """
    status = status_of(error)
    message, details = details_in(status.message)
    return status if details == _NO_DETAILS else Status(status.code, message).with_details(details)


def copied(error: Failure) -> Failure:
    """Return an equal error without a traceback, for a record that raises it more than once.

    The frames in a traceback keep all that their functions used, for example arrays, for as long as the error exists.
    """
    return type(error)(*error.args)


def shortened(text: str) -> str:
    """Return `text` without its middle if it is longer than a status may be."""
    if len(text) <= MAX_TEXT:
        return text
    gap = "\n...\n"
    half = (MAX_TEXT - len(gap)) // 2
    return f"{text[:half]}{gap}{text[-half:]}"


def traceback_of(error: BaseException, own: str) -> str:
    """Format the exception with its traceback, without the outermost frames whose files are in the directory `own`."""
    lines = error.__traceback__
    while lines is not None and lines.tb_frame.f_code.co_filename.startswith(own + os.sep):
        lines = lines.tb_next
    return "".join(traceback.format_exception(type(error), error, lines)).rstrip()
