"""Tests that changed settings of a tenant also apply to launches that are already waiting."""

from __future__ import annotations

from atoll.protocol import messages as m
from tests.controller.play import runs
from tests.controller.test_crashes import launch
from tests.controller.test_tenants import shared


def test_a_reserve_serves_a_tenant_that_waits_already():
    play = shared("1x1x1")
    root = play.connect("operator", token="root")
    play.ask(root, m.SetTenant("alice", priority=1))
    alice, bob = play.open(token="alice"), play.open(token="bob")
    play.outbox()
    sent = launch(play, alice, 100)
    for handle in range(2000, 2100):
        play.proxy(alice.number, m.Launch(100, (), (handle,), ()))
    sent += runs(play.outbox())
    assert launch(play, bob, 200) == []
    play.ask(root, m.SetTenant("bob", limits={"reserve": 50}))
    for at in range(30):
        sent += runs(play.report(0, m.Done(((sent[at].sequence, 0, 1_000_000),))))
    assert bob.number in [each.session for each in sent]
