"""Every control message, by who says it to whom.

Handles, programs, functions and waits are numbered by their sender, so that nobody waits for a number. All numbers of a
session live in a namespace of its own: a worker and the controller name a buffer by (session, handle).

    worker    -> controller   Hello, then FromWorker     and back: ToWorker; a group's relay FromRelay, too
    worker    -> worker       InGroup
    proxy     -> controller   Hello, then FromProxy                ToProxy
    engine    -> controller   Hello, then FromEngine               ToEngine
    agent     -> controller   Hello, then AgentSays                TellAgent
    operator  -> controller   Hello, then FromOperator             ToOperator
    standby   -> controller   Hello                                ToStandby
"""

from __future__ import annotations

from atoll.protocol.messages.agent_messages import *  # noqa: F403
from atoll.protocol.messages.agent_messages import AgentSays
from atoll.protocol.messages.content_messages import *  # noqa: F403
from atoll.protocol.messages.engine_messages import *  # noqa: F403
from atoll.protocol.messages.engine_messages import FromEngine
from atoll.protocol.messages.opening_messages import *  # noqa: F403
from atoll.protocol.messages.opening_messages import Hello
from atoll.protocol.messages.operator_messages import *  # noqa: F403
from atoll.protocol.messages.operator_messages import FromOperator
from atoll.protocol.messages.proxy_messages import *  # noqa: F403
from atoll.protocol.messages.proxy_messages import FromProxy
from atoll.protocol.messages.relay_messages import *  # noqa: F403
from atoll.protocol.messages.relay_messages import FromRelay, MemberDone, MemberFailed, RelayedPiece
from atoll.protocol.messages.spill_messages import *  # noqa: F403
from atoll.protocol.messages.standby_messages import *  # noqa: F403
from atoll.protocol.messages.worker_messages import *  # noqa: F403
from atoll.protocol.messages.worker_messages import FromWorker, ToWorker

# What one host of a group sends to another: the relay what the controller has sent, and to it what has ended.
InGroup = ToWorker | MemberDone | MemberFailed | RelayedPiece
ToController = Hello | FromWorker | FromRelay | FromProxy | FromEngine | FromOperator | AgentSays
