"""The exception classes of Atoll, and the status that carries an error between processes.

    AtollError
    +-- AddressError (ValueError)       an address cannot be parsed, or listening on it is not allowed
    +-- ConnectError (ConnectionError)  no process answers at an address, or the cluster refuses the connection
    |   +-- VersionError                the two sides have no protocol version in common
    |   +-- AccessError                 the token is missing or wrong
    |   |   +-- HandshakeCutError       the other side closed the connection during the TLS handshake
    |   +-- FrameError                  a peer sent bytes that are not a message of the protocol
    +-- ClusterError (RuntimeError)     a cluster did not start, has ended, or is not the expected one
    |   +-- SettingsError (ValueError)  invalid settings of a cluster: islands, platform, engine, memory, dispatch
    |   +-- JournalError                a journal cannot be read, or is in use by another controller
    |   +-- BackendError                JAX does not run on Atoll in this process
    +-- ProgramError (TypeError)        `atoll.program` cannot trace a function, or a call does not match its program
    +-- PipelineError (ValueError)      a model cannot be cut into the requested stages, or a schedule cannot run
    +-- RecoveryError (RuntimeError)    all copies of replicated arrays are lost, or a training has no island left
    +-- SliceError (ValueError)         the request for a slice is invalid, or the slice has been released
    +-- StatusError                     a request to a cluster failed; has a `Status`

The built-in class in parentheses is a second base class.

Failures on the cluster while a script runs (a computation, an allocation, a failed island) reach the script through
jaxlib, as `jax.errors.JaxRuntimeError`. jaxlib creates that exception from a `Status`: an absl status code, a message
and payloads. Its text begins with the name of the `Code`. The message says what failed, where, and what to do next.
"""

from __future__ import annotations

import enum
import os
import traceback

import msgspec

MAX_TEXT = 64 * 1024  # maximum number of characters of a status


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


class Status(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a request: an absl `code`, and for errors a message that a user can act on."""

    code: int = 0
    message: str = ""
    payloads: dict[str, bytes] = {}

    @property
    def ok(self) -> bool:
        return self.code == Code.OK

    def raise_if_error(self) -> None:
        if self.code:
            raise StatusError(Code(self.code), self.message, self.payloads)

    def within(self, program: str) -> Status:
        """Return this error with the name of the program that failed, unless the message names one already."""
        if not program or " (in " in self.message:
            return self
        return Status(self.code or int(Code.INTERNAL), f"{self.message} (in {program})", self.payloads)

    def __str__(self) -> str:
        return "OK" if self.ok else f"{Code(self.code).name}: {self.message}"


OK = Status()


class AtollError(Exception):
    """The base class of all exceptions that Atoll raises on purpose."""


class AddressError(AtollError, ValueError):
    """An address cannot be parsed, or listening on it is not allowed."""


class ConnectError(AtollError, ConnectionError):
    """A connection could not be established. The message names the address and what to start."""


class VersionError(ConnectError):
    """The two sides have no protocol version in common."""


class AccessError(ConnectError):
    """One side refused the other side's token."""


class HandshakeCutError(AccessError):
    """The other side closed the connection during the TLS handshake: it does not use TLS, or it was killed."""


class FrameError(ConnectError):
    """A peer sent bytes that are not a message of the protocol, or too many bytes."""


class ClusterError(AtollError, RuntimeError):
    """A cluster, or one of its processes, did not start or has ended."""


class SettingsError(ClusterError, ValueError):
    """A setting of a cluster is invalid. The message names the setting, its value and what is expected."""


class JournalError(ClusterError):
    """A controller's journal cannot be read, is of another version of Atoll, or is in use by another controller."""


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
    """All copies of replicated arrays were lost, or a training has no islands left."""


class SliceError(AtollError, ValueError):
    """A request for a slice is invalid on any cluster, or a released slice is used."""


class StatusError(AtollError):
    """A request failed with a status, which the session sends to its client."""

    def __init__(self, code: Code, message: str, payloads: dict[str, bytes] | None = None) -> None:
        super().__init__(f"{code.name}: {message}")
        self.status = Status(int(code), message, payloads or {})


def invalid(message: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, message)


def not_found(message: str) -> StatusError:
    return StatusError(Code.NOT_FOUND, message)


def unimplemented(message: str) -> StatusError:
    return StatusError(Code.UNIMPLEMENTED, message)


def refusal(status: Status, prefix: str = "") -> ConnectError:
    """Return the exception for a connection that the controller refused with `status`."""
    kinds: dict[int, type[ConnectError]] = {Code.UNAUTHENTICATED: AccessError, Code.FAILED_PRECONDITION: VersionError}
    return kinds.get(status.code, ConnectError)(prefix + status.message)


def error_kind(name: str) -> type[AtollError] | None:
    """Return the exception class that another process reports by `name`, or None if this module has no such class."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, AtollError) else None


def status_of(error: BaseException) -> Status:
    """Return the status for any exception. The text of XLA's errors begins with the name of their code."""
    if isinstance(error, StatusError):
        return error.status
    text = str(error) or type(error).__name__
    name, colon, rest = text.partition(": ")
    if colon and name in Code.__members__:
        return Status(int(Code[name]), rest)
    if isinstance(error, MemoryError):
        return Status(int(Code.RESOURCE_EXHAUSTED), text)
    if isinstance(error, NotImplementedError):
        return Status(int(Code.UNIMPLEMENTED), text)
    if isinstance(error, ValueError | TypeError):
        return Status(int(Code.INVALID_ARGUMENT), text)
    return Status(int(Code.INTERNAL), f"{type(error).__name__}: {text}")


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
