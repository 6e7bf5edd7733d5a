"""Tests of how an island of GPUs selects the network for its computations."""

from __future__ import annotations

import os

import pytest

from atoll.devices.xla import xla_island


def test_an_interface_is_known_by_its_address() -> None:
    assert xla_island.interface_of("127.0.0.1") == "lo"
    assert xla_island.interface_of("192.0.2.77") == ""  # addresses reserved for documentation, which no machine has
    assert xla_island.interface_of("no such name") == ""


@pytest.mark.parametrize(("chosen", "used"), [("", "=eth7"), ("eth1", "eth1")])
def test_nccl_uses_the_network_of_the_meeting_unless_the_user_has_chosen_one(
    monkeypatch: pytest.MonkeyPatch, chosen: str, used: str
) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if chosen:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    monkeypatch.setattr(xla_island, "interface_of", lambda hostname: "eth7")
    xla_island.use_network("127.0.0.1")
    assert os.environ.get("NCCL_SOCKET_IFNAME", "") == chosen
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if chosen:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", chosen)
    xla_island.use_network("10.0.0.3")
    assert os.environ["NCCL_SOCKET_IFNAME"] == used
