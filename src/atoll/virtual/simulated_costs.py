"""What messages, gangs and transfers cost the processes of a cluster, where no process and no network is real."""

from __future__ import annotations

import math

import msgspec

from atoll.devices.null.model import NullModel


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plain record of seconds and of bytes a second; all are at least 0.

    The defaults are round numbers, near to what real processes take on a machine of 2 cores. `python -m benchmarks
    costs` measures them, and the figures in virtual time take what it wrote. Registering and compiling cost nothing:
    they happen once, before anything is measured. Clients cost nothing but the latency of their messages.
    """

    latency: float = 50e-6
    """Seconds that a control message is on its way, one way."""

    controller_gang_host: float = 10e-6
    """Seconds of the controller for a gang and each of its hosts: half when it dispatches, half at the completion."""

    controller_gang: float = 15e-6
    """Seconds of the controller for the gang as such: half when its launch arrives, half when it starts."""

    controller_delegated_run: float = 100e-6
    """Seconds of the controller for what a host reports of a delegated run, however many gangs that is about."""

    host_gang: float = 50e-6
    """Seconds of a host for its part in a gang: it runs the segment, enqueues, and reports the completion."""

    message: float = 5e-6
    """Seconds of a process for any other message; of a host also for data that a blocked segment has waited for."""

    data_bandwidth: float = math.inf
    """Bytes a second that a host's data path carries to a host of another island, however fast the network is."""

    staging_bandwidth: float = math.inf
    """Bytes a second from a device to host memory, and from there to a device: what is sent is copied in both."""

    def limit(self, model: NullModel) -> NullModel:
        """The model as this data path lets programs see it: between islands, hosts send no faster than it carries.

        A transfer is copied to host memory, sent, and copied to the device, one after the other.
        """
        seconds = 1 / min(model.dcn_bandwidth, self.data_bandwidth) + 2 / self.staging_bandwidth
        return msgspec.structs.replace(model, dcn_bandwidth=1 / seconds if seconds else math.inf)


DEFAULT_COSTS = Costs()
