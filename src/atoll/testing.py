"""A simulated cluster in virtual time, for the study of schedulers. It runs in one process, in milliseconds.

The controller with its scheduler, the executors, plans and stores of the hosts, the clients' sessions and all messages
between them are real. Time is simulated: a device computes nothing and is busy for the time in a `NullProgram`; a
message has a latency, and occupies each process that handles it (`Costs`); a `NullModel` describes the networks. The
results do not depend on the machine: the same run gives exactly the same times.

A policy decides which of an island's ready nodes runs next (`Policy`). This policy prefers the session that was opened
last:

>>> from atoll.testing import FirstComeFirstServed, NullProgram, VirtualCluster, call, program, sharded

>>> class NewestFirst(FirstComeFirstServed):
...     def __init__(self):
...         self.ready = {}
...
...     def add(self, node):
...         self.ready[node.number] = node
...
...     def take(self):
...         self.ready = {n: t for n, t in self.ready.items() if not t.committed and not t.dropped}
...         if not self.ready:
...             return None
...         newest = max(self.ready.values(), key=lambda node: (node.session, -node.number))
...         return self.ready.pop(newest.number)

A client is a coroutine. This client calls a function repeatedly, each time with the result of the previous call, and
returns the time in seconds at which the last result was ready:

>>> async def compute(client, seconds, count):
...     devices, scalar = client.islands[0], ("uint8", (4,))
...     first = await client.compile(NullProgram("first", 0.0, (), (scalar,)), devices)
...     step = await client.compile(NullProgram("step", seconds, (scalar,), (scalar,)), devices)
...     spec = sharded(devices)
...     begin = client.register(program("begin", [], [call(first, [], [spec], devices)], [0]))
...     go_on = client.register(program("go on", [spec], [call(step, [0], [spec], devices)], [1]))
...     (x,) = await client.launch(begin, [], 1)
...     for _ in range(count):
...         (x,) = await client.launch(go_on, [x], 1)
...     return await client.when_ready([x])

Two clients share one of two islands; each island has four hosts with two devices. The computations of one client take
3 ms, those of the other 1 ms:

>>> def times(policy):
...     cluster = VirtualCluster("2x4x2", policy=policy)
...     slow, fast = cluster.client("slow"), cluster.client("fast")
...     ready = cluster.run_all([compute(slow, 0.003, 500), compute(fast, 0.001, 500)])
...     return [f"{seconds:.1f} s" for seconds in ready]

>>> times(FirstComeFirstServed)
['2.0 s', '2.0 s']
>>> times(NewestFirst)
['2.0 s', '0.5 s']

By default the clients alternate. With the new policy, the later client waits only for computations that have already
started. `cluster.controller` is the real controller, with its statistics and its trace. `atoll.ir.program` describes
programs of several nodes, transfers between islands (`transfer`) and donations. `VirtualCluster` documents its
arguments.
"""

from atoll.devices.null.model import MODELS, NullModel
from atoll.devices.null.null_program import NullProgram
from atoll.launch.policies.first_come import FirstComeFirstServed
from atoll.launch.policy import Policy
from atoll.session.bare import BareClient, call, program, sharded, transfer
from atoll.state.queued_nodes import QueuedNode
from atoll.virtual.cluster import VirtualCluster
from atoll.virtual.simulated_costs import Costs

__all__ = [
    "MODELS",
    "BareClient",
    "Costs",
    "FirstComeFirstServed",
    "NullModel",
    "NullProgram",
    "Policy",
    "QueuedNode",
    "VirtualCluster",
    "call",
    "program",
    "sharded",
    "transfer",
]
