"""How fast null devices, and the networks between them, are."""

from __future__ import annotations

import os

import msgspec

from atoll.errors import SettingsError

VARIABLE = "ATOLL_NULL_MODEL"
DEFAULT = "tpu-v3"


class NullModel(msgspec.Struct, frozen=True):
    """Seconds, bytes, and operations a second.

    A message takes its network's latency, and its bytes over the bandwidth of the sender's link, on which messages
    follow one another: for the interconnect of an island (ICI) each device has a link, for the data centre's network
    (DCN) each host has one.
    """

    flops: float  # that a device reaches in a dense computation
    memory_bytes: int  # of a device
    ici_latency: float
    ici_bandwidth: float
    dcn_latency: float
    dcn_bandwidth: float

    def compute_seconds(self, flops: float) -> float:
        """For so many operations on one device."""
        return flops / self.flops

    def all_reduce_seconds(self, nbytes: float, devices: int) -> float:
        """In a ring over the devices of an island: each sends all bytes nearly twice; the latency is that of a tree."""
        if devices < 2:
            return 0.0
        depth = (devices - 1).bit_length()
        return 2 * depth * self.ici_latency + 2 * nbytes * (devices - 1) / devices / self.ici_bandwidth


MODELS = {
    # A core of a TPU v3: 61 TFLOP/s at its peak, of which transformers reach about 40 %; 16 GB for each core. Links of
    # 70 GB/s, and 100 Gbit/s for a host: Jouppi et al., "A domain-specific supercomputer for training deep neural
    # networks" (CACM 2020), and the paper's section 5. Latencies are assumed.
    "tpu-v3": NullModel(25e12, 16 << 30, 2e-6, 70e9, 100e-6, 12.5e9),
    # Nothing takes any time but what a function says that it takes.
    "instant": NullModel(float("inf"), 16 << 30, 0.0, float("inf"), 0.0, float("inf")),
}


def chosen_model() -> NullModel:
    """The one that ATOLL_NULL_MODEL names. Raises SettingsError for a name that there is not."""
    name = os.environ.get(VARIABLE, "") or DEFAULT
    model = MODELS.get(name)
    if model is None:
        raise SettingsError(f"{VARIABLE} is {name!r}: known are {', '.join(MODELS)}")
    return model
