"""Short rounds of peers, and all backends of a peer in one process.

It takes seconds to start Ray and its actors, or to import TensorFlow. Processes of peers import this module, and only
they import what it needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict, replace

from benchmarks.harness.benchmark import Round, Settings


class Short(Settings, frozen=True):
    """Settings of short rounds."""

    def size(self, full: int, quick: int) -> int:
        return max(1, quick // 16)


def controllers(settings: Settings) -> Round:
    from benchmarks.paper.peers import multi_controller

    return multi_controller.prepare(Short(**asdict(settings)))


def ray(settings: Settings) -> Round:
    from benchmarks.paper.peers import ray_actors

    actors = ray_actors.start(int(settings.point["hosts"]), int(settings.point["devices"]))
    return _one_after_another([ray_actors.rounds(actors, replace(settings, backend=mode)) for mode in ray_actors.MODES])


def tensorflow(settings: Settings) -> Round:
    import tensorflow as tf

    from benchmarks.paper.peers import tensorflow as peer

    settings = Short(**asdict(settings))
    first, *others = peer.NODES_OF
    rounds = [peer.prepare(replace(settings, backend=first))]
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    rounds += [peer.rounds(devices, replace(settings, backend=other)) for other in others]
    return _one_after_another(rounds)


def _one_after_another(rounds: Sequence[Round]) -> Round:
    return lambda: {str(number): each()["rate"] for number, each in enumerate(rounds)}
