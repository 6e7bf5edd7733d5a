"""A session that publishes arrays, for tests that list events and the messages that follow."""

from __future__ import annotations

from typing import Any

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.ir.program import Mapping, Rearrange, single
from atoll.protocol import messages as m
from tests.controller.play import Play, on, runs

TRAINER = TenantSettings("trainer", token_hash("trainer"), publish=("policy*",))
READER = TenantSettings("reader", token_hash("reader"), subscribe=("trainer/policy*",))
EVE = TenantSettings("eve", token_hash("eve"))


class Trainer(Play):
    """A trainer's session on island 0. It has array 10 and publishes views of it, with handles from 100."""

    def __init__(self, topology: str = "2x1x2", **settings: Any) -> None:
        super().__init__(topology, token="cluster", tenants=(TRAINER, READER, EVE), **settings)
        self.session = self.open(token="trainer").number
        self.array(10)
        view = Rearrange((0,), (on(0),), (Mapping(0, 0, (0, 1, 1), (0, 1, 1)),))
        self.view_program = single("publish", (on(0),), view)
        self.send(m.RegisterProgram(5, self.view_program))
        self.views = 100
        self.requests = 0

    def request(self) -> int:
        self.requests += 1
        return self.requests

    def view(self) -> tuple[int, int]:
        """Launch a view. Return its handle and the sequence number of its run."""
        self.views += 1
        (run,) = runs(self.send(m.Launch(5, (10,), (self.views,), ())))
        return self.views, run.sequence

    def publish(self, name: str = "policy", keep: int = 2) -> tuple[int, int]:
        """Publish array 10. Return the number of the version, and the sequence number of the view's run."""
        view, sequence = self.view()
        (reply,) = self.send(m.Publish(self.request(), name, keep, (view,), ("w",)))
        assert reply.status.ok, reply.status
        return reply.version, sequence

    def complete(self, name: str = "policy", keep: int = 2) -> int:
        version, sequence = self.publish(name, keep)
        self.done(sequence)
        return version

    def answers(self, session: int, message: Any) -> list[Any]:
        """Return the messages that the session receives because of a message."""
        self.flush()
        self.proxy(session, message)
        return [each for (kind, number), each in self.sent() if (kind, number) == ("session", session)]

    def opened(self, session: int, name: str = "trainer/policy", number: int = -1, **options: Any) -> m.VersionOpened:
        (reply,) = self.answers(session, m.OpenVersion(self.request(), name, number, **options))
        assert isinstance(reply, m.VersionOpened)
        return reply

    def keep_busy(self, host: int, device: int) -> list[int]:
        """Fill the window of an island with runs of a session of eve that do not end. Return their sequence numbers."""
        before, self.session = self.session, self.open(token="eve").number
        self.with_put(1, device)
        started: list[int] = []
        for handle in range(1, 100):
            self.report(host, m.FeedsArrived(self.session, (handle,)))
            run = runs(self.send(m.Launch(1, (), (handle,), (handle,))))
            if not run:
                break
            started.append(run[0].sequence)
        self.session = before
        return started

    @property
    def vault(self) -> Any:
        return self.controller.sessions[self.controller.vaults.by_tenant["trainer"]]
