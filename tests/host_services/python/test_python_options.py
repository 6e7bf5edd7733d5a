"""Tests of the grants of a session's Python process, and of the cases in which a host refuses to start one."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cluster.sandbox.grants import PythonRules, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces
from atoll.errors import Code, StatusError
from atoll.host_services.python.program.stored_arrays import reading, writing
from atoll.host_services.python.python_options import PythonHost, python_options
from atoll.ir.types import Replicated, Sharding
from atoll.protocol.messages import python_messages as m

RULES = PythonRules(View.GRANTED, ("/data",), ("/checkpoints",))
CONFINED = Mechanisms(Namespaces.BY_USER)


def options(tmp_path: Path, rules: PythonRules, mechanisms: Mechanisms | None, hosts: int = 1) -> m.PythonOptions:
    host = PythonHost(0, 0, f"unix:{tmp_path}/c", f"unix:{tmp_path}/d", str(tmp_path), mechanisms=mechanisms)
    return python_options(host, 3, m.ClientSettings(), [(number, number) for number in range(hosts)], rules)[0]


def stored(location: str) -> m.StoredArray:
    return m.StoredArray(location, "a", (4,), Sharding((0,), Replicated()), "float32")


def test_it_is_granted_what_the_rules_say(tmp_path: Path) -> None:
    sandbox = options(tmp_path, RULES, CONFINED).sandbox
    assert (sandbox.view, sandbox.read, sandbox.write) == (View.GRANTED, ("/data",), ("/checkpoints",))
    assert sandbox.network


def test_only_processes_that_meet_at_a_socket_can_write_to_a_common_directory(tmp_path: Path) -> None:
    assert options(tmp_path, RULES, CONFINED).sandbox.shared == ""
    assert options(tmp_path, RULES, CONFINED, hosts=2).sandbox.shared == str(tmp_path / "python-3")


def test_a_host_without_mechanisms_refuses_python_of_tenants_unless_that_is_wanted(tmp_path: Path) -> None:
    nothing = Mechanisms(missing={"landlock": "it is switched off"})
    with pytest.raises(StatusError, match=r"it is switched off.*--insecure-sandbox") as raised:
        options(tmp_path, RULES, nothing)
    assert raised.value.status.code == Code.FAILED_PRECONDITION
    options(tmp_path, PythonRules(View.GRANTED, insecure=True), nothing)
    options(tmp_path, PythonRules(), nothing)


def test_an_island_of_several_hosts_needs_the_network(tmp_path: Path) -> None:
    rules = PythonRules(network=False)
    assert not options(tmp_path, rules, CONFINED).sandbox.network
    with pytest.raises(StatusError, match="--python-network on"):
        options(tmp_path, rules, CONFINED, hosts=2)


def test_arrays_are_stored_in_granted_directories_only(tmp_path: Path) -> None:
    sandbox = options(tmp_path, RULES, CONFINED).sandbox
    for location in ("/data", "/data/../etc", "file:///home/ben", "/checkpoints-of-ben"):
        with pytest.raises(StatusError, match=r"`write = \[\.\.\.\]` in the file of tenants") as raised:
            writing(m.WriteArrays("write", (stored(location),), 1.0), (0,), sandbox)
        assert raised.value.status.code == Code.PERMISSION_DENIED
    with pytest.raises(StatusError, match="--python-read DIR"):
        reading(m.ReadArrays("read", (stored("/home/ben"),), 1.0), (0,), sandbox)
    for location in ("/checkpoints/step-1", "gs://bucket/step-1"):
        writing(m.WriteArrays("write", (stored(location),), 1.0), (0,), sandbox)
        reading(m.ReadArrays("read", (stored(location),), 1.0), (0,), sandbox)
