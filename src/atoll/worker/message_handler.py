"""The worker's handling of the controller's messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atoll.cluster.processes.bugs import start_in
from atoll.devices.device import DeviceBackend
from atoll.errors import Status, status_of
from atoll.host_services.profiles.profile_recorder import ProfileRecorder
from atoll.peers.data_port import DataPort
from atoll.protocol import messages as m
from atoll.worker.executor_thread import Units
from atoll.worker.host_functions import HostFunctions
from atoll.worker.host_worlds import HostWorlds
from atoll.worker.query_answers import QueryAnswers
from atoll.worker.spill_store import SpillStore

_log = logging.getLogger(__name__)

# Messages that only the plan executor handles.
_EXECUTED = frozenset(
    (
        *(m.Run, m.Dispatch, m.DropRun, m.CollectiveEnded, m.RevokeRuns, m.SetRunLimit),
        *(m.Free, m.RegisterPlan, m.DropPlan, m.SpillRequest, m.ReportStores, m.ShareBuffers),
    )
)


class MessageHandler:
    """Handles messages in order, on one thread.

    Args:
        execute: Queues messages for the plan executor.
        renew: Renews the worker's lease for a number of seconds, at each Ping.
        units: The units of the plan executor.
        now: The host's clock, in nanoseconds.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        *,
        functions: HostFunctions,
        data_port: DataPort,
        execute: Callable[[Any], None],
        renew: Callable[[float], None],
        units: Units,
        report: Callable[..., None],
        recorder: ProfileRecorder,
        spill_store: SpillStore,
        host: int,
        now: Callable[[], int] = time.monotonic_ns,
        worlds: HostWorlds | None = None,
    ) -> None:
        self._now = now
        self._host = host
        self._worlds = worlds
        self._backend = backend
        self._recorder = recorder
        self._spill_store = spill_store
        self._functions = functions
        self._data_port = data_port
        self._execute = execute
        self._renew = renew
        self._units = units
        self._report = report
        self._query_answers = QueryAnswers(backend, functions)
        self._answers = ThreadPoolExecutor(2, "atoll-answer")

    def handle(self, message: Any) -> bool:
        """Handle one message without blocking. Return False if it was the last."""
        if type(message) in _EXECUTED:  # nearly all messages
            self._execute(message)
            return True
        match message:
            case m.FreeMany(frees):
                for each in frees:
                    self._execute(each)
            case m.OpenStore():
                self._execute(message)
                self._functions.open(message.session, message.tenant, message.python)
                self._data_port.open_session(message.session, message.secret)
            case m.CloseStore():
                self._execute(message)
                self._data_port.close_session(message.session)
                self._functions.close(message.session)
                self._recorder.close(message.session)
                self._spill_store.close_session(message.session)
            case m.SendSpilled():
                self._spill_store.send(message)
            case m.DropSpilled():
                self._spill_store.drop(message)
            case m.KeepFiles():
                self._spill_store.remove_unlisted(message)
            case m.FailFeeds(session=session, feeds=feeds, status=status):
                for first, count in feeds:
                    self._data_port.inbox.fail(session, first, count, status)
            case m.StopRun(text=text, function=function) if function:
                self._functions.python.end_process(function, text)
            case m.StopRun(sequence=sequence, text=text):
                for unit, devices in self._units.of_gang(sequence):
                    self._backend.stop(unit, text, devices)
            case m.Ping(lease=lease, seconds=seconds, compiles=compiles):
                self._renew(lease)
                self._units.report_completed()
                for failed in self._units.failed_on_devices():
                    self._report(m.DeviceFailed(*failed))
                stages = self._functions.stages_of(compiles)
                self._report(m.Pong(seconds, self._now(), self._units.running(), stages))
            case m.DropFeed(session=session, feed=feed):
                self._data_port.inbox.drop(session, feed)
            case m.Compile():
                self._functions.compile(message)
            case m.JoinWorld() if self._worlds is not None:
                self._worlds.join(message)
            case m.LoadInWorld():
                self._functions.placer.load_in_world(message)
            case m.CloseWorld(status=status, ended=ended):
                self._units.end(ended, status)
                self._functions.close_world(message)
                self._execute(message)
            case m.DropFunction(function=function):
                if self._functions.session_of(function):  # blocked runs of the session may still need it
                    self._execute(message)
                else:
                    self._functions.drop(function)
            case m.StopCompiling(function=function):
                self._functions.stop_compiling(function)
            case m.WorkerQuery(session=session, query=query, what=m.QueryKind.PROFILE, payload=payload):
                self._recorder.submit(
                    session, payload, lambda status: self._report(m.WorkerAnswer(session, query, status, b""))
                )
            case m.WorkerQuery():
                start_in(self._answers, self._answer, message)
            case m.Peers(hosts=hosts, lease=lease):
                secrets = {host: secret for host, _, secret in hosts}
                addresses = tuple((host, address) for host, address, _ in hosts)
                self._data_port.set_peers(addresses, secrets.get(self._host, ""), frozenset(secrets.values()), lease)
            case m.Stop():
                self._spill_store.finish()
                return False
            case m.Refused(status=status):
                _log.error("the controller refused this worker: %s", status)
                return False
        return True

    def _answer(self, query: m.WorkerQuery) -> None:
        try:
            payload = self._query_answers.answer(query)
            self._report(m.WorkerAnswer(query.session, query.query, Status(), payload))
        except Exception as error:
            self._report(m.WorkerAnswer(query.session, query.query, status_of(error), b""))
