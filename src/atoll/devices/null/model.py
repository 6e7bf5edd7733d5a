"""Speeds of null devices and of the networks between them."""

from __future__ import annotations

import msgspec

from atoll.cluster.environment_variables import NULL_MODEL
from atoll.errors import SettingsError

DEFAULT = "tpu-v3"


class NullModel(msgspec.Struct, frozen=True):
    """Speeds in bytes and operations per second, and latencies in seconds.

    A message takes the latency of its network, plus its bytes divided by the bandwidth of the sender's link. Messages
    on a link follow one another. Each device has a link to the interconnect of its island (ICI), and each host has a
    link to the data center's network (DCN).
    """

    flops: float  # per device, in a dense computation
    memory_bytes: int  # per device
    ici_latency: float
    ici_bandwidth: float
    dcn_latency: float
    dcn_bandwidth: float

    def compute_seconds(self, flops: float) -> float:
        """Return how long one device takes for `flops` operations."""
        return flops / self.flops

    def all_reduce_seconds(self, nbytes: float, devices: int) -> float:
        """Return how long an all-reduce takes within an island.

        As in a ring, each device sends nearly 2 x `nbytes`. The latency is that of a tree.
        """
        if devices < 2:
            return 0.0
        depth = (devices - 1).bit_length()
        return 2 * depth * self.ici_latency + 2 * nbytes * (devices - 1) / devices / self.ici_bandwidth


MODELS = {
    # One core of a TPU v3 has a peak of 61 TFLOP/s, of which transformers reach about 40 %, and 16 GB. Links have
    # 70 GB/s, and hosts 100 Gbit/s: Jouppi et al., "A domain-specific supercomputer for training deep neural networks"
    # (CACM 2020), and section 5 of the Pathways paper. The latencies are assumptions.
    "tpu-v3": NullModel(25e12, 16 << 30, 2e-6, 70e9, 100e-6, 12.5e9),
    # Only functions take time: as long as they state.
    "instant": NullModel(float("inf"), 16 << 30, 0.0, float("inf"), 0.0, float("inf")),
}


def chosen_model() -> NullModel:
    """Return the model that ATOLL_NULL_MODEL names. Raises SettingsError for an unknown name."""
    name = NULL_MODEL.text() or DEFAULT
    model = MODELS.get(name)
    if model is None:
        raise SettingsError(f"{NULL_MODEL.variable} is {name!r}: known are {', '.join(MODELS)}")
    return model
