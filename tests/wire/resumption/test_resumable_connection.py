"""Connections over several sockets in a row: what arrives, wherever a socket is cut, and how they end."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.wire.framing import PIECE_BYTES, encode
from atoll.wire.resumption.link import LinkLimits
from atoll.wire.resumption.link_messages import ResumeToken
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.resumable_connections import AcceptedConnection
from tests.thoroughness import examples
from tests.wire.resumption.network import Dialer, Listener, Network, Note, pass_unnoticed, play, until

LARGE = b"x" * (PIECE_BYTES + 1)


def send(connection: Any, number: int, *, large: bool) -> None:
    if large:
        connection.send_in_pieces(encode(Note(number, LARGE)))
    else:
        connection.send(Note(number))


def small_and_large(messages: list[Any]) -> tuple[list[int], list[int]]:
    notes = [each for each in messages if isinstance(each, Note)]
    return [each.number for each in notes if not each.content], [each.number for each in notes if each.content]


def has_come(got: list[Any], sent: list[Any]) -> bool:
    return len(got) >= len(sent)


# The sender of each message, the turn of the loop, and whether it is sent in pieces.
SENDS = st.lists(st.tuples(st.sampled_from("dl"), st.integers(0, 3), st.integers(0, 9)), max_size=60)


@given(SENDS, st.lists(st.integers(0, 400), max_size=12), st.integers(40, 5000))
@settings(max_examples=examples(60), deadline=None)
def test_wherever_sockets_are_cut_each_message_arrives_once_and_in_order(sends, cuts, part):
    limits = LinkLimits(acknowledge_messages=5, first_pause=0.0, max_pause=0.0)

    async def main() -> None:
        network = Network([], part)
        listener = Listener(limits=limits)
        dialer = await Dialer.open(network, listener, limits=limits)
        await until(lambda: dialer.connection.can_resume)
        network.cut_after(cuts)
        sent: dict[str, list[tuple[int, bool]]] = {"d": [], "l": []}
        for number, (who, turns, kind) in enumerate(sends):
            for _ in range(turns):
                await asyncio.sleep(0)
            send(dialer.connection if who == "d" else listener.connection, number, large=kind == 0)
            sent[who].append((number, kind == 0))
        for who, got in (("d", listener.messages), ("l", dialer.messages)):
            expected = [[number for number, large in sent[who] if large is kind] for kind in (False, True)]
            await until(partial(has_come, got, sent[who]))
            assert list(small_and_large(got)) == expected
            numbers = [each.number for each in got]
            for large in expected[1]:
                before = {number for number in expected[0] if number < large}
                assert before <= set(numbers[: numbers.index(large)]), "it overtakes nothing"
        assert dialer.lost == []
        network.cut_after([])
        await until(lambda: not dialer.connection.is_away)
        dialer.connection.close()
        await until(lambda: listener.events[-1:] == ["the worker closed the connection"])
        assert set(listener.events[:-1]) <= {"away", "back"}

    play(main)


def test_what_is_acknowledged_is_not_kept():
    async def main() -> None:
        listener = Listener(limits=LinkLimits(acknowledge_messages=20))
        dialer = await Dialer.open(Network([]), listener)
        for number in range(200):
            dialer.connection.send(Note(number))
            await asyncio.sleep(0)
        await until(lambda: len(listener.messages) == 200)
        await until(lambda: len(dialer.connection.link.buffer.whole) < 20)
        listener.connection.acknowledge()
        await until(lambda: not dialer.connection.link.buffer.whole)
        dialer.connection.close()

    play(main)


def test_where_it_is_not_granted_nothing_is_kept_and_a_lost_socket_is_a_lost_connection():
    async def main() -> None:
        listener = Listener(grants=False)
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: hasattr(listener, "connection"))
        listener.connection.send(Note(1))
        await until(lambda: dialer.messages == [Note(1)])
        dialer.connection.send(Note(2))
        assert not dialer.connection.link.buffer.whole
        await until(lambda: listener.messages == [Note(2)])
        network.cut(network.ends[0])
        assert dialer.lost == ["the controller closed the connection"]
        assert listener.events == ["the worker closed the connection"]

    play(main)


def test_a_dialer_that_is_put_off_is_admitted_at_any_of_its_addresses():
    async def main() -> None:
        network = Network([])
        listener, other = Listener(), Listener()
        listener.puts_off, other.puts_off = 1000, 2
        network.others["/b"] = other
        dialer = await Dialer.open(network, listener, "/b", patience=5.0)
        dialer.connection.send(Note(1))
        await until(lambda: dialer.connection.can_resume)
        assert dialer.connection.address.path == "/b"
        await until(lambda: other.messages == [Note(1)])
        network.cut(network.ends[0])
        dialer.connection.send(Note(2))
        await until(lambda: other.messages == [Note(1), Note(2)])
        assert dialer.lost == []
        dialer.connection.close()

    play(main)


def test_a_dialer_that_nobody_admits_in_time_is_lost_with_the_reason():
    async def main() -> None:
        network, listener = Network([]), Listener()
        listener.puts_off = 1000
        dialer = await Dialer.open(network, listener, patience=3.0)
        began = asyncio.get_running_loop().time()
        await until(lambda: dialer.lost)
        assert dialer.lost == ["the controller at unix:/there admits nobody now: not now"]
        assert 3.0 <= asyncio.get_running_loop().time() - began < 4.0

    play(main)


def test_a_peer_that_does_not_come_back_in_time_is_lost():
    async def main() -> None:
        listener = Listener(seconds=0.05)
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        network.can_dial = False
        network.cut(network.ends[0])
        await until(lambda: bool(dialer.lost) and len(listener.events) == 2)
        assert listener.events[0] == "away"
        assert "did not reconnect within 0 s" in listener.events[1]
        assert "reconnecting failed for 0 s: nobody listens there" in dialer.lost[0]

    play(main)


def test_a_peer_that_came_back_while_the_process_was_stopped_is_not_lost():
    async def main() -> None:
        listener = Listener(seconds=5.0)
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        carry, loop = network.carry, asyncio.get_running_loop()

        def carry_late(end: Any, data: bytes, turns: int = 20) -> None:
            loop.call_soon(carry_late, end, data, turns - 1) if turns else carry(end, data)

        network.carry = carry_late  # type: ignore[method-assign]
        network.cut(network.ends[0])
        while network.transports < 2:
            await asyncio.sleep(0)
        assert listener.events == ["away"]
        pass_unnoticed(8.0)
        await until(lambda: len(listener.events) == 2)
        assert listener.events == ["away", "back"]
        assert not dialer.lost

    play(main)


def test_a_connection_that_the_other_end_has_given_up_is_refused():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        network.can_dial = False
        network.cut(network.ends[0])
        listener.connection.close()
        network.can_dial = True
        await until(lambda: bool(dialer.lost))
        assert "it is unknown here or has ended" in dialer.lost[0]

    play(main)


def test_who_knows_a_number_and_no_secret_gets_nothing():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        intruder = await Dialer.open(network, Listener())
        await until(lambda: intruder.connection.can_resume)
        intruder.connection.link.receive(ResumeToken(1, "0" * 64, 1, 5.0))
        network.listener = listener
        intruder.connection.drop("the test")
        await until(lambda: bool(intruder.lost))
        assert "it is unknown here" in intruder.lost[0]
        assert listener.refusals == ["its connection is not resumed: it is unknown here or has ended"]
        assert not listener.events
        assert not dialer.lost

    play(main)


def test_who_has_seen_a_later_term_obeys_no_earlier_one():
    async def main() -> None:
        listener = Listener(seconds=0.3, term=4)
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        dialer.connection.link.receive(ResumeToken(1, listener.table.secret(1), 5, 0.3))
        network.cut(network.ends[0])
        await until(lambda: bool(dialer.lost))
        assert "does not resume the connection: this is term 4, and term 5 has begun" in dialer.lost[0]
        assert listener.events[0] == "away"
        assert "back" not in listener.events

    play(main)


def test_another_process_goes_on_with_the_state_of_the_first():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener)
        dialer.connection.send(Note(1))
        await until(lambda: listener.messages == [Note(1)])
        network.can_dial = False
        network.cut(network.ends[0])
        listener.connection.send(Note(2))
        dialer.connection.send(Note(3))
        assert isinstance(listener.connection, AcceptedConnection)
        state: LinkRecord = msgspec.msgpack.decode(
            msgspec.msgpack.encode(listener.connection.record()), type=LinkRecord
        )

        second = Listener(term=2)
        second.restore(state)
        second.connection.wait("it was started again")
        network.listener, network.can_dial = second, True
        await until(lambda: dialer.messages == [Note(2)] and second.messages == [Note(3)])
        assert second.events == ["back"]
        assert not dialer.lost
        dialer.connection.close()
        listener.connection.close()

    play(main)


def test_of_several_addresses_the_one_of_the_latest_term_is_resumed_at():
    async def main() -> None:
        first = Listener()
        network = Network([])
        dialer = await Dialer.open(network, first, "/standby")
        await until(lambda: dialer.connection.can_resume)
        assert isinstance(first.connection, AcceptedConnection)
        standby = Listener(term=2)
        standby.restore(first.connection.record())
        network.others = {"/there": Listener(), "/standby": standby}
        network.others["/there"].accept = first.refuse  # type: ignore[method-assign]
        network.cut(network.ends[0])
        await until(lambda: standby.events == ["back"])
        # The first is there again, and thinks that it is the one.
        network.others["/there"] = first
        network.cut(network.ends[0])
        await until(lambda: standby.events[-2:] == ["away", "back"] and len(standby.events) == 3)
        assert first.events == ["away"]
        assert not dialer.lost
        dialer.connection.close()
        first.connection.close()

    play(main)


def test_a_message_that_is_sent_when_the_connection_is_back_follows_those_before():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener, on_back=lambda: dialer.connection.send(Note(2)))
        await until(lambda: dialer.connection.can_resume)
        network.cut(network.ends[0])
        dialer.connection.send(Note(1))
        await until(lambda: len(listener.messages) == 2)
        assert listener.messages == [Note(1), Note(2)]
        dialer.connection.close()

    play(main)


@pytest.mark.parametrize("can_dial", [True, False])
def test_a_connection_that_confirms_its_end_returns_if_it_is_away(can_dial):
    """Otherwise the session of a client that ends while its controller restarts would last until the grace is over."""

    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener, confirms_close=True)
        await until(lambda: dialer.connection.can_resume)
        network.can_dial = False
        network.cut(network.ends[0])
        dialer.connection.close()
        assert not dialer.connection.is_closed
        network.can_dial = can_dial
        await until(lambda: dialer.connection.is_closed)
        if can_dial:
            assert listener.events[-1] == "the worker closed the connection"
        assert dialer.lost == []

    play(main)


def test_a_peer_that_confirms_its_end_is_not_logged_as_refused():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener, confirms_close=True)
        await until(lambda: dialer.connection.can_resume)
        dialer.connection.close()
        await until(lambda: dialer.connection.is_closed)
        assert (network.transports, listener.events) == (2, ["the worker closed the connection"])
        assert listener.refusals == []

    play(main)


def test_what_waits_for_a_peer_is_bounded():
    async def main() -> None:
        listener = Listener(limits=LinkLimits(retained=1000))
        network = Network([])
        dialer = await Dialer.open(network, listener)
        await until(lambda: dialer.connection.can_resume)
        network.can_dial = False
        network.cut(network.ends[0])
        for number in itertools.count():
            if listener.events[-1] != "away":
                break
            listener.connection.send(Note(number, b"x" * 100))
            await asyncio.sleep(0)
        assert "has not acknowledged" in listener.events[-1]
        assert number < 15
        dialer.connection.close()

    play(main)


def test_a_leg_that_is_silent_is_given_up_for_another():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener, limits=LinkLimits(silent_seconds=1))
        await until(lambda: network.transports >= 2)
        await until(lambda: listener.events[:2] == ["away", "back"])
        dialer.connection.close()

    play(main)


def test_silence_is_said_before_the_leg_is_lost_and_so_is_its_end():
    async def main() -> None:
        listener = Listener()
        network = Network([])
        dialer = await Dialer.open(network, listener, limits=LinkLimits(quiet_seconds=1))
        await until(lambda: dialer.silences == [True])
        listener.connection.send(Note(1))
        await until(lambda: dialer.silences == [True, False])
        assert network.transports == 1
        dialer.connection.close()

    play(main)
