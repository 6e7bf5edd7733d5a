"""Tests of permissions: each cell of the table in docs/reference/permissions.md, and many forbidden messages."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from atoll.errors import Code, StatusError
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.protocol.permissions import COMMANDS, PERMISSIONS, PeerKind, Scope, scope_of, table
from atoll.security.tokens import digest
from atoll.state.session import Session
from tests.controller.dumps import check_dump
from tests.controller.play import Play
from tests.controller.test_tenants import ALICE, BOB, ROOT
from tests.protocol.test_messages import sample_message

# Number of messages, in total for all peers.
MESSAGES = int(os.environ.get("ATOLL_TEST_MESSAGES", "4000"))
HOST = 1  # host of an unused island: peers that may act for the host may also lose it


class Roles(Play):
    """Cluster of two islands, with a session of bob on the first one.

    Each instance starts with the same events. The test with random messages dumps the controller at its end.
    """

    def __init__(self) -> None:
        super().__init__("2x1x1", token="cluster", dumps=False, tenants=(ALICE, BOB, ROOT))
        self.session = self.open(token="bob").number
        self.with_call()
        self.array(10)
        self.send(m.Launch(1, (10,), (11,), ()))

    # ---- peers: each method returns a connection

    def users_command(self) -> int:
        return self.connect("operator", token="alice")

    def operators_command(self) -> int:
        return self.connect("operator", token="root")

    def users_program(self) -> int:
        return self._program("alice")

    def operators_program(self) -> int:
        return self._program("root")

    def _program(self, token: str) -> int:
        return self.connection_of(self.open(token=token).number)

    def host(self) -> int:
        if HOST not in self.controller.connections.hosts:
            self.join(HOST, pid=2000 + self._next)
        return self._hosts[HOST]

    def host_that_joins(self) -> int:
        return self.connect("worker")

    def relay(self) -> int:
        return self.connect("relay", process=f"process {self._next}")

    def agent(self) -> int:
        return self.connect("agent", label="machine")

    def engine_itself(self) -> int:
        connection = self.controller.connections.engine
        return self.connect("engine") if connection is None else connection

    def stranger(self) -> int:
        number = self._next
        self._next += 1
        self.event(e.ConnectionOpened(self.now, number, f"secret of connection {number}"))
        return number

    # ---- reactions

    def says(self, connection: int, message: Any) -> tuple[str, list[a.AnyAction]]:
        """Return why a message was refused, or "", and the actions of the controller.

        Like the process around the core, treat a peer as lost if its message raises an error.
        """
        refusal = ""
        try:
            self.receive(connection, message)
        except StatusError as error:
            refusal = error.status.message
            self.event(e.ConnectionLost(self.now, connection, refusal))
        actions = self.flush()
        for action in actions:
            if isinstance(action, a.Close) and action.connection == connection:
                refusal = refusal or action.reason
            elif isinstance(action, a.Send) and action.connection == connection:
                found = action.message
                is_reply = isinstance(found, m.OperationReply) and is_forbidden(found.status.message)
                if is_reply or isinstance(found, m.Refused | m.Closing):
                    refusal = found.status.message
        return refusal, actions

    def cluster(self) -> Any:
        """Return the state that a peer without permission must not change: everything that belongs to others."""
        controller = self.controller
        session: Session = controller.sessions[self.session]
        return (
            controller.tenants.settings(),
            [(each.number, each.state) for each in controller.resources.islands.values() if each.number != HOST],
            [(handle, each.ready, each.released) for handle, each in session.directory.entries.items()],
            (list(session.programs), session.in_flight, session.credits, session.suspension_text),
            set(controller.sessions),
            controller.agents.report,
        )


Speaker = Callable[[Roles], int]
# The connections of each peer in the table, and the messages that each connection accepts.
COMMAND = set(get_args(m.FromOperator))
PROGRAM = set(get_args(m.FromProxy))
WORKER = {*get_args(m.FromWorker), *get_args(m.FromRelay)} - {m.WorkerReady}
SPEAKERS: dict[PeerKind, dict[Speaker, set[type[Any]]]] = {
    PeerKind.USER: {Roles.users_command: COMMAND, Roles.users_program: PROGRAM},
    PeerKind.OPERATOR: {Roles.operators_command: COMMAND, Roles.operators_program: PROGRAM},
    PeerKind.HOST: {
        Roles.host: WORKER,
        Roles.host_that_joins: {m.WorkerReady},
        Roles.relay: set(get_args(m.FromProcessRelay)),
        Roles.agent: {m.AgentSays},
    },
    PeerKind.ENGINE: {Roles.engine_itself: set(get_args(m.FromEngine))},
}
EACH = [(peer, speaker) for peer, speakers in SPEAKERS.items() for speaker in speakers]
# Messages that other peers may receive when the controller closes the connection of a forbidden sender.
AFTERMATH = m.CloseStore | m.HostsFailed | m.RestartIsland | m.Peers | m.Ping | m.AgentLost
REFUSED = ("does not send", "unexpected", "is a user of this cluster, and only its operators may do this")


def is_forbidden(refusal: str) -> bool:
    return any(text in refusal for text in REFUSED)


# ---- the table


@pytest.mark.parametrize("message", sorted(PERMISSIONS, key=lambda each: each.__name__))
@pytest.mark.parametrize("peer", PeerKind)
def test_the_controller_keeps_to_each_cell_of_the_table(peer, message):
    if message is m.Hello:
        return  # every connection starts with it; see the test below
    refusals = {}
    for speaker in SPEAKERS[peer]:
        play = Roles()
        connection = speaker(play)
        play.flush()
        sample = sample_message(message)
        if "island" in message.__struct_fields__:
            sample = msgspec.structs.replace(sample, island=HOST)
        refusals[speaker.__name__], _ = play.says(connection, sample)
    allowed = {name for name, refusal in refusals.items() if not is_forbidden(refusal)}
    assert bool(allowed) == (scope_of(peer, message) is not None), refusals
    takes = {speaker.__name__ for speaker, kinds in SPEAKERS[peer].items() if message in kinds}
    assert allowed <= takes, "only the expected connections accept it"


@pytest.mark.parametrize(("peer", "speaker"), EACH)
def test_everybody_says_hello_once(peer, speaker):
    assert scope_of(peer, m.Hello) is Scope.OWN
    play = Roles()
    connection = speaker(play)
    assert connection in play.controller.connections.peers
    refusal, _ = play.says(connection, m.Hello(m.PROTOCOL, "operator", digest("cluster"), 1, "test"))
    assert is_forbidden(refusal)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_table_has_each_command_as_what_it_asks(command):
    (line,) = [each for each in table().splitlines() if each.startswith(f"| `{command}` |")]
    (message,) = [each for each in table().splitlines() if each.startswith(f"| {COMMANDS[command].__name__} |")]
    assert line.split("|")[2:4] == message.split("|")[2:4]  # the columns of users and operators


OF_SESSIONS = [each for each in get_args(m.FromOperator) if "session" in each.__struct_fields__]


@pytest.mark.parametrize("message", OF_SESSIONS)
@pytest.mark.parametrize(
    ("peer", "speaker"), [(PeerKind.USER, "alice"), (PeerKind.USER, "bob"), (PeerKind.OPERATOR, "root")]
)
def test_its_own_is_no_more_than_that_and_all_is_all(peer, speaker, message):
    play = Roles()
    asked = msgspec.structs.replace(sample_message(message), session=play.session)
    replies = play.ask(play.connect("operator", token=speaker), asked)
    is_none = [each for each in replies if each.status.code == Code.NOT_FOUND and "(atoll status lists" in str(each)]
    scope = scope_of(peer, message)
    assert scope is (Scope.OWN if peer is PeerKind.USER else Scope.ALL)
    assert bool(is_none) == (speaker == "alice")


# ---- forbidden messages


def fuzzed(message: Any, rng: random.Random) -> Any:
    """Return the same message with random values, some of which name existing sessions, hosts, runs, islands or
    handles.
    """

    def other(value: Any) -> Any:
        if type(value) is int:
            return rng.choice((0, 1, 2, 3, 10, -1, 1 << 31, rng.getrandbits(62)))
        if type(value) is str:
            return rng.choice(("", "bob", "default", "\0", "x" * 1000))
        if type(value) is tuple:
            return tuple(other(each) for each in value) * rng.choice((0, 1, 3))
        return value

    return msgspec.structs.replace(
        message, **{name: other(getattr(message, name)) for name in message.__struct_fields__}
    )


@pytest.mark.parametrize(("peer", "speaker"), [*EACH, (None, Roles.stranger)])
def test_whatever_who_may_not_says_is_refused_and_does_nothing(peer, speaker):
    play, rng = Roles(), random.Random(speaker.__name__)
    takes = {m.Hello} if peer is None else {each for each in SPEAKERS[peer][speaker] if scope_of(peer, each)}
    wrong = [sample_message(each) for each in get_args(m.ToController) if each not in takes]
    before = play.cluster()
    connection = None
    for _ in range(MESSAGES // (len(EACH) + 1)):
        if connection not in play.controller.connections.peers:
            connection = speaker(play)
            play.flush()
        own = play.name_of(connection)
        refusal, actions = play.says(connection, fuzzed(rng.choice(wrong), rng))
        assert refusal
        for action in actions:
            assert not isinstance(action, a.End)
            if isinstance(action, a.Send) and action.connection != connection:
                assert isinstance(action.message, AFTERMATH), (own, action)
        if connection in play.controller.connections.peers:
            assert speaker in (Roles.users_command, Roles.operators_command), "connections of other peers are closed"
    if own[0] == "session":
        play.close(own[1])
    assert play.cluster() == before
    check_dump(play.controller)
