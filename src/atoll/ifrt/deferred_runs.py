"""Runs that start when one of their results is used.

A subscriber receives small arrays in packs, and a run makes the arrays of each pack. Until it starts, the cluster has
the pack only. So arrays that the script drops, or passes on as a pack, cost neither the controller nor a host anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.executables.program_executables import DeferringExecutable
from atoll.executables.session_arrays import ArrayRecord, Arrays, Memory, Origin
from atoll.session.cluster_session import ClusterSession

# One of so many credits of a session's launch window can be reserved for runs. A further run starts the oldest.
WINDOW_SHARE = 4


class DeferredRun:
    """A run that has not started.

    Attributes:
      argument: its handle. The cluster keeps the array for the run, also if the client drops it.
      results: the handles of all results.
      record: of those results that the client has not dropped.
    """

    def __init__(
        self, runs: DeferredRuns, executable: DeferringExecutable, argument: int, results: Sequence[int], context: int
    ) -> None:
        self.executable = executable
        self.argument = argument
        self.results = results
        self.context = context
        origin = Origin(context, len(results)) if context else None
        self.record = ArrayRecord(executable.outputs[0], Memory(), origin, deferred=self)
        self.is_argument_dropped = False
        self.left = len(results)  # that the client has not dropped
        self._runs = runs

    def start(self) -> None:
        self._runs.start(self)

    def dropped(self, handles: Sequence[int]) -> list[int]:
        """Note that the client has dropped some of its arrays. Return the handles that the cluster can release."""
        if self.argument in handles:
            self.is_argument_dropped = True
        self.left -= sum(handle != self.argument for handle in handles)
        return [] if self.left else self._runs.end(self)


class DeferredRuns:
    """The runs of a session that have not started.

    A request may start all of them, so each has reserved a credit of the launch window. `launch` launches a program of
    the session, and `on_added` is called after a reservation.
    """

    def __init__(
        self, cluster: ClusterSession, arrays: Arrays, launch: Callable[..., None], on_added: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._arrays = arrays
        self._launch = launch
        self._on_added = on_added
        self._runs: dict[DeferredRun, None] = {}  # in the order in which the client has requested them
        self._programs: dict[DeferringExecutable, int] = {}  # the registered programs of executables

    def add(self, executable: DeferringExecutable, argument: int, results: Sequence[int], context: int) -> None:
        """Define the results of a run that starts later. The argument is not the argument of another one."""
        run = DeferredRun(self, executable, argument, results, context)
        self._arrays.records.update(dict.fromkeys(results, run.record))
        self._arrays.records[argument].deferred = run
        self._runs[run] = None
        window = self._cluster.window
        window.reserve(1)
        if len(self._runs) > window.size // WINDOW_SHARE:
            self.start(next(iter(self._runs)))
        else:
            self._on_added()

    def start(self, run: DeferredRun) -> None:
        """Launch a run. The client has some of its results."""
        records, record = self._arrays.records, run.record
        alive = [records.get(handle) is record for handle in run.results]
        results = [
            handle if is_alive else self._cluster.mint() for handle, is_alive in zip(run.results, alive, strict=True)
        ]
        executable = run.executable
        program = self._programs.get(executable)
        if program is None:
            definition = executable.program(frozenset(), False, 0)
            program = self._programs[executable] = self._cluster.register_program(definition)
        released = self.end(run)
        self._launch(program, (run.argument,), results, traceback_id=run.context)
        for handle, is_alive, spec in zip(results, alive, executable.outputs, strict=True):
            if is_alive:
                records[handle] = ArrayRecord(spec, Memory(), record.origin)
            else:
                released.append(handle)
        if released:
            self._cluster.release(released)

    def end(self, run: DeferredRun) -> list[int]:
        """Forget a run. Return its argument if the client has dropped it."""
        del self._runs[run]
        self._cluster.window.reserve(-1)
        if run.is_argument_dropped:
            return [run.argument]
        self._arrays.records[run.argument].deferred = None
        return []

    def unload(self, executable: DeferringExecutable) -> None:
        """Start the runs of an executable, and release its program."""
        for run in [each for each in self._runs if each.executable is executable]:
            self.start(run)
        program = self._programs.pop(executable, None)
        if program is not None:
            self._cluster.release_program(program)

    def held(self) -> dict[int, bool]:
        """Return the handles of the client's arrays that the cluster has, and whether their request has failed.

        The cluster does not have the results of these runs, but their arguments.
        """
        held = {
            handle: each.error is not None
            for handle, each in self._arrays.records.items()
            if each.deferred is None or each is not each.deferred.record
        }
        return held | dict.fromkeys((run.argument for run in self._runs), False)
