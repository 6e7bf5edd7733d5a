"""The resources that an island asks Ray for, and the reasons why Ray cannot place it. Pure, and without Ray.

An island is one placement group with a bundle per host. The names of resources are Ray's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.cluster.settings import ClusterSettings, check_known
from atoll.cluster.topology import IslandShape
from atoll.devices.device_kinds import kind_of
from atoll.errors import SettingsError
from atoll.quantities import counted

STRATEGIES = ("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK")
# Ray's names for the devices of platforms. Other platforms use only the CPU.
_DEVICES = {"cuda": "GPU", "rocm": "GPU", "tpu": "TPU"}


@dataclass(frozen=True)
class Demand:
    """The placement group of an island."""

    bundle: Mapping[str, float]  # the resources of each host, by name
    count: int  # of hosts
    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: str = STRATEGIES[0]

    @property
    def nodes(self) -> int:
        """Return the minimum number of nodes for the island."""
        return self.count if self.strategy == "STRICT_SPREAD" else 1

    @property
    def on_one_node(self) -> Mapping[str, float]:
        """Return the minimum resources that a node needs."""
        if self.strategy != "STRICT_PACK":
            return self.bundle
        return {name: amount * self.count for name, amount in self.bundle.items()}

    def __str__(self) -> str:
        parts = [f"{name} {amount:g}" for name, amount in self.bundle.items()]
        return ", ".join(parts + [f"label {name}={value}" for name, value in self.labels.items()])


@dataclass(frozen=True)
class Node:
    """A live node of the Ray cluster, with its resources by name."""

    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    leaves: bool = False  # whether Ray drains the node


def demand_of(settings: ClusterSettings, shape: IslandShape) -> Demand:
    """Return what an island of the shape asks Ray for. Raise SettingsError for invalid settings."""
    check_known("Ray strategy", settings.ray_strategy, STRATEGIES)
    devices = _DEVICES.get(shape.platform)
    bundle = {"CPU": 1.0} | ({devices: float(shape.devices)} if devices else {})
    for name, text in _pairs(settings.ray_resources, "a Ray resource", "GPU=4").items():
        bundle[name] = _amount(name, text)
    bundle = {name: amount for name, amount in bundle.items() if amount}
    if not bundle:
        raise SettingsError("a host needs at least one Ray resource, such as CPU=1")
    labels = _pairs(settings.ray_labels, "a Ray label", "ray.io/market-type=spot")
    count = 1 if kind_of(shape.platform).process_per_island else shape.hosts
    return Demand(bundle, count, labels, settings.ray_strategy)


def _pairs(text: str, what: str, example: str) -> dict[str, str]:
    """Parse NAME=VALUE,NAME=VALUE."""
    found = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise SettingsError(f"{part!r} is not {what}: expected NAME=VALUE, such as {example}")
        found[name.strip()] = value.strip()
    return found


def _amount(name: str, text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise SettingsError(f"invalid amount {text!r} of the resource {name}: expected a number from 0 on")
    return amount


def lack_text(demand: Demand, nodes: Sequence[Node]) -> str:
    """Return why Ray has not placed an island: too few nodes have the resources, or too few have them free."""
    asked = f"{demand.count} x ({demand})" if demand.count > 1 else f"({demand})"
    text = f"Ray is asked for {asked}" + (f" on {demand.nodes} nodes" if demand.nodes > 1 else "")
    leaving = [each.name for each in nodes if each.leaves]
    if leaving:
        text += f", and drains {', '.join(leaving)}"
    nodes = [each for each in nodes if not each.leaves]
    needed = demand.on_one_node
    alike = [each for each in nodes if _has_labels(each.labels, demand.labels)]
    fits = [each for each in alike if _covers(each.total, needed)]
    if len(fits) < demand.nodes:
        what = "all of that" if needed != demand.bundle else "that"
        these = f"its {'other ' if leaving else ''}{_nodes(len(nodes))}"
        text += f"; of {these}, {_nodes(len(fits)) if fits else 'none'} can have {what}"
        if len(alike) < demand.nodes and demand.labels:
            text += f", since {len(alike) or 'none'} has these labels"
        most = _most(needed, alike)
        return text + (f" (the most on one: {most})" if most else "") + _hint(demand, fits)
    free = [each for each in fits if _covers(each.free, needed)]
    if len(free) < demand.nodes:
        busy = ", ".join(f"{each.name} has {_shares(needed, each)}" for each in fits if each not in free)
        return f"{text}; {_nodes(len(fits))} could have that, of which {len(free)} now: {busy}"
    return text


def _hint(demand: Demand, fits: Sequence[Node]) -> str:
    if fits and demand.strategy == "STRICT_SPREAD" and demand.count > 1:
        return "; --ray-strategy PACK lets hosts share a node"
    return ""


def _has_labels(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    """Return whether the labels match, assuming that values match Ray's expressions such as !spot or in(a,b)."""
    return all(value.startswith(("!", "in(")) or labels.get(name) == value for name, value in wanted.items())


def _covers(has: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in bundle.items())


def _most(bundle: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """Return the maximum that a node has of each resource that some node lacks."""
    short = [name for name, amount in bundle.items() if any(each.total.get(name, 0.0) < amount for each in nodes)]
    return ", ".join(f"{name} {max(each.total.get(name, 0.0) for each in nodes):g}" for name in short)


def _shares(bundle: Mapping[str, float], node: Node) -> str:
    short = [name for name, amount in bundle.items() if node.free.get(name, 0.0) < amount]
    return ", ".join(f"{name} {node.free.get(name, 0.0):g} of {node.total[name]:g} free" for name in short)


def _nodes(count: int) -> str:
    return counted(count, "node")
