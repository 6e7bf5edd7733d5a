"""Every control message, by who says it to whom.

Handles, programs, functions and waits are numbered by their sender, so that nobody waits for a number. All numbers of a
session live in a namespace of its own: a worker and the controller name a buffer by (session, handle).

    worker    -> controller   Hello, then FromWorker     and back: ToWorker
    proxy     -> controller   Hello, then FromProxy                ToProxy
    engine    -> controller   Hello, then FromEngine               ToEngine
    operator  -> controller   Hello, then FromOperator             ToOperator
"""

from __future__ import annotations

from atoll.transport.messages.contents import *  # noqa: F403
from atoll.transport.messages.engines import *  # noqa: F403
from atoll.transport.messages.engines import FromEngine
from atoll.transport.messages.opening import *  # noqa: F403
from atoll.transport.messages.opening import Hello
from atoll.transport.messages.operators import *  # noqa: F403
from atoll.transport.messages.operators import FromOperator
from atoll.transport.messages.proxies import *  # noqa: F403
from atoll.transport.messages.proxies import FromProxy
from atoll.transport.messages.workers import *  # noqa: F403
from atoll.transport.messages.workers import FromWorker

ToController = Hello | FromWorker | FromProxy | FromEngine | FromOperator
