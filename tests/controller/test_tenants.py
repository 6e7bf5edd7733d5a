"""Tests of tenants: the owners of sessions, the permissions of users, and quotas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.cluster.sandbox.grants import PythonRules, View
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces
from atoll.cluster.settings import OnOff
from atoll.cluster.slice_requests import SliceRequest
from atoll.cluster.tenant_settings import TenantRole, TenantSettings, token_hash
from atoll.errors import Code, Status
from atoll.ir.program import Call, single
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from tests.controller.play import Cluster, Play, on, ready, runs

ALICE = TenantSettings("alice", token_hash("alice"), share=2.0)
BOB = TenantSettings("bob", token_hash("bob"))
ROOT = TenantSettings("root", token_hash("root"), role=TenantRole.OPERATOR)


def shared(topology: str = "1x1x2", **changes: Any) -> Play:
    """Return a cluster with tenants, and a session of `default`. `changes` are settings of bob."""
    settings = {name: changes.pop(name) for name in ("device_memory", "joint_islands") if name in changes}
    tenants = (ALICE, msgspec.structs.replace(BOB, **changes), ROOT)
    return Play(topology, token="cluster", tenants=tenants, **settings)


def status(play: Play, token: str) -> dict[str, Any]:
    (reply,) = play.ask(play.connect("operator", token=token), m.StatusRequest())
    return dict(msgspec.json.decode(reply.content))


def refusal(play: Play, connection: int, message: Any) -> Code:
    (reply,) = play.ask(connection, message)
    assert isinstance(reply, m.OperationReply)
    return Code(reply.status.code)


# ---- owners


def test_a_session_is_that_of_the_tenant_whose_token_it_brings():
    play = shared()
    assert play.controller.sessions[play.session].tenant.name == "default"
    assert [play.open(token=token).tenant.name for token in ("alice", "bob", "alice")] == ["alice", "bob", "alice"]
    assert {each["name"]: each["open_sessions"] for each in status(play, "root")["tenants"]} == {
        "default": 1, "alice": 2, "bob": 1, "root": 0,
    }  # fmt: skip


@pytest.mark.parametrize("token", ["", "nobody", token_hash("alice")])
@pytest.mark.parametrize("role", ["proxy", "operator", "worker", "engine"])
def test_nobody_gets_in_without_a_token(token, role):
    play = shared()
    play.flush()
    connection = play.connect(role, token=token)
    (refused, *_) = [each.message for each in play.flush() if isinstance(each, a.Send)]
    assert refused.status.code == Code.UNAUTHENTICATED
    assert connection in {each.connection for each in play.closed}


@pytest.mark.parametrize("token", ["alice", "root"])
@pytest.mark.parametrize("role", ["worker", "engine"])
def test_a_tenants_token_joins_no_worker_and_is_no_engine(token, role):
    play = shared()
    connection = play.connect(role, token=token)
    assert connection in {each.connection for each in [*play.flush(), *play.closed] if isinstance(each, a.Close)}


# ---- permissions of a user


def test_a_user_sees_its_own_and_an_operator_all():
    play = shared()
    alice, bob = play.open(token="alice"), play.open(token="bob")
    assert [each["id"] for each in status(play, "alice")["sessions"]] == [alice.number]
    assert [each["name"] for each in status(play, "alice")["tenants"]] == ["alice"]
    assert {each["id"] for each in status(play, "root")["sessions"]} == {play.session, alice.number, bob.number}
    assert "token_hash" not in str(status(play, "root"))


def test_a_user_ends_its_own_session_and_no_other():
    play = shared()
    alice, bob = play.open(token="alice").number, play.open(token="bob").number
    connection = play.connect("operator", token="alice")
    assert refusal(play, connection, m.EndSessionRequest(bob)) == Code.NOT_FOUND
    assert refusal(play, connection, m.EndSessionRequest(alice)) == Code.OK
    for ask in (m.RemapRequest(bob, 1, 0), m.SuspendRequest(bob), m.ResumeRequest(bob)):
        assert refusal(play, connection, ask) == Code.NOT_FOUND
    assert set(play.controller.sessions) == {play.session, bob}


def test_a_user_suspends_and_resumes_its_own_session():
    play = shared()
    alice = play.open(token="alice").number
    connection = play.connect("operator", token="alice")
    assert play.ask(connection, m.SuspendRequest(alice)) == []
    play.proxy(alice, m.Quiesced(1))
    assert play.controller.sessions[alice].suspension_text == "being suspended"
    play.flush()
    assert play.controller.sessions[alice].suspension_text == "suspended in memory"
    assert refusal(play, connection, m.ResumeRequest(alice)) == Code.OK


def test_an_operator_changes_tenants_while_they_run():
    play = shared()
    bob, root = play.open(token="bob"), play.connect("operator", token="root")
    assert refusal(play, root, m.SetTenant("bob", share=8.0, limits={"sessions": 1})) == Code.OK
    assert (bob.tenant.settings.share, bob.tenant.settings.sessions) == (8.0, 1)
    event = play.controller.history.events()[-1]
    assert event.text == "tenant bob: share 8, priority 0, user, 1 session"
    assert event.actor.startswith("tenant root, process ")
    assert refusal(play, root, m.SetTenant("bob", share=-1.0)) == Code.INVALID_ARGUMENT
    assert refusal(play, root, m.SetTenant("bob", limits={"share": 1})) == Code.INVALID_ARGUMENT
    assert refusal(play, root, m.SetTenant("carol", share=1.0)) == Code.NOT_FOUND
    assert refusal(play, root, m.SetTenant("carol", True, token_hash("carol"))) == Code.OK
    carol = play.open(token="carol")
    assert carol.tenant.name == "carol"
    assert refusal(play, root, m.RemoveTenant("carol")) == Code.OK
    assert carol.number not in play.controller.sessions
    assert refusal(play, root, m.SetTenant("default", role="user")) == Code.INVALID_ARGUMENT


def test_a_new_token_replaces_the_former_one_and_open_sessions_continue() -> None:
    play = shared()
    bob, root = play.open(token="bob"), play.connect("operator", token="root")
    assert refusal(play, root, m.SetTenant("bob", token_hash=token_hash("bob's new one"))) == Code.OK
    assert play.controller.history.events()[-1].text == "tenant bob: share 1, priority 0, user, new token"
    assert bob.number in play.controller.sessions
    assert play.open(token="bob's new one").tenant is bob.tenant
    play.flush()
    former = play.connect("operator", token="bob")
    assert former in {each.connection for each in [*play.flush(), *play.closed] if isinstance(each, a.Close)}


def test_the_token_of_default_cannot_be_changed() -> None:
    play = shared()
    root = play.connect("operator", token="root")
    assert refusal(play, root, m.SetTenant("default", token_hash=token_hash("another"))) == Code.INVALID_ARGUMENT


def test_an_operator_changes_what_a_tenant_may_publish_and_read() -> None:
    play = shared()
    bob, root = play.open(token="bob"), play.connect("operator", token="root")
    assert refusal(play, root, m.SetTenant("bob", publish=("policy*", "b"), subscribe=("alice/*",))) == Code.OK
    settings = bob.tenant.settings
    assert (settings.publish, settings.subscribe) == (("policy*", "b"), ("alice/*",))
    event = play.controller.history.events()[-1]
    assert event.text == "tenant bob: share 1, priority 0, user, publish policy* b, subscribe alice/*"
    assert refusal(play, root, m.SetTenant("bob", subscribe=())) == Code.OK
    assert (bob.tenant.settings.publish, bob.tenant.settings.subscribe) == (("policy*", "b"), ())


@pytest.mark.parametrize(
    ("publish", "subscribe"),
    [
        (("alice/policy",), None),
        (("",), None),
        (("policy\n",), None),
        (("p" * 129,), None),
        (("policy",) * 257, None),
        (None, ("policy",)),
        (None, ("alice/",)),
        (None, ("/policy",)),
        (None, ("alice/[a]",)),
    ],
)
def test_an_invalid_pattern_changes_nothing(publish: Any, subscribe: Any) -> None:
    play = shared()
    bob, root = play.open(token="bob"), play.connect("operator", token="root")
    before = bob.tenant.settings
    assert refusal(play, root, m.SetTenant("bob", publish=publish, subscribe=subscribe)) == Code.INVALID_ARGUMENT
    assert bob.tenant.settings == before


def tenant(name: str, **grants: Any) -> TenantSettings:
    return TenantSettings(name, token_hash(name), **grants)


def rules_of(play: Play, session: int) -> PythonRules:
    """Return a session's rules for Python, which its hosts received when it opened."""
    stores = [each.message for each in play.actions if isinstance(each, a.Send) and type(each.message) is m.OpenStore]
    (rules,) = {each.python for each in stores if each.session == session}
    return rules


