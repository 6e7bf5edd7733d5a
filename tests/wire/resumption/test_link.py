"""The state machines of both ends of a link, joined by a transport in memory that a test cuts at any byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import FrameError
from atoll.wire.address import Address
from atoll.wire.framing import HEADER_BYTES, PIECE_BYTES, FrameDecoder, PieceQueue, encode, piece_header
from atoll.wire.resumption.accepted_link import AcceptedLink, Acceptor
from atoll.wire.resumption.dialing_link import DialingLink
from atoll.wire.resumption.link import TRANSITIONS, Link, LinkEvent, LinkLimits, LinkState, Retransmission
from atoll.wire.resumption.link_messages import (
    Acknowledge,
    AlternateAddresses,
    AnyLinkMessage,
    Close,
    Resume,
    Resumed,
    ResumeRefused,
    ResumeToken,
    decode_link,
    encode_link,
)
from atoll.wire.resumption.link_record import LinkRecord
from atoll.wire.resumption.retransmit_buffer import Counts
from tests.thoroughness import examples

SECONDS = 5.0
LIMITS = LinkLimits(acknowledge_messages=3, acknowledge_bytes=4 * PIECE_BYTES, retained=40 * PIECE_BYTES)
LARGE = b"x" * (PIECE_BYTES + 1)


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    content: bytes = b""


class Transport:
    """The bytes in both directions. After `left` more delivered bytes, it is cut; -1: never."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.is_cut = False
        self.bytes: dict[str, bytearray] = {"dialer": bytearray(), "acceptor": bytearray()}  # by receiver


