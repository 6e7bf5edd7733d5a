"""Errors of a client's callbacks, on their way through XLA.

XLA makes text of whatever a callback raises, with the traceback of this process around it. So what the client is to see
stands between two marks, and `status_of` finds it again.
"""

from __future__ import annotations

import re

from atoll import errors
from atoll.errors import Code, Status, StatusError
from atoll.host_services.calls.client_calls import ClientError

_BEGIN, _END = "\x02", "\x03"
_WRAPPED = re.compile(f"Traceback \\(most recent call last\\):\n[^{_BEGIN}]*{_BEGIN}(.*?){_END}", re.DOTALL)
_STATUS = "\x04"


def wrapped(error: ClientError | StatusError) -> Exception:
    """What to raise into XLA."""
    sign = _STATUS if isinstance(error, StatusError) else ""
    return ClientError(f"{_BEGIN}{sign}{error}{_END}")


def kept(error: ClientError | StatusError) -> Status:
    """The status of a run whose callback has raised, where XLA is not to know: in XLA's words all the same."""
    if isinstance(error, StatusError):
        return error.status
    return Status(Code.INTERNAL, f"CpuCallback error calling callback: {error}")


def status_of(error: BaseException) -> Status:
    """The status for an exception that a device has raised; of a callback, with the client's own traceback."""
    text = str(error)
    found = _WRAPPED.search(text)
    if found is None:
        return errors.status_of(error)
    inner = found[1]
    if inner.startswith(_STATUS):
        return errors.status_of(RuntimeError(inner.removeprefix(_STATUS)))
    return errors.status_of(RuntimeError(_WRAPPED.sub(lambda match: match[1], text)))
