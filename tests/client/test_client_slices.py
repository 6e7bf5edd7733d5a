"""Tests of the methods of a set of virtual devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import atoll
from atoll.client import client_slices
from atoll.client.client_slices import VirtualDeviceSet
from atoll.cluster.slice_requests import MAGIC, SliceRequest


@pytest.mark.parametrize(
    ("slice_request", "text"),
    [
        ({}, "expected exactly one of devices="),
        ({"devices": 2, "tpu_devices": 2}, "expected exactly one of devices="),
        ({"devices": 0}, "a slice of 0 devices"),
        ({"devices": -1}, "a slice of -1 devices"),
        ({"devices": 1 << 40}, "a slice of 1099511627776 devices"),
        ({"devices": 3, "shape": (2, 2)}, r"the shape \(2, 2\) cannot have 3 devices"),
        ({"shape": ()}, "one to three dimensions"),
        ({"shape": (1, 1, 1, 2)}, "one to three dimensions"),
        ({"shape": (-2, -2)}, "one device or more"),
        ({"devices": 1, "memory_per_device": "much"}, "not an amount of memory"),
        ({"devices": 1, "memory_per_device": -5}, "memory_per_device is -5"),
        ({"devices": 1, "other_island_than": 3}, "other_island_than is 3: expected a slice"),
        ({"devices": 1, "same_island_as": [None]}, r"same_island_as is \[None\]: expected a slice"),
    ],
)
def test_arguments_that_contradict_each_other(slice_request: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        VirtualDeviceSet(None).add_slice(**slice_request)


def test_arguments_that_are_none_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def submit(client: Any, payload: bytes) -> Any:
        sent.append(payload)
        return SimpleNamespace(fingerprint=b'{"slice": 1, "shape": [2], "island": 0}', local_devices=lambda: [])

    monkeypatch.setattr(client_slices, "submit", submit)
    names = ("shape", "kind", "same_island_as", "other_island_than", "memory_per_device")
    VirtualDeviceSet(None).add_slice(devices=2, **dict.fromkeys(names)).release()
    assert sent == [MAGIC + msgspec.msgpack.encode(SliceRequest(2))]


def test_sizes_are_whole_numbers() -> None:
    for slice_request in ({"devices": 1.5}, {"devices": "4"}, {"shape": (2.0, 2)}):
        with pytest.raises(TypeError, match="integer"):
            VirtualDeviceSet(None).add_slice(**slice_request)


def test_plain_jax_has_no_virtual_devices() -> None:
    with pytest.raises(RuntimeError, match=r"need Atoll.*JAX_PLATFORMS=atoll"):
        atoll.make_virtual_device_set()