class End:
    """A driver of one link: its transport, what its user has received, and what the link reported."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.link = link
        self.messages: list[Note] = []
        self.events: list[LinkEvent] = []
        self.transport: Transport | None = None
        self.decoder = FrameDecoder(Note)
        self._pieces = PieceQueue()

    def attach(self, transport: Transport, decoder: FrameDecoder | None = None) -> None:
        self.transport = transport
        self._pieces = PieceQueue()
        self.decoder = decoder or FrameDecoder(Note, on_link=self._receive_link)

    def send(self, note: Note) -> None:
        frame = encode(note)
        if note.content:
            if self.link.send_in_pieces(frame):
                self._pieces.put(memoryview(frame)[HEADER_BYTES:])
        elif self.link.send(frame):
            self._write(frame)
        self.do_effects()

    def _write(self, data: bytes) -> None:
        assert self.transport is not None, "a link that writes has a transport"
        self.transport.bytes["acceptor" if self.name == "dialer" else "dialer"] += data

    def write_piece(self) -> bool:
        """As a connection does after all queued messages."""
        if self.transport is None or not self._pieces.nbytes:
            return False
        piece, is_last = self._pieces.take()
        self._write(piece_header(len(piece), is_last) + piece)
        return True

    def _receive_link(self, content: memoryview) -> None:
        self.link.receive(decode_link(content))
        self.do_effects()

    def feed(self, data: bytes) -> None:
        transport = self.transport
        try:
            for message in self.decoder.feed(memoryview(data)):
                if isinstance(self.link, DialingLink) and self.link.is_starting:
                    self.link.first_message()
                self.messages.append(message)
        except FrameError as error:
            self.link.lose(f"{self.name}: {error}")
        if self.transport is transport and self.link.read(len(data)):
            self.link.acknowledge()
        self.do_effects()

    def do_effects(self) -> None:
        for effect in self.link.take_effects():
            if isinstance(effect, LinkEvent):
                self.events.append(effect)
                if effect in (LinkEvent.AWAY, LinkEvent.FAILED, LinkEvent.LOST):
                    self.transport = None
            elif isinstance(effect, Retransmission):
                assert self.transport is not None
                if effect.in_pieces:
                    self._pieces.put(memoryview(effect.frame)[HEADER_BYTES:])
                else:
                    self._write(effect.frame)
            elif self.transport is not None:
                self._write(encode_link(effect))


class World:
    """A dialer and an acceptor. Each transport is cut after as many delivered bytes as the next of `cuts`."""

    def __init__(
        self, cuts: Sequence[int] = (), limits: LinkLimits = LIMITS, seconds: float = SECONDS, confirms: bool = False
    ) -> None:
        self.now = 0.0
        self.cuts = deque(cuts)
        self.limits = limits
        self.acceptor = Acceptor(1, seconds, b"a key")
        self.dialing = DialingLink("the acceptor", Address(path="/there"), None, limits, confirms)
        self.dialer = End("dialer", self.dialing)
        self.accepted = AcceptedLink(self.acceptor, LinkRecord(1, "", "the dialer"), limits)
        self.server = End("acceptor", self.accepted)
        transport = Transport(-1)
        self.dialer.attach(transport)
        self.server.attach(transport)
        self.dialing.open(self.dialer.decoder)
        self.accepted.grant(self.server.decoder)
        self.server.do_effects()
        self.deliver(1 << 20)
        assert self.dialing.state is LinkState.CONNECTED
        transport.left = self.cuts.popleft() if self.cuts else -1

    @property
    def ends(self) -> tuple[End, End]:
        return self.dialer, self.server

    def deliver(self, part: int) -> bool:
        """Deliver up to `part` bytes in each direction. Return False if nothing was on its way."""
        moved = False
        for end in self.ends:
            transport = end.transport
            if transport is None:
                continue
            if transport.is_cut:
                self.lose(end)
                moved = True
                continue
            if not transport.bytes[end.name]:
                moved |= end.write_piece()
                continue
            data = bytes(transport.bytes[end.name][:part])
            if 0 <= transport.left <= len(data):
                data, transport.is_cut = data[: transport.left], True
            transport.left -= len(data) if transport.left > 0 else 0
            del transport.bytes[end.name][: len(data)]
            moved = True
            if data:
                self.receive(end, data)
        return moved

    def receive(self, end: End, data: bytes) -> None:
        end.feed(data)

    def lose(self, end: End) -> None:
        end.transport = None
        end.link.disconnect(self.now, "the transport was cut")
        end.do_effects()

    def dial(self) -> bool:
        """Make the next transport, if the dialer wants one, and give its first message to the acceptor."""
        dial = self.dialing.next_dial(self.now)
        self.dialer.do_effects()
        if dial is None:
            return False
        self.now += dial.pause
        transport = Transport(self.cuts.popleft() if self.cuts else -1)
        self.dialer.attach(transport)
        self.dialing.resume(self.dialer.decoder)
        self.dialer.do_effects()
        resume = bytes(transport.bytes["acceptor"])
        if 0 <= transport.left < len(resume):  # cut before it arrived
            self.lose(self.dialer)
            return True
        transport.bytes["acceptor"].clear()
        transport.left -= len(resume) if transport.left > 0 else 0
        self.admit(decode_link(resume[HEADER_BYTES:]), transport)
        return True

    def admit(self, message: AnyLinkMessage, transport: Transport) -> None:
        """Resume or refuse, as the table of an accepting process does."""
        assert isinstance(message, Resume)
        refusal = self.acceptor.later_term(message) or self.acceptor.refusal(
            message, None if self.accepted.has_ended else self.accepted, ""
        )
        if refusal is not None:
            transport.bytes["dialer"] += encode_link(refusal)
            return
        if message.attempt <= self.accepted.attempt:
            transport.is_cut = True
            return
        decoder = FrameDecoder(Note, on_link=self.server._receive_link)
        self.accepted.resume(message, decoder)
        self.server.attach(transport, decoder)
        self.server.do_effects()

    def heartbeat(self) -> None:
        """Acknowledge, as the acceptor does once per second."""
        self.accepted.acknowledge()
        self.server.do_effects()

    def run(self, part: int, holds: Callable[[], bool]) -> None:
        """Deliver and dial until something holds. Fail if nothing moves anymore, which is a deadlock."""
        for _ in range(100_000):
            if holds():
                return
            if not self.deliver(part):
                has_dialed = self.dial()
                self.heartbeat()
                assert has_dialed or self.deliver(part) or holds(), "deadlock"
        raise AssertionError("the link still moves after 100,000 steps")


def numbers(messages: Sequence[Note], *, large: bool) -> list[int]:
    return [each.number for each in messages if bool(each.content) is large]


# Of each message: its end, whether it is large, and the number of deliveries before it.
SENDS = st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(0, 9), st.integers(0, 4)), max_size=40)
CUTS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 3 * PIECE_BYTES)), max_size=12)


@given(SENDS, CUTS, st.integers(1, 2000))
@settings(max_examples=examples(300, part=5), deadline=None)
def test_wherever_transports_are_cut_each_frame_arrives_once_and_in_order(sends, cuts, part):
    world = World(cuts)
    sent: list[list[Note]] = [[], []]
    for number, (index, kind, deliveries) in enumerate(sends):
        for _ in range(deliveries):
            if not world.deliver(part):
                world.dial()
        note = Note(number, LARGE if kind == 0 else b"")
        sent[index].append(note)
        world.ends[index].send(note)
        for end in world.ends:
            assert end.link.buffer.nbytes <= LIMITS.retained
    world.run(part, lambda: all(len(b.messages) == len(a) for a, b in zip(sent, reversed(world.ends), strict=True)))
    for notes, receiver in zip(sent, reversed(world.ends), strict=True):
        for large in (False, True):
            assert numbers(receiver.messages, large=large) == numbers(notes, large=large)
        for large_note in (each for each in notes if each.content):
            earlier = {each.number for each in notes if not each.content and each.number < large_note.number}
            before = receiver.messages[: receiver.messages.index(large_note)]
            assert earlier <= {each.number for each in before}, "a message in pieces overtakes nothing"
        assert LinkEvent.LOST not in receiver.events
    # With acknowledgements on both sides, nothing is kept anymore.
    world.cuts.clear()
    world.run(part, lambda: world.dialing.state is LinkState.CONNECTED is world.accepted.state)
    for end in world.ends:
        if end.transport is not None:
            end.transport.left = -1
    for _ in range(2):
        world.heartbeat()
        world.run(part, lambda: not any(end.transport and any(end.transport.bytes.values()) for end in world.ends))
    assert [end.link.buffer.nbytes for end in world.ends] == [0, 0]
    world.dialing.close()
    world.dialer.do_effects()
    world.run(part, lambda: world.accepted.has_ended)
    assert world.accepted.reason == "the dialer closed the connection"


def close_unread(world: World) -> None:
    """Close the link, and cut the transport before the acceptor has read that."""
    world.dialing.close()
    world.dialer.do_effects()
    for end in world.ends:
        world.lose(end)


def close_away(world: World) -> None:
    for end in world.ends:
        world.lose(end)
    world.dialing.close()


def close_resuming(world: World) -> None:
    for end in world.ends:
        world.lose(end)
    assert world.dial()
    world.dialing.close()


@pytest.mark.parametrize("close", [close_unread, close_away, close_resuming])
def test_a_link_that_confirms_its_end_has_ended_when_the_acceptor_knows_it(close):
    world = World(confirms=True)
    world.dialer.send(Note(1))
    close(world)
    world.dialer.do_effects()
    assert not world.dialing.has_ended
    world.run(1000, lambda: world.accepted.has_ended)
    assert world.accepted.reason == "the dialer closed the connection"
    assert numbers(world.server.messages, large=False) == [1]
    assert not world.dialing.has_ended
    world.lose(world.dialer)
    world.run(1000, lambda: world.dialing.has_ended)


def test_a_link_that_confirms_its_end_waits_for_the_grace_at_most():
    world = World(confirms=True)
    close_away(world)
    while (dial := world.dialing.next_dial(world.now)) is not None:
        world.now += 1.0 + dial.pause
        world.dialing.dial_failed("nobody listens there")
    assert world.dialing.has_ended
    assert world.now <= 2 * SECONDS


# ---- bounds


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_a_link_whose_peer_acknowledges_nothing_ends_at_the_limit(index, pieces):
    world = World(limits=LinkLimits(retained=1000))
    end = world.ends[index]
    if pieces:
        world.lose(end)
    for number in range(100):
        if end.link.has_ended:
            break
        assert end.link.buffer.nbytes <= 1000
        end.send(Note(number, b"x" * 100 if pieces else b""))
    else:
        world.accepted.fence()
        for number in range(1000):
            end.link.send(encode(Note(number)))
        end.do_effects()
    assert end.events[-1] is LinkEvent.LOST
    assert "has not acknowledged" in end.link.reason
    assert end.link.buffer.nbytes == 0
    assert not end.link.send(encode(Note(1))), "it sends nothing afterwards"


def test_a_link_acknowledges_after_a_number_of_messages_or_bytes():
    world = World()
    for number in range(2):
        world.dialer.send(Note(number))
    world.run(1000, lambda: len(world.server.messages) == 2)
    assert len(world.dialing.buffer.whole) == 2
    world.dialer.send(Note(2))
    world.run(1000, lambda: not world.dialing.buffer.whole)
    world.dialer.send(Note(3, LARGE * 5))
    world.dialer.send(Note(4))
    world.run(1000, lambda: not world.dialing.buffer.whole)


# ---- hostile peers


def connected() -> World:
    """A world in which each end has sent two frames, and the peer has acknowledged one of them."""
    world = World()
    for end in world.ends:
        end.send(Note(1))
    world.run(1000, lambda: all(end.messages for end in world.ends))
    world.heartbeat()
    world.run(1000, lambda: not any(end.link.buffer.whole for end in world.ends))
    for end in world.ends:
        end.link.send(encode(Note(2)))
    return world


TO_DIALER: list[AnyLinkMessage] = [
    Acknowledge(3, 0),
    Acknowledge(2, 1),
    Acknowledge(0, 0),
    Acknowledge(-1, 0),
    Resume(1, "", 1, 0, 0, 1),
    Resumed(1, 1, 0),
    ResumeRefused("no", final=True),
    ResumeToken(1, "", 0, 5.0),
]
TO_ACCEPTOR: list[AnyLinkMessage] = [
    *TO_DIALER[:4],
    ResumeToken(1, "", 1, 5.0),
    Resume(1, "", 1, 1, 0, 9),
    Resumed(1, 1, 0),
    ResumeRefused("no", final=True),
    AlternateAddresses(("unix:/evil",)),
]


@pytest.mark.parametrize(
    ("index", "message"), [(0, each) for each in TO_DIALER] + [(1, each) for each in TO_ACCEPTOR], ids=repr
)
def test_a_link_message_that_the_peer_must_not_send_is_an_error_and_changes_nothing(index, message):
    link = connected().ends[index].link
    before = link.state, link.buffer.acknowledged, list(link.buffer.whole), link.received
    with pytest.raises(FrameError):
        link.receive(message)
    assert (link.state, link.buffer.acknowledged, list(link.buffer.whole), link.received) == before
    assert link.effects == []


@pytest.mark.parametrize("message", [Acknowledge(0, 0), Close(), ResumeToken(1, "", 1, 5.0)], ids=repr)
def test_an_acceptor_must_confirm_a_new_transport_first(message):
    world = connected()
    world.lose(world.dialer)
    assert world.dialing.next_dial(0.0) is not None
    world.dialing.resume(FrameDecoder(Note))
    with pytest.raises(FrameError):
        world.dialing.receive(message)
    with pytest.raises(FrameError):
        world.dialing.first_message()
    assert world.dialing.state is LinkState.RESUMING


def resume_of(world: World, **changes: Any) -> Resume:
    """Lose the transport. Return the `Resume` of an honest dialer."""
    world.lose(world.dialer)
    assert world.dialing.next_dial(0.0) is not None
    world.dialing.resume(FrameDecoder(Note))
    (message,) = world.dialing.take_effects()
    assert isinstance(message, Resume)
    return msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"secret": "0" * 64}, "it is unknown here or has ended"),
        ({"secret": "\u00e9"}, "it is unknown here or has ended"),
        ({"number": 2}, "it is unknown here or has ended"),
        ({"number": -(1 << 63)}, "it is unknown here or has ended"),
        ({"term": 2}, "this is term 1, and term 2 has begun"),
        ({"secret": "0" * 64, "term": 2}, "it is unknown here or has ended"),
    ],
)
def test_a_foreign_token_or_a_term_from_the_future_is_refused(changes, reason):
    world = connected()
    message = resume_of(world, **changes)
    refusal = world.acceptor.later_term(message) or world.acceptor.refusal(message, world.accepted, "")
    assert refusal == ResumeRefused(reason, "term" not in changes or "secret" in changes)


def test_the_role_of_a_link_does_not_change():
    world = connected()
    message = resume_of(world)
    assert world.acceptor.refusal(message, world.accepted, "") is None
    assert world.acceptor.refusal(message, world.accepted, "proxy") == ResumeRefused("it belongs to a ", final=True)


@pytest.mark.parametrize("changes", [{"whole": 3}, {"whole": 0}, {"pieced": 1}, {"whole": -1}])
def test_a_dialer_that_states_impossible_counts_is_an_error_and_changes_nothing(changes):
    world = connected()
    message = resume_of(world, **changes)
    before = world.accepted.record(), world.accepted.state, world.accepted.attempt
    with pytest.raises(FrameError, match="the peer acknowledged"):
        world.accepted.resume(message, FrameDecoder(Note))
    assert (world.accepted.record(), world.accepted.state, world.accepted.attempt) == before


@pytest.mark.parametrize("counts", [Counts(3, 0), Counts(0, 0), Counts(2, 1)])
def test_a_dialer_ends_if_the_acceptor_states_impossible_counts(counts):
    world = connected()
    resume_of(world)
    world.dialing.receive(Resumed(1, *counts))
    assert world.dialing.take_effects() == [LinkEvent.LOST]
    assert "the peer acknowledged" in world.dialing.reason


def test_an_acceptor_of_an_earlier_term_is_an_error():
    world = connected()
    world.dialing.receive(ResumeToken(1, world.acceptor.secret(1), 7, SECONDS))
    resume_of(world)
    with pytest.raises(FrameError, match="this is term 1, and term 7 has begun"):
        world.dialing.receive(Resumed(1, 1, 0))


def test_a_token_after_the_first_message_is_an_error():
    link = DialingLink("the acceptor", Address(path="/there"))
    link.open(FrameDecoder(Note))
    assert link.send(b"a frame")
    link.first_message()
    assert (link.state, link.buffer.nbytes) == (LinkState.PLAIN, 0)
    assert link.send(b"a frame")
    assert link.buffer.nbytes == 0
    with pytest.raises(FrameError):
        link.receive(ResumeToken(1, "", 1, SECONDS))


@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(0, 1))
@settings(max_examples=examples(200), deadline=None)
def test_any_bytes_end_a_link_or_leave_it_in_a_state_that_works(noise, index):
    world = connected()
    end = world.ends[index]
    for data in noise:
        if not end.link.has_ended:
            end.feed(data)
    assert end.link.state in (LinkState.CONNECTED, LinkState.ENDED)
    assert end.link.buffer.nbytes == sum(map(len, end.link.buffer.whole))


# ---- time and addresses


def test_a_dialer_tries_all_addresses_in_rounds_until_its_time_is_over():
    link = DialingLink("the acceptor", Address(path="/a", others=(Address(path="/b"),)))
    link.open(FrameDecoder(Note))
    link.receive(ResumeToken(1, "", 1, 1.0))
    assert link.take_effects() == [LinkEvent.GRANTED]
    link.disconnect(10.0, "it was cut")
    assert link.take_effects() == [LinkEvent.AWAY]
    now, dials = 10.0, []
    while (dial := link.next_dial(now)) is not None:
        now += dial.pause
        dials.append((dial.address.path, dial.pause))
        link.dial_failed("nobody listens there")
    assert dials[:6] == [("/a", 0.0), ("/b", 0.0), ("/a", 0.02), ("/b", 0.0), ("/a", 0.04), ("/b", 0.0)]
    assert 11.0 < now <= 11.5
    assert link.take_effects() == [LinkEvent.LOST]
    assert link.reason == "it was cut; reconnecting failed for 1 s: nobody listens there"


def test_a_dialer_begins_with_the_address_that_answered_last():
    world = World()
    world.dialing.receive(AlternateAddresses(("unix:/elsewhere",)))
    world.lose(world.dialer)
    first = world.dialing.next_dial(0.0)
    assert first is not None
    assert first.address.path == "/there"
    second = world.dialing.next_dial(0.0)
    assert second is not None
    assert second.address.path == "/elsewhere"
    world.dialing.resume(FrameDecoder(Note))
    world.dialing.receive(ResumeRefused("wait", final=False))
    assert world.dialing.take_effects()[-1] is LinkEvent.FAILED
    again = world.dialing.next_dial(0.0)
    assert again is not None
    assert again.address.path == "/elsewhere"


def fall_silent(link: DialingLink, since: float) -> None:
    for second in range(link.limits.silent_seconds + 1):
        link.tick(since + second)
    assert link.take_effects()[-1] is LinkEvent.AWAY


def seconds_of_dials(link: DialingLink, rounds: int) -> list[dict[str, float]]:
    """Fail to dial all addresses for some rounds. Return how long each address of each round got."""
    found = []
    for _ in range(rounds):
        dials = [link.next_dial(0.0) for _ in range(3)]
        link.dial_failed("no answer")
        found.append({dial.address.path: dial.seconds for dial in dials if dial is not None})
    return found


def test_a_dialer_gives_addresses_that_fell_silent_less_time_at_first():
    link = DialingLink("the acceptor", Address(path="/a", others=(Address(path="/b"),)))
    link.open(FrameDecoder(Note))
    link.receive(ResumeToken(1, "", 1, 60.0))
    link.receive(AlternateAddresses(("unix:/standby",)))
    fall_silent(link, 0.0)
    limits = link.limits
    short, long = limits.silent_dial_seconds, limits.dial_seconds
    assert short < long
    found = seconds_of_dials(link, limits.short_rounds + 1)
    assert found[:-1] == [{"/a": short, "/b": short, "/standby": long}] * limits.short_rounds
    assert found[-1] == {"/a": long, "/b": long, "/standby": long}, "a network may be slow"

    link.resume(FrameDecoder(Note))
    link.receive(Resumed(1, 0, 0))
    link.disconnect(0.0, "it was cut")
    assert seconds_of_dials(link, 1) == [{"/a": long, "/b": long, "/standby": long}], "it was not silent"


def test_a_dialer_that_knows_only_addresses_that_fell_silent_gives_them_all_the_time():
    link = DialingLink("the acceptor", Address(path="/a"))
    link.open(FrameDecoder(Note))
    link.receive(ResumeToken(1, "", 1, 60.0))
    fall_silent(link, 0.0)
    dial = link.next_dial(0.0)
    assert dial is not None
    assert dial.seconds == link.limits.dial_seconds


def put_off(link: DialingLink) -> None:
    link.receive(ResumeRefused("it does not hold its lease", final=False))
    assert link.take_effects() == [LinkEvent.FAILED]


def test_a_dialer_that_is_put_off_sends_everything_again_until_an_acceptor_admits_it():
    link = DialingLink("the acceptor", Address(path="/a", others=(Address(path="/b"),)))
    link.open(FrameDecoder(Note), opens_by=60.0)
    link.send(b"hello")
    put_off(link)
    assert not link.send(b"more"), "it has no transport"
    for path in ("/a", "/b", "/a"):
        dial = link.next_dial(0.0)
        assert dial is not None
        assert dial.address.path == path
        link.resume(FrameDecoder(Note))
        assert [each.frame for each in link.take_effects()] == [b"hello", b"more"]  # type: ignore[union-attr]
        put_off(link)
    assert link.next_dial(0.0) is not None
    link.resume(FrameDecoder(Note))
    link.take_effects()
    link.receive(ResumeToken(1, "", 1, 1.0))
    assert (link.take_effects(), link.put_off, link.deadline) == ([LinkEvent.GRANTED], "", None)
    assert link.address.path == "/b"
    link.disconnect(10.0, "it was cut")
    dial = link.next_dial(10.0)
    assert dial is not None
    assert dial.address.path == "/b", "the address that answered last"


def test_a_dialer_that_is_put_off_ends_with_the_reasons_of_all_addresses_when_its_time_is_over():
    link = DialingLink("the acceptor", Address(path="/a", others=(Address(path="/b"),)))
    link.open(FrameDecoder(Note), opens_by=2.0)
    put_off(link)
    now = 0.0
    while (dial := link.next_dial(now)) is not None:
        now += dial.pause
        if dial.address.path == "/b":
            link.dial_failed("nobody listens there")
        else:
            link.resume(FrameDecoder(Note))
            link.receive(ResumeRefused("it does not hold its lease", final=False))
            link.take_effects()
    assert 2.0 < now <= 2.6
    assert link.take_effects() == [LinkEvent.LOST]
    assert link.reason == "the acceptor at unix:/a admits nobody now: it does not hold its lease; nobody listens there"


def test_a_dialer_that_is_put_off_without_time_tries_all_addresses_once():
    link = DialingLink("the acceptor", Address(path="/a", others=(Address(path="/b"),)))
    link.open(FrameDecoder(Note), opens_by=0.0)
    put_off(link)
    paths = []
    while (dial := link.next_dial(1.0)) is not None:
        paths.append(dial.address.path)
        link.resume(FrameDecoder(Note))
        link.disconnect(1.0, "it closed the connection")
    assert paths == ["/a", "/b"]
    assert link.has_ended


def test_a_refusal_of_a_first_message_that_is_final_or_late_is_an_error():
    link = DialingLink("the acceptor", Address(path="/a"))
    link.open(FrameDecoder(Note), opens_by=60.0)
    with pytest.raises(FrameError):
        link.receive(ResumeRefused("it has ended", final=True))
    link.receive(ResumeToken(1, "", 1, 1.0))
    with pytest.raises(FrameError):
        link.receive(ResumeRefused("wait", final=False))


def test_a_final_refusal_ends_a_dialer_and_names_the_address():
    world = connected()
    resume_of(world)
    world.dialing.receive(ResumeRefused("it is unknown here or has ended", final=True))
    assert world.dialing.take_effects() == [LinkEvent.LOST]
    assert world.dialing.refused_at == Address(path="/there")
    assert world.dialing.reason.endswith("does not resume the connection: it is unknown here or has ended")


def test_a_final_refusal_spares_a_link_that_may_be_away_for_long():
    world = connected()
    resume_of(world)
    world.dialing.receive(ResumeRefused("the cluster has ended", True, world.dialing.grace))
    assert world.dialing.take_effects() == [LinkEvent.FAILED]
    assert world.dialing.state is LinkState.AWAY
    resume_of(world)
    world.dialing.receive(ResumeRefused("the cluster has ended", True, world.dialing.grace + 1))
    assert world.dialing.take_effects() == [LinkEvent.LOST]


def test_silence_is_reported_before_the_transport_is_given_up_and_so_is_its_end():
    world = World(limits=LinkLimits(quiet_seconds=2, silent_seconds=4))
    seen: list[Any] = []
    for second in range(9):
        if second == 3:
            world.heartbeat()
            world.deliver(1000)
        world.dialing.tick(float(second))
        seen.append([each for each in world.dialing.take_effects() if isinstance(each, LinkEvent)])
    quiet, heard, away = [LinkEvent.QUIET], [LinkEvent.HEARD], [LinkEvent.AWAY]
    assert seen == [[], [], quiet, heard, [], quiet, [], away, []]
    assert world.dialing.reason == "the acceptor was silent for 4 s"


def test_an_acceptor_waits_for_its_peer_until_the_deadline():
    world = connected()
    world.now = 100.0
    world.lose(world.server)
    assert world.accepted.deadline == 100.0 + SECONDS
    world.accepted.expire(100.0 + SECONDS - 0.001)
    assert world.accepted.state is LinkState.AWAY
    world.accepted.expire(100.0 + SECONDS)
    assert world.accepted.take_effects() == [LinkEvent.LOST]
    assert world.accepted.reason == "the transport was cut, and it did not reconnect within 5 s"


def test_an_acceptor_does_not_wait_for_a_process_that_has_ended():
    world = connected()
    world.accepted.peer_ended()
    assert world.accepted.state is LinkState.CONNECTED, "what it sent before may still arrive"
    world.lose(world.server)
    assert world.server.events[-1] is LinkEvent.LOST
    away = connected()
    away.lose(away.server)
    away.accepted.peer_ended()
    assert away.accepted.take_effects() == [LinkEvent.LOST]


# ---- fences, and other processes


def test_a_link_that_is_closed_while_it_is_fenced_sends_its_last_messages_when_it_may():
    world = connected()
    world.accepted.fence()
    frame = encode(Note(3))
    assert not world.accepted.send(frame)
    world.accepted.acknowledge()
    world.accepted.close()
    assert world.accepted.state is LinkState.CLOSING
    assert world.accepted.take_effects() == [LinkEvent.FENCED]
    world.accepted.unfence()
    assert world.accepted.take_effects() == [Retransmission(frame, False), Close(), LinkEvent.CLOSED]


def test_a_link_that_is_closed_while_it_is_fenced_may_also_be_resumed_first():
    world = connected()
    world.accepted.fence()
    world.accepted.close()
    world.lose(world.server)
    assert world.accepted.state is LinkState.CLOSING
    world.accepted.resume(resume_of(world), FrameDecoder(Note))
    kinds = [each if isinstance(each, LinkEvent) else type(each) for each in world.accepted.take_effects()]
    assert kinds[:3] == [Resumed, ResumeToken, Retransmission]
    assert kinds[-2:] == [Close, LinkEvent.CLOSED]


def test_a_record_restores_a_link_in_another_process():
    world = connected()
    world.accepted.set_patience(60.0)
    content = msgspec.msgpack.encode(world.accepted.record())
    other = Acceptor(2, SECONDS, b"a key")
    link = AcceptedLink(other, msgspec.msgpack.decode(content, type=LinkRecord))
    assert link.record() == world.accepted.record()
    assert link.state is LinkState.RESTORED
    link.begin(2)
    link.count()
    link.wait(7.0, "it was restarted")
    assert (link.state, link.deadline) == (LinkState.AWAY, 7.0 + SECONDS)
    message = resume_of(world)
    assert other.refusal(message, link, "") is None
    link.resume(message, FrameDecoder(Note))
    effects = link.take_effects()
    assert effects[:2] == [Resumed(2, 2, 0), ResumeToken(1, other.secret(1), 2, 60.0)]
    assert effects[-1] is LinkEvent.BACK
    assert link.term_history == []


def test_a_link_that_is_being_restored_has_no_limit():
    link = AcceptedLink(Acceptor(1, SECONDS, b"a key"), LinkRecord(1, "", "x"), LinkLimits(retained=10))
    link.send(b"x" * 100)
    assert link.state is LinkState.RESTORED
    link.wait(0.0, "it was restarted")
    link.send(b"x")
    assert link.state is LinkState.ENDED


# ---- the table of transitions


def test_only_the_end_is_final_and_each_state_is_reached():
    assert {state for state, others in TRANSITIONS.items() if not others} == {LinkState.ENDED}
    reached = set().union(*TRANSITIONS.values())
    assert set(LinkState) - reached == {LinkState.RESTORED}, "a link begins in it"
    for state, others in TRANSITIONS.items():
        assert state not in others
        assert state is LinkState.ENDED or LinkState.ENDED in others
