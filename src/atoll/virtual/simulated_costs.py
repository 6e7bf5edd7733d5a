"""Modeled costs of messages, gangs and transfers for the processes of a simulated cluster."""

from __future__ import annotations

import math

import msgspec

from atoll.devices.null.model import NullModel


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs in seconds and bandwidths in bytes per second; all are at least 0.

    The defaults are round numbers near the costs of real processes on a machine with 2 cores. `python -m benchmarks
    costs` measures the costs, and the benchmarks in virtual time read the measured ones. Registration and compilation
    cost nothing because they happen once, before a measurement. Clients cost only the latency of their messages.
    """

    latency: float = 50e-6
    """Seconds of one-way latency of a control message."""

    controller_gang_host: float = 10e-6
    """Seconds of the controller per gang and host: half at the dispatch, half at the completion."""

    controller_gang: float = 15e-6
    """Additional seconds of the controller per gang: half when its launch arrives, half when it starts."""

    controller_delegated_run: float = 100e-6
    """Seconds of the controller per progress report of a delegated run, for any number of gangs."""

    host_gang: float = 50e-6
    """Seconds of a host per gang, to run its segment, to enqueue the work and to report the completion."""

    message: float = 5e-6
    """Seconds of a process per message of any other kind, and of a host per array that a blocked segment awaits."""

    data_bandwidth: float = math.inf
    """Bytes per second that a host can send to a host of another island, even if the network is faster."""

    staging_bandwidth: float = math.inf
    """Bytes per second between a device and host memory. A transfer is copied at the sender and at the receiver."""

    def limit(self, model: NullModel) -> NullModel:
        """Return `model` with the bandwidth between islands reduced to what the data path allows.

        A transfer is copied to host memory, then sent, then copied to the device, without overlap.
        """
        seconds = 1 / min(model.dcn_bandwidth, self.data_bandwidth) + 2 / self.staging_bandwidth
        return msgspec.structs.replace(model, dcn_bandwidth=1 / seconds if seconds else math.inf)


DEFAULT_COSTS = Costs()
