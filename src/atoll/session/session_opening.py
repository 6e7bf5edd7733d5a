"""Opens a session over sockets: the control connection, the welcome, and a data channel to each host.

A session opens even if some hosts cannot be reached. Contents for such a host wait until the controller reports that
the host has restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from atoll._version import __version__
from atoll.cluster.named_runs import UNNAMED, NamedRun
from atoll.cluster.processes.leases import CLIENT_LEASES
from atoll.errors import AccessError, ConnectError, refusal
from atoll.protocol import messages as m
from atoll.retries import Retry
from atoll.security.access import identity_for, token_for
from atoll.security.roles import Role
from atoll.session.channels import Channels
from atoll.session.cluster_session import ClusterSession
from atoll.session.controller_lease import ControllerLease
from atoll.session.outgoing_messages import OutgoingMessages
from atoll.session.session_interfaces import DataChannels, OnBroken, OnFeed, OpenChannels, Unreached
from atoll.wire.address import Address
from atoll.wire.endpoints import connect
from atoll.wire.resumption.dialed_connection import DialedConnection, dial
from atoll.wire.tls.identity import Identity

_log = logging.getLogger(__name__)

_WELCOME_SECONDS = 60.0
_ANSWER_SECONDS = 5.0  # for a controller that has opened no session to answer another request
_ADMISSION_SECONDS = 60.0  # to try controllers that admit nobody now, for instance because they do not hold their lease
_RETRY_SECONDS = 0.02


class SessionOpener:
    """Opens sessions with one controller like `open_session`, with the credentials in the environment.

    If the controller uses TLS, the first session joins the cluster.
    """

    def __init__(
        self,
        controller: Address,
        label: str,
        pid: int,
        patience: float,
        first_handle: int = 1,
        platform: str = "",
        on_hosts_lost: Callable[[], None] = lambda: None,
        run: NamedRun = UNNAMED,
    ) -> None:
        self._controller = controller
        self._run = run
        self._label = label
        self._pid = pid
        self._patience = patience
        self._first_handle = first_handle
        self._platform = platform
        self._on_hosts_lost = on_hosts_lost
        self._identity: Identity | None = None
        self._joins = asyncio.Lock()

    async def open(self) -> ClusterSession:
        """Open a session. Raise AccessError, VersionError or ConnectError; messages say what the user can do."""
        controller, name = self._controller, f"the proxy of {self._label or self._pid}"
        async with self._joins:
            if self._identity is None:
                self._identity = await asyncio.to_thread(identity_for, controller, Role.CLIENT, name, self._patience)
        return await open_session(
            controller,
            token_for(controller, Role.CLIENT),
            self._label,
            self._pid,
            self._patience,
            self._first_handle,
            self._identity,
            self._platform,
            self._on_hosts_lost,
            self._run,
        )


class _StillStartingError(Exception):
    """The controller or all workers cannot be reached yet, because of `cause`."""

    def __init__(self, cause: ConnectError) -> None:
        super().__init__(str(cause))
        self.cause = cause


async def open_session(
    controller: Address,
    token: str,
    label: str,
    pid: int,
    patience: float,
    first_handle: int = 1,
    identity: Identity | None = None,
    platform: str = "",
    on_hosts_lost: Callable[[], None] = lambda: None,
    run: NamedRun = UNNAMED,
    welcome_seconds: float = _WELCOME_SECONDS,
) -> ClusterSession:
    """Open a session with a controller that may still be starting. Try for `patience` seconds.

    If a controller answers that it admits nobody now, try for longer: a standby may take over, or the controller may
    acquire its lease again. A controller that is reached has `welcome_seconds` to open the session.

    `identity` is for controllers and hosts that use TLS. `platform` selects the platform of the session's devices; ""
    stands for that of the cluster's first island. `run` has the name of the session, which waits
    until the name is free.

    Raise AccessError, VersionError or ConnectError; messages say what the user can do.
    """
    hello = m.Hello(
        m.PROTOCOL, "proxy", token, pid, __version__, label, platform=platform, resumes=True, run=run, redials=True
    )
    retry = Retry(_RETRY_SECONDS, patience=patience)
    try:
        return await retry.call_async(
            lambda: _Opening(controller, first_handle, identity, on_hosts_lost).run(hello, welcome_seconds),
            _StillStartingError,
        )
    except _StillStartingError as error:
        raise error.cause from None


class _Opening:
    """One attempt to open a session."""

    def __init__(
        self,
        controller: Address,
        first_handle: int,
        identity: Identity | None,
        on_hosts_lost: Callable[[], None],
    ) -> None:
        self._controller = controller
        self._on_hosts_lost = on_hosts_lost
        self._identity = identity
        self._first_handle = first_handle
        self._loop = asyncio.get_running_loop()
        self._connection: DialedConnection | None = None  # once it is dialed
        self._lease: ControllerLease | None = None  # of the opened session
        self._opened: ClusterSession | None = None
        self._session: asyncio.Future[ClusterSession] = self._loop.create_future()

    async def run(self, hello: m.Hello, welcome_seconds: float) -> ClusterSession:
        try:
            connection = self._connection = await dial(
                self._controller,
                m.ToProxy,
                self._handle,
                self._lost,
                name="the Atoll controller",
                patience=_ADMISSION_SECONDS,
                identity=self._identity,
                confirms_close=True,
                on_back=self._resumed,
            )
        except AccessError:
            raise
        except ConnectError as error:
            raise _StillStartingError(error) from None
        session: ClusterSession | None = None
        try:
            connection.send(hello)
            session = await self._welcomed(welcome_seconds + (hello.run.wait if hello.run.name else 0.0), hello)
            await self._connect_hosts(session)
        except BaseException:
            self._session.cancel()  # no one waits for it any more
            (session or connection).close()
            raise
        return session

    async def _welcomed(self, seconds: float, hello: m.Hello) -> ClusterSession:
        await asyncio.wait([self._session], timeout=seconds)
        if self._session.done():
            return self._session.result()
        put_off = self._connection and self._connection.put_off
        if put_off:
            raise ConnectError(put_off)
        text = f"the controller at {self._controller} opened no session within {seconds:.0f} s"
        answers = await self._answers_requests(hello)
        if self._session.done():  # meanwhile
            return self._session.result()
        if answers:
            raise ConnectError(f"{text}: not all of its workers have started (atoll status shows which)")
        raise ConnectError(
            f"{text}, and does not answer other requests: it was stopped, hangs, or its machine is overloaded. "
            "Look at that process; if it hangs, `kill -USR1 PID` writes the stacks of its threads to its log"
        )

    async def _answers_requests(self, hello: m.Hello) -> bool:
        """Return whether the controller answers the request of a command on another connection."""
        answer: asyncio.Future[None] = self._loop.create_future()

        def answered(message: m.ToOperator) -> None:
            if not answer.done():
                answer.set_result(None)

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                connection = await connect(
                    self._controller,
                    m.ToOperator,
                    answered,
                    lambda reason: None,
                    name="the Atoll controller",
                    timeout=_ANSWER_SECONDS,
                    identity=self._identity,
                )
                try:
                    connection.send(m.Hello(m.PROTOCOL, "operator", hello.token, hello.pid, __version__, hello.label))
                    connection.send(m.StatusRequest())
                    await answer
                finally:
                    connection.close()
        except (TimeoutError, ConnectError):
            return False
        return True

    async def _connect_hosts(self, session: ClusterSession) -> None:
        tried: asyncio.Future[Unreached] = self._loop.create_future()

        def connected(unreached: Unreached) -> None:
            if not tried.done():  # the future may have been cancelled
                tried.set_result(unreached)

        session.connect(connected)
        unreached = await tried
        if session.lost is not None:
            raise ConnectError(session.lost.message)
        for host, error in unreached.items():
            _log.warning("the session opens without host %d: %s", host, error)
        if unreached and len(unreached) == len(session.welcome.hosts):
            text = f"none of the cluster's hosts can be reached: {next(iter(unreached.values()))}"
            raise _StillStartingError(ConnectError(text))

    def _handle(self, message: Any) -> None:
        if self._opened is not None:  # the message arrived in the same read as the welcome
            self._opened.handle(message)
            return
        match message:
            case m.Welcome():
                connection = self._connection
                assert connection is not None
                lease = ControllerLease(self._loop, lambda reason: self._silent(connection, session, reason))
                self._lease = lease
                channels = self._open_channels(message, connection, lease)
                outgoing = OutgoingMessages(connection, self._loop.call_later)
                session = ClusterSession(
                    message,
                    outgoing,
                    channels,
                    self._loop.create_future,
                    self._first_handle,
                    on_hosts_lost=self._on_hosts_lost,
                    lease=lease,
                )
                self._opened = session
                connection.set_handlers(session.handle, session.connection_lost)
                lease.renew(CLIENT_LEASES * message.lease)  # until the first ping, which may never arrive
                self._answer(session)
            case m.Late(text=text):
                _log.warning("%s", text)
            case m.Refused(status=status):
                self._answer(refusal(status))
            case m.Closing(status=status):
                self._answer(ConnectError(status.message))

    def _resumed(self) -> None:
        if self._lease is not None:
            self._lease.resumed()

    def _silent(self, connection: DialedConnection, session: ClusterSession, reason: str) -> None:
        if not connection.can_resume:  # otherwise the connection waits for the time granted by the controller
            session.connection_lost(reason)

    def _open_channels(self, welcome: m.Welcome, connection: DialedConnection, lease: ControllerLease) -> OpenChannels:
        def may_miss_losses() -> bool:
            return connection.can_resume and (connection.is_away or lease.may_miss_losses(connection.grace))

        def open_channels(on_feed: OnFeed, on_broken: OnBroken, awaits: Callable[[], bool]) -> DataChannels:
            return Channels(
                self._loop,
                welcome.session,
                welcome.secret,
                self._controller,
                on_feed=on_feed,
                on_broken=lambda status: on_broken(lease.explain(status)),
                awaits=awaits,
                identity=self._identity,
                lease=welcome.lease,
                may_miss_losses=may_miss_losses,
            )

        return open_channels

    def _lost(self, reason: str) -> None:
        put_off = self._connection and self._connection.put_off
        self._answer(ConnectError(reason if put_off else f"the Atoll controller is gone: {reason}"))

    def _answer(self, outcome: ClusterSession | ConnectError) -> None:
        if self._session.done():
            return
        if isinstance(outcome, ClusterSession):
            self._session.set_result(outcome)
        else:
            self._session.set_exception(outcome)
