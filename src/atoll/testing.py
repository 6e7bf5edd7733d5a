"""For those who study schedulers: a whole cluster in virtual time, in one process, in milliseconds.

What is real: the controller with its scheduler, the hosts' executors, plans and stores, the clients' sessions, and
every message between them. What is modelled: time. Devices compute nothing and take the time that a `NullProgram` says;
a message takes a latency, and each process is busy with it for a while (`Costs`); networks are those of a `NullModel`.
Nothing depends on the machine that this runs on: the same run gives the same times, to the last bit.

A policy decides which of an island's ready nodes goes next (`Policy`). In this one, the
session that was opened last goes first:

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

A client is a coroutine. This one calls a function again and again, each time with the result of the call before, and
returns when the last was ready, in seconds:

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

Two clients share one of two islands, each of four hosts with two devices. The computations of one take 3 ms and those
of the other 1 ms:

>>> def times(policy):
...     cluster = VirtualCluster("2x4x2", policy=policy)
...     slow, fast = cluster.client("slow"), cluster.client("fast")
...     ready = cluster.run_all([compute(slow, 0.003, 500), compute(fast, 0.001, 500)])
...     return [f"{seconds:.1f} s" for seconds in ready]

>>> times(FirstComeFirstServed)
['2.0 s', '2.0 s']
>>> times(NewestFirst)
['2.0 s', '0.5 s']

By default they alternate. With the new policy, the one that came later only waits for what had started before.
`cluster.controller` is the real one: its statistics and its trace say more. Programs of several nodes, transfers
between islands (`transfer`) and donations are as in `atoll.ir.program`. `VirtualCluster` has the contract of each
argument.
"""

from atoll.devices.null.model import MODELS, NullModel
from atoll.devices.null.null_program import NullProgram
from atoll.scheduling.policies.first_come import FirstComeFirstServed
from atoll.scheduling.policy import Policy
from atoll.scheduling.queued_nodes import QueuedNode
from atoll.session.bare import BareClient, call, program, sharded, transfer
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
