"""All control messages, in one module for each kind of peer.

The sender numbers handles, programs, functions and waits, so that it never waits for a number. Each session has its own
namespace of numbers: a worker and the controller identify a buffer by (session, handle).

    peer      to the controller                       from the controller
    worker    Hello, then FromWorker and FromRelay    ToWorker
    relay     Hello, then FromProcessRelay            ToProcessRelay
    proxy     Hello, then FromProxy                   ToProxy
    engine    Hello, then FromEngine                  ToEngine
    agent     Hello, then AgentSays                   TellAgent
    operator  Hello, then FromOperator                ToOperator
    standby   Hello                                   ToStandby

A spare engine sends a Hello, and receives BecomeEngine. From then on it is the engine.

The workers of a group of hosts exchange InGroup.
"""

from __future__ import annotations

from atoll.protocol.messages.content_messages import *  # noqa: F403
from atoll.protocol.messages.engine_messages import *  # noqa: F403
from atoll.protocol.messages.engine_messages import AgentSays, FromEngine
from atoll.protocol.messages.opening_messages import *  # noqa: F403
from atoll.protocol.messages.opening_messages import Hello
from atoll.protocol.messages.operator_messages import *  # noqa: F403
from atoll.protocol.messages.operator_messages import FromOperator
from atoll.protocol.messages.proxy_messages import *  # noqa: F403
from atoll.protocol.messages.proxy_messages import FromProxy
from atoll.protocol.messages.standby_messages import *  # noqa: F403
from atoll.protocol.messages.worker_messages import *  # noqa: F403
from atoll.protocol.messages.worker_messages import (
    FromProcessRelay,
    FromRelay,
    FromWorker,
    MemberDone,
    MemberFailed,
    RelayedPiece,
    ToWorker,
)

# Messages between the hosts of a group: messages of the controller from the relay, and results to the relay.
InGroup = ToWorker | MemberDone | MemberFailed | RelayedPiece
ToController = Hello | FromWorker | FromRelay | FromProcessRelay | FromProxy | FromEngine | FromOperator | AgentSays
