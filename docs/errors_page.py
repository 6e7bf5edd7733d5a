"""Writes reference/errors.md from the exceptions, codes and kinds of `atoll.errors`: `python -m docs.errors_page`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from atoll import errors

PAGE = Path(__file__).resolve().parent / "reference" / "errors.md"
_HEAD = """\
# Errors

<!-- Written by `python -m docs.errors_page` from `errors.py`. -->

This page lists the types of errors. [Error messages](messages.md) lists all messages, with a link to each, and
[troubleshooting](../guides/troubleshooting.md) explains the frequent ones.

Errors of Atoll's own functions are subclasses of `atoll.AtollError`. If something fails on the cluster while a script
runs, such as a computation, JAX raises `jax.errors.JaxRuntimeError`. Its text begins with a [code](#codes). If a
program can react to the failure, the text ends with details in brackets:

```text
DATA_LOSS: host 1 of island 0 is gone ... [atoll: island 0, host 1, retriable, in jit_step]
```

`atoll.errors.details_of(error)` returns these [details](#details) as fields. A program should use the
fields, and not the text.

## Exceptions

| exception | base classes | meaning | what to do |
|---|---|---|---|
"""
_KINDS = """
## Kinds of failures

`details_of(error).kind` is one of these. If arrays are lost (`is_loss`), a script can compute them again, or restore
them, for example with [`atoll.recover`](../guides/elastic.md#copies).

| kind | meaning |
|---|---|
"""
_FIELDS = """
## Details

`details_of(error)` has these fields:

| field | meaning |
|---|---|
"""
_CODES = """
## Codes

The names and numbers of the codes are those of absl and gRPC.

| code | number | typical cause on Atoll | what to do |
|---|---:|---|---|
"""
CAUSES = {
    "CANCELLED": "the work was ended with its session, or a callback got no answer",
    "UNKNOWN": "an exception without a code",
    "INVALID_ARGUMENT": "the request is invalid: shapes, types, devices, sizes",
    "DEADLINE_EXCEEDED": "a time limit was reached; the message names what was missing",
    "NOT_FOUND": "an array, a file or a function does not exist",
    "ALREADY_EXISTS": "a name is taken",
    "PERMISSION_DENIED": "the tenant may not do this",
    "RESOURCE_EXHAUSTED": "memory, or a quota; the message names the holders",
    "FAILED_PRECONDITION": "the state of the cluster or the session does not allow the request now",
    "ABORTED": "a function or a Python process ended before its result; or the function is refused after crashes",
    "OUT_OF_RANGE": "an index is outside of its range",
    "UNIMPLEMENTED": "Atoll or the platform does not support this",
    "INTERNAL": "an exception in user code, or a bug; the message has the traceback",
    "UNAVAILABLE": "a process cannot be reached",
    "DATA_LOSS": "arrays are lost because a host, an island or a connection failed",
    "UNAUTHENTICATED": "the token or the certificate is missing or wrong",
}
_WHAT_TO_DO = {
    "AtollError": "follow the message",
    "AddressError": "correct the address: `HOST:PORT`, or `unix:` with an absolute path",
    "ListenError": "do what the message says, or start again later",
    "ConnectError": "start the cluster that the message names, or correct the address",
    "VersionError": "install the same version of Atoll on both sides",
    "AccessError": "use the current token or join token of the cluster",
    "HandshakeCutError": "use TLS on both sides, or on none; then try again",
    "UnreachableError": "check the address, the port and the firewall",
    "NotServingError": "try again after some seconds",
    "FrameError": "install the same version of Atoll on both sides; otherwise report a bug",
    "ClusterError": "look at `atoll status` and `atoll logs`",
    "SettingsError": "correct the [setting](settings.md)",
    "JournalError": "use another directory, or end the other cluster",
    "IncompatibleJournalError": "continue with the version or the key file that the message names",
    "SupersededError": "[follow it](../operate/high-availability.md#if-the-first-machine-is-lost), with `--standby`",
    "LeaseError": "check the server of the lease",
    "BackendError": "start the script as the message says",
    "ProgramError": "change the lines that the message names: [programs](../guides/programs.md)",
    "PipelineError": "change what the message names: [pipelines](../guides/pipelines.md)",
    "RecoveryError": "start again from a [checkpoint](../guides/checkpoints.md)",
    "SliceError": "correct the request, or call `add_slice` again",
    "StatusError": "see [codes](#codes)",
    "CANCELLED": "find out why the session or the script ended",
    "UNKNOWN": "follow the message",
    "INVALID_ARGUMENT": "correct the request: it fails again otherwise",
    "DEADLINE_EXCEEDED": "find out why the missing part is late, or allow more time",
    "NOT_FOUND": "correct the name, or make the object first",
    "ALREADY_EXISTS": "choose another name, or end the other owner",
    "PERMISSION_DENIED": "ask an operator for the [permission](permissions.md)",
    "RESOURCE_EXHAUSTED": "free memory, wait, or ask for a larger quota",
    "FAILED_PRECONDITION": "wait for the state that the message names, or change it",
    "ABORTED": "fix the function",
    "OUT_OF_RANGE": "correct the index",
    "UNIMPLEMENTED": "use what the message suggests",
    "INTERNAL": "fix the code of the traceback; if it is Atoll's, "
    "[report a bug](../guides/troubleshooting.md#report-a-bug)",
    "UNAVAILABLE": "try again; if it fails again, look at `atoll status`",
    "DATA_LOSS": "compute the arrays again, or restore them: [elastic training](../guides/elastic.md)",
    "UNAUTHENTICATED": "use the current token or join token",
}


def _classes() -> list[type[Exception]]:
    """Return the exceptions in the order of the source, base classes first."""
    found = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.AtollError)]
    return sorted(found, key=lambda each: inspect.getsourcelines(each)[1])


def _comments(kind: type) -> dict[str, str]:
    """Return the comments beside the members of an enumeration, by value."""
    return dict(re.findall(r'= "(\w+)"  # (.+)', inspect.getsource(kind)))


def page() -> str:
    """Return the page."""
    text = _HEAD
    for each in _classes():
        first = " ".join((inspect.getdoc(each) or "").split("\n\n")[0].split())
        bases = ", ".join(f"`{base.__name__}`" for base in each.__bases__ if base is not Exception)
        text += f"| `{each.__name__}` | {bases} | {first} | {_WHAT_TO_DO[each.__name__]} |\n"
    text += _KINDS
    text += "".join(f"| `{value}` | {meaning} |\n" for value, meaning in _comments(errors.Kind).items())
    fields = re.findall(r"^ +(\w+): (.+?)\.?$", inspect.getdoc(errors.Details) or "", re.MULTILINE)
    text += _FIELDS + "".join(f"| `{name}` | {meaning} |\n" for name, meaning in fields)
    text += "| `is_loss` | whether arrays were lost that the script can make again from copies |\n"
    text += _CODES
    for code in filter(None, errors.Code):
        text += f"| `{code.name}` | {code.value} | {CAUSES[code.name]} | {_WHAT_TO_DO[code.name]} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
