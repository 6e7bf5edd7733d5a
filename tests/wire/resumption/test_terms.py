"""Tests of which of several processes, each with its own term, continues a connection."""

from __future__ import annotations

import asyncio

import msgspec

from atoll.wire.connection import Connection
from atoll.wire.resumption.accepted_link import CONTROLLERS, Acceptor
from atoll.wire.resumption.link_messages import Resume
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.resumable_connections import AcceptedConnection
from atoll.wire.resumption.retransmit_buffer import Counts
from tests.wire.resumption.network import Dialer, Listener, Network, Note, play, until


def state_of(listener: Listener) -> LinkRecord:
    """Return the state of a connection that another process would know."""
    assert isinstance(listener.connection, AcceptedConnection)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(listener.connection.record()), type=LinkRecord)


def successor(state: LinkRecord, term: int) -> Listener:
    listener = Listener(term=term - 1)
    listener.restore(state)
    listener.table.begin(term)
    return listener


def test_who_learns_of_a_later_term_says_so_and_serves_nobody_of_it():
    async def main() -> None:
        first, network = Listener(), Network([])
        dialer = await Dialer.open(network, first, "/standby")
        await until(lambda: dialer.connection.can_resume)
        standby = successor(state_of(first), 7)
        network.others = {"/there": Listener(), "/standby": standby}
        network.others["/there"].accept = first.refuse  # type: ignore[method-assign]
        network.cut(network.ends[0])
        await until(lambda: standby.events == ["back"])
        assert first.superseded == []
        # The first is there again, and for a moment the standby is not reached.
        network.others = {"/there": first, "/standby": network.others["/there"]}
        network.cut(network.ends[0])
        await until(lambda: first.superseded == [7])
        network.others["/standby"] = standby
        await until(lambda: standby.events == ["back", "away", "back"])
        dialer.connection.close()
        first.connection.close()

    play(main)


def test_a_later_term_is_not_believed_of_who_knows_no_secret():
    async def main() -> None:
        listener, network = Listener(), Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        transport = Connection(Note, listener.messages.append, listener.lost)
        listener.table.resume(transport, Resume(1, "0" * 64, 9, 0, 0, 1))
        assert listener.superseded == []
        dialer.connection.close()

    play(main)


def test_what_an_unseen_process_went_on_to_send_is_not_taken_for_what_its_successor_sent():
    async def main() -> None:
        first, network = Listener(), Network([])
        dialer = await Dialer.open(network, first)
        await until(lambda: dialer.connection.can_resume)
        second = successor(state_of(first), 2)
        first.connection.send(Note(1))  # the second knows nothing of it,
        second.connection.send(Note(2))  # and sends something else in its place
        await until(lambda: dialer.messages == [Note(1)])
        network.listener = second
        network.cut(network.ends[0])
        await until(lambda: bool(dialer.lost))
        assert "messages of term 1 that were not known when term 2 began" in dialer.lost[0]
        assert "may have acted on them" in dialer.lost[0]
        assert dialer.messages == [Note(1)]
        first.connection.close()

    play(main)


def test_each_term_s_beginning_is_kept_until_the_peer_is_back():
    async def main() -> None:
        first, network = Listener(), Network([])
        dialer = await Dialer.open(network, first)
        await until(lambda: dialer.connection.can_resume)
        second = successor(state_of(first), 2)
        second.connection.send(Note(1))
        third = successor(state_of(second), 3)
        assert state_of(third).term_history == [(2, Counts(0, 0)), (3, Counts(1, 0))]
        network.listener = third
        network.cut(network.ends[0])
        await until(lambda: dialer.messages == [Note(1)])
        assert state_of(third).term_history == []
        assert not dialer.lost
        dialer.connection.close()
        for each in (first, second):
            each.connection.close()

    play(main)


def test_a_process_that_leaves_has_its_peer_wait_for_the_next_for_longer():
    async def main() -> None:
        first, network = Listener(seconds=0.05), Network([])
        dialer = await Dialer.open(network, first)
        await until(lambda: dialer.connection.can_resume)
        network.can_dial = False
        first.connection.send(Note(1))
        state = state_of(first)
        assert isinstance(first.connection, AcceptedConnection)
        first.connection.detach(60.0)
        assert first.table.all() == []
        await until(lambda: dialer.connection.is_away)
        dialer.connection.send(Note(2))
        await asyncio.sleep(0.2)  # several times what was granted first
        assert not dialer.lost
        second = successor(state, 2)
        network.listener, network.can_dial = second, True
        await until(lambda: second.messages == [Note(2)])
        assert dialer.messages == [Note(1)]
        # From here on it waits no longer than others do.
        token = dialer.connection.link.token
        assert token is not None
        assert (token.term, token.seconds) == (2, 5.0)
        dialer.connection.close()

    play(main)


def test_only_a_controller_of_the_same_cluster_gets_the_term_that_serves():
    acceptor = Acceptor(1000, 5.0, b"a key")
    right = Resume(CONTROLLERS, acceptor.secret(CONTROLLERS), 1, 0, 0, 1)
    answer = acceptor.answer_to_controller(right)
    assert answer is not None
    assert answer.term == 1000
    for other in (
        msgspec.structs.replace(right, secret=acceptor.secret(1)),
        msgspec.structs.replace(right, number=1, secret=acceptor.secret(1)),
    ):
        assert acceptor.answer_to_controller(other) is None