def test_python_of_a_tenant_sees_what_the_tenant_and_the_cluster_are_granted():
    tenants = (tenant("alice", read=("/data", "/both"), write=("/checkpoints",)), tenant("bob"))
    play = Play(
        token="cluster", tenants=tenants, python_read=("/shared",), python_write=("/both",), python_network=OnOff.OFF
    )
    alice, bob = play.open(token="alice"), play.open(token="bob")
    play.flush()
    assert rules_of(play, alice.number) == PythonRules(
        View.GRANTED, ("/shared", "/data"), ("/both", "/checkpoints"), network=False
    )
    assert rules_of(play, bob.number) == PythonRules(View.GRANTED, ("/shared",), ("/both",), network=False)


def test_without_tenants_python_keeps_the_view_of_the_user():
    play = Play(python_read=("/shared",))
    play.flush()
    assert rules_of(play, play.session) == PythonRules()


def test_a_host_that_cannot_confine_python_of_tenants_is_refused():
    open_host = Mechanisms(missing={"namespaces": "the kernel has none"})
    for mechanisms, insecure, is_refused in (
        (open_host, False, True),
        (open_host, True, False),
        (Mechanisms(landlock=1), False, False),
        (Mechanisms(Namespaces.BY_USER), False, False),
    ):
        cluster = Cluster("1x1x1", token="cluster", tenants=(tenant("alice"),), insecure_sandbox=insecure)
        connection = cluster.connect("worker")
        worker = msgspec.structs.replace(ready(cluster.topology, 0, "unix:/x"), sandbox=mechanisms)
        cluster.receive(connection, worker)
        sent = [each.message for each in cluster.flush() if isinstance(each, a.Send) and each.connection == connection]
        refusals = [each.status.message for each in sent if isinstance(each, m.Refused)]
        assert bool(refusals) is is_refused
        assert all("the kernel has none" in each and "--insecure-sandbox" in each for each in refusals)


