"""Tests of device lookups by platform, with clients of several platforms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import xla_bridge

from atoll.client.backend import add_platform
from atoll.client.jax_patches import cpu_devices
from atoll.client.jax_patches.patch import Replacement


class Client:
    """A client as JAX sees it. jaxlib calls the platforms of all GPUs "gpu"."""

    runtime_type = "proxy/atoll"

    def __init__(self, platform: str) -> None:
        self._raw_platform = platform
        self.platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)

    def devices(self) -> list[Any]:
        return [self, self]

    def device_count(self) -> int:
        return 2

    local_device_count = device_count


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that registers a client as JAX's default, for the platform "atoll"."""
    here = jax.devices("cpu")[0].client
    monkeypatch.setattr(xla_bridge, "_backends", {})
    xla_bridge.get_backend.cache_clear()

    def connect(platform: str) -> Client:
        client = Client(platform)
        xla_bridge._backends["atoll"] = client
        monkeypatch.setattr(xla_bridge, "_default_backend", client)
        xla_bridge._backends["cpu"] = here
        add_platform(client)
        return client

    yield connect
    monkeypatch.undo()
    xla_bridge.get_backend.cache_clear()


def lookup(name: str) -> Any:
    """Return the patched version of the JAX function with this name."""
    (change,) = (each for each in cpu_devices.PATCH.changes if isinstance(each, Replacement) and each.name == name)
    original = getattr(xla_bridge, name)
    return change.wrap(getattr(original, "__wrapped__", original))


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("cuda", ["cuda", "gpu", "atoll"]),
        ("rocm", ["rocm", "gpu", "atoll"]),
        ("tpu", ["tpu", "atoll"]),
        ("null", ["null", "atoll"]),
        ("cpu", ["cpu", "atoll"]),
    ],
)
def test_a_platform_has_the_devices_of_the_cluster(connect: Any, platform: str, names: list[str]) -> None:
    client = connect(platform)
    devices = lookup("devices")
    for name in names:
        assert devices(name) == devices(backend=name) == [client, client]
        assert lookup("device_count")(name) == lookup("local_device_count")(name) == 2
    assert devices(jax.default_backend()) == devices() == [client, client]
    assert all(each in devices(each.platform) for each in devices())
    assert xla_bridge.get_backend("cpu").runtime_type != Client.runtime_type


@pytest.mark.parametrize("name", ["devices", "device_count", "local_device_count"])
@pytest.mark.parametrize("after", [False, True], ids=["atoll", "atoll,cpu"])
def test_the_lookup_that_starts_the_backends_finds_the_cluster(
    connect: Any, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    """With "atoll,cpu", JAX creates its client "cpu" `after` the lookup is answered."""
    running, patched = getattr(xla_bridge, name), lookup(name)
    here = xla_bridge.get_backend("cpu")
    method = getattr(type(here), name)

    def start(platform: str) -> Any:
        monkeypatch.setattr(xla_bridge, "get_backend", get_backend)
        client = connect("cpu")
        monkeypatch.setattr(xla_bridge, name, patched)
        if after:
            del xla_bridge._backends["cpu"]
        cpu_devices.answer_running_lookup()
        xla_bridge._backends["cpu"] = here
        assert getattr(here, name)() == method(here)  # calls of other functions do not change
        assert client is xla_bridge.get_backend()
        return here

    get_backend = xla_bridge.get_backend
    monkeypatch.setattr(xla_bridge, "get_backend", start)
    assert running("cpu") == patched("cpu") == ([xla_bridge.get_backend()] * 2 if name == "devices" else 2)
    assert getattr(type(here), name) is method


def test_cpu_is_the_script_beside_other_platforms(connect: Any) -> None:
    connect("cuda")
    assert lookup("devices")("cpu") == jax.local_devices(backend="cpu")


def test_cpu_is_the_script_if_the_setting_says_so(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_CPU_DEVICES", "script")
    connect("cpu")
    assert lookup("devices")("cpu") == jax.local_devices(backend="cpu")


def test_cpu_is_the_script_if_atoll_is_not_the_default(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("cpu")
    monkeypatch.setattr(xla_bridge, "_default_backend", xla_bridge._backends["cpu"])
    xla_bridge.get_backend.cache_clear()
    assert lookup("devices")("cpu") == jax.local_devices(backend="cpu") == lookup("devices")()


def test_cpu_is_the_script_if_the_platform_name_is_cpu(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connect("cpu")
    monkeypatch.setattr(xla_bridge, "_PLATFORM_NAME", SimpleNamespace(value="cpu"))
    assert lookup("devices")("cpu") == lookup("devices")() == jax.local_devices(backend="cpu")
