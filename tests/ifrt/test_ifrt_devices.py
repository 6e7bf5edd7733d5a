"""What a client learns of the devices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.cluster.virtual_devices import DeviceInfo, VirtualDevice
from atoll.ifrt.ifrt_devices import init_reply
from atoll.protocol.messages import Welcome


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ([(0, 0), (0, 0)], [("CpuDevice(id=0)", "cpu:0"), ("CpuDevice(id=1)", "cpu:1")]),
        (
            [(0, 0), (0, 1)],
            [
                ("AtollDevice(id=0, island=0, host=0)", "cpu:0 (island 0, host 0)"),
                ("AtollDevice(id=1, island=0, host=1)", "cpu:1 (island 0, host 1)"),
            ],
        ),
    ],
)
def test_devices_have_stock_jaxs_names_where_all_are_on_one_host(
    hosts: Sequence[tuple[int, int]], names: Sequence[tuple[str, str]]
) -> None:
    devices = tuple(
        VirtualDevice(number, island, host, DeviceInfo(number, "cpu", "cpu", ("device",), "device", (), 0, number, 0))
        for number, (island, host) in enumerate(hosts)
    )
    reply = init_reply(Welcome(1, "", devices, (), "cpu", "", 1), 1)
    assert [(device.to_string, device.debug_string) for device in reply.all_devices] == names


def test_attributes_of_a_platform_reach_the_client() -> None:
    attributes = (("compute_capability", "9.0"), ("core_count", 132))
    info = DeviceInfo(0, "NVIDIA H200", "cuda", ("device",), "device", (), 0, 0, 0, attributes)
    (device,) = init_reply(Welcome(1, "", (VirtualDevice(0, 0, 0, info),), (), "cuda", "", 1), 1).all_devices
    assert device.attributes.attributes["compute_capability"].string_value == b"9.0"
    assert device.attributes.attributes["core_count"].int64_value == 132
    assert device.to_string == "CudaDevice(id=0)"