def test_a_cluster_without_tenants_has_none_to_change():
    play = Play()
    assert refusal(play, play.connect("operator"), m.SetTenant("default", share=2.0)) == Code.FAILED_PRECONDITION


def test_why_an_island_was_lost_has_no_name_of_somebody_elses():
    play = shared("1x2x1")
    play.session = play.open(token="alice").number
    bob = play.open(token="bob")
    play.with_function(1, (0, 1))
    play.send(m.RegisterProgram(1, single("secret_plan", (), Call(1, (), (on(0, 1),), (0, 1)))))
    (run, _) = runs(play.send(m.Launch(1, (), (11,), ())))
    play.report(0, m.Failed(run.sequence, Status(Code.INTERNAL, "division by zero in secret.py")))
    for now in range(100, 107):
        play.tick(float(now))
    (restart,) = [each for each in play.outbox() if isinstance(each, m.RestartIsland)]
    assert "secret_plan failed: division by zero in secret.py" in restart.reason, "the engine's log has it"
    assert "where a gang failed" in bob.unacknowledged_failures[0][0].message
    assert "secret" not in str(status(play, "bob"))
    for token in ("alice", "root"):
        hangs, lost = status(play, token)["events"][-2:]
        assert (hangs["kind"], hangs["tenant"], "secret_plan" in hangs["text"]) == ("hangs", "alice", True)
        assert (lost["kind"], lost["island"]) == ("failed", 0)


def test_tenants_share_no_function():
    play = shared()
    names = set()
    for token in ("alice", "bob", "alice"):
        play.session = play.open(token=token).number
        names.add(play.with_function())
    assert len(names) == 2


# ---- exclusive devices


def test_an_exclusive_slice_is_on_devices_that_nobody_has_and_nobody_gets_them():
    play = Play("1x1x4")
    play.with_function(devices=(0,))  # this session has a function on device 0
    other = play.open().number
    play.outbox()

    def added(session: int, request: int, wanted: SliceRequest) -> m.SliceAdded:
        play.proxy(session, m.AddSlice(request, wanted))
        (answer,) = [message for message in play.outbox() if isinstance(message, m.SliceAdded)]
        return answer

    refused = added(other, 1, SliceRequest(4, exclusive=True)).status.message
    assert "other sessions use its devices" in refused
    assert refused.endswith("Omit exclusive=True, or wait until the other sessions have ended")
    mine = added(other, 2, SliceRequest(2, exclusive=True))
    assert mine.status.code == Code.OK
    taken = {play.controller.sessions[other].devices.locations[device] for device in mine.devices}
    assert not any(location.ordinal == 0 for location in taken)
    # Requests of existing sessions for these devices are refused, and new sessions do not see them.
    play.proxy(play.session, m.RegisterFunction(9, "content", 909, ((min(each.ordinal for each in taken),),)))
    (not_ready,) = [message for message in play.outbox() if isinstance(message, m.FunctionReady)]
    assert f"of session {other}, which uses it exclusively" in not_ready.status.message
    assert len(play.open().devices.virtual) == 2
    play.outbox()
    assert added(play.session, 3, SliceRequest(3)).status.code == Code.RESOURCE_EXHAUSTED
    play.proxy(other, m.ReleaseSlice(mine.slice))
    assert added(play.session, 4, SliceRequest(3)).status.code == Code.OK


def test_functions_over_islands_use_exclusive_devices_of_their_session_only():
    play = Play("2x1x2")
    owner = play.open().number
    play.outbox()
    for number in (1, 2):
        play.proxy(owner, m.AddSlice(number, SliceRequest(2, exclusive=True)))
    slices = [message for message in play.outbox() if isinstance(message, m.SliceAdded)]
    locations = play.controller.sessions[owner].devices.locations
    own = tuple(each.devices[0] for each in slices)
    assert sorted(locations[device].island for device in own) == [0, 1]
    play.proxy(owner, m.RegisterFunction(1, "content", 901, (own,)))
    assert not [message for message in play.outbox() if isinstance(message, m.FunctionReady)], "it is compiled"
    for devices in ((0, 2), (1, 3)):
        play.proxy(play.session, m.RegisterFunction(2, "content", 902, (devices,)))
        (refused,) = [message for message in play.outbox() if isinstance(message, m.FunctionReady)]
        assert f"of session {owner}, which uses it exclusively" in refused.status.message
