"""Every error of Atoll, as one tree, and the status that carries it between processes.

    AtollError
    +-- AddressError (ValueError)       an address that cannot be parsed, or may not be listened on
    +-- ConnectError (ConnectionError)  nobody answers at an address, or the cluster there refuses the connection
    |   +-- VersionError                the two sides speak different protocol versions
    |   +-- AccessError                 the token is missing or wrong
    |   |   +-- HandshakeCutError       it ended a TLS handshake without a word
    |   +-- FrameError                  a peer sent bytes that are no message of the protocol
    +-- ClusterError (RuntimeError)     a cluster did not start, has ended, or is not the one that was asked for
    |   +-- SettingsError (ValueError)  settings that no cluster can have: islands, platform, engine, memory, dispatch
    |   +-- JournalError                a journal that cannot be read, or belongs to somebody else
    |   +-- BackendError                JAX does not run on Atoll in this process
    +-- ProgramError (TypeError)        a function that `atoll.program` cannot trace, or a call of it that does not fit
    +-- PipelineError (ValueError)      a model that cannot be cut as asked, or a schedule that cannot run
    +-- RecoveryError (RuntimeError)    what was replicated is lost, or a training has no island to go on
    +-- SliceError (ValueError)         a slice that nobody can ask for, or that has been released
    +-- StatusError                     a request to a cluster failed; carries a `Status`

In parentheses: the built-in class that an error is, too.

What fails on the cluster while a script runs (a computation, an allocation, a failed island) reaches the script from
jaxlib, as `jax.errors.JaxRuntimeError`. Its text begins with the name of a `Code`.

A `Status` is what travels between processes: an absl status code, a message, and payloads. The client's C++ half turns
it into that exception, so the message says what failed, where, and what to do next.
"""

from __future__ import annotations

import enum
import os
import traceback

import msgspec

# Characters that a status has at most.
MAX_TEXT = 64 * 1024


class Code(enum.IntEnum):
    """The absl status codes, by their numbers on the wire."""

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
    """An outcome: `code` OK, or what went wrong, in a message that a user can act on."""

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
        """The same error with the name of the program that failed, unless it names one already."""
        if not program or " (in " in self.message:
            return self
        return Status(self.code or int(Code.INTERNAL), f"{self.message} (in {program})", self.payloads)

    def __str__(self) -> str:
        return "OK" if self.ok else f"{Code(self.code).name}: {self.message}"


OK = Status()


class AtollError(Exception):
    """The root of everything that Atoll raises on purpose."""


class AddressError(AtollError, ValueError):
    """An address that cannot be parsed, or that must not be listened on."""


class ConnectError(AtollError, ConnectionError):
    """A connection could not be made; says to whom, and what to start."""


class VersionError(ConnectError):
    """The two sides share no protocol version."""


class AccessError(ConnectError):
    """One side refused the other's token."""


class HandshakeCutError(AccessError):
    """The other side ended a TLS handshake without a word: it speaks no TLS, or it was killed just then."""


class FrameError(ConnectError):
    """A peer sent bytes that are no message of the protocol, or too many."""


class ClusterError(AtollError, RuntimeError):
    """A cluster, or a process of it, did not start or has ended."""


class SettingsError(ClusterError, ValueError):
    """Settings that no cluster can have; names the setting, what it was, and what is expected."""


class JournalError(ClusterError):
    """A controller's journal cannot be read, is of another version of Atoll, or is in use by another controller."""


class BackendError(ClusterError):
    """JAX does not run on Atoll in this process; says how to start it so that it does."""


class ProgramError(AtollError, TypeError):
    """A function that cannot be made into a program, or a call that does not fit its program.

    Names the user's lines and says what to do.
    """


class PipelineError(AtollError, ValueError):
    """A model that cannot be cut into a pipeline as asked, or a schedule that cannot run.

    Names the value, the parameter or the entry, and the user's lines.
    """


class RecoveryError(AtollError, RuntimeError):
    """More was lost at once than there are copies of; or a training has no islands left to go on with."""


class SliceError(AtollError, ValueError):
    """A slice that nobody can ask for, whatever the cluster; or a slice that has been released is used."""


class StatusError(AtollError):
    """A request failed with a status; what a session answers to its client."""

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
    """The error for a controller that refuses the connection."""
    kinds: dict[int, type[ConnectError]] = {
        Code.UNAUTHENTICATED: AccessError,
        Code.FAILED_PRECONDITION: VersionError,
    }
    return kinds.get(status.code, ConnectError)(prefix + status.message)


def error_kind(name: str) -> type[AtollError] | None:
    """The class of this tree that has the name, as another process reports it; None where there is none."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, AtollError) else None


def status_of(error: BaseException) -> Status:
    """The status for any exception; XLA's own errors begin with their code's name."""
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
    """Its beginning and its end, where it is longer than a status may be."""
    if len(text) <= MAX_TEXT:
        return text
    gap = "\n...\n"
    half = (MAX_TEXT - len(gap)) // 2
    return f"{text[:half]}{gap}{text[-half:]}"


def traceback_of(error: BaseException, own: str) -> str:
    """Return the exception with its traceback, without the outermost frames that are in the directory `own`."""
    lines = error.__traceback__
    while lines is not None and lines.tb_frame.f_code.co_filename.startswith(own + os.sep):
        lines = lines.tb_next
    return "".join(traceback.format_exception(type(error), error, lines)).rstrip()
