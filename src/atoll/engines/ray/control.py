"""Starts and ends a cluster on Ray, from a command: its engine runs in an actor of its own, on a node of Ray's."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from atoll.engines.ray.actors import EngineActor, EngineBegun, EngineStart, Up
from atoll.engines.ray.agent_environment import engine_environment
from atoll.engines.ray.ray_connection import connect
from atoll.engines.start_engine import START_GRACE_SECONDS, check_settings
from atoll.errors import ClusterError
from atoll.security.join_token import JoinToken, read_join
from atoll.security.roles import Role

_ACTOR_SECONDS = 60.0  # for Ray to start an actor
_END_SECONDS = 15.0
_SPARES_CHILDREN = "RAY_kill_child_processes_on_worker_exit"  # a setting of Ray's, for each of its processes


def _actor_name(cluster: str) -> str:
    return f"atoll-{cluster}"


class RayCluster:
    """A cluster that is being started on Ray. `address` is where its controller is to be reached.

    `joins` are the strings by which others join it, by role; none where it listens without TLS. With `stays` it goes on
    when this process has ended; else it ends with it. Raises AtollError from the constructor.
    """

    def __init__(self, name: str, start: EngineStart, *, stays: bool) -> None:
        settings = start.settings
        check_settings(settings)
        self._seconds = settings.start_seconds + START_GRACE_SECONDS
        self._messages = ""
        self._actor: Any = None
        self._ray = connect(settings.ray_address)
        try:
            self._actor = self._make_actor(name, stays, start.journal if stays else "")
            answer = self._actor.start.remote(msgspec.json.encode(start), engine_environment())
            begun = EngineBegun(*self._get(answer, _ACTOR_SECONDS, "its engine's actor"))
            if begun.error:
                raise ClusterError(begun.error)
            self.address = begun.address
            self.joins: dict[Role, JoinToken] = {Role(role): read_join(text) for role, text in begun.joins.items()}
        except BaseException:
            self.end()
            raise

    def _make_actor(self, name: str, stays: bool, journal: str) -> Any:
        ray = self._ray
        # On the node to which this process is connected: its own machine, or Ray's head. Each node has a resource that
        # bears its address.
        node = ray.get_runtime_context().get_node_id()
        (address,) = (each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)
        here = {f"node:{address}": 0.001}
        options: dict[str, Any] = {
            "name": _actor_name(name),
            "lifetime": "detached" if stays else None,
            "num_cpus": 0,
            "max_concurrency": 4,  # it is asked to end while somebody waits for it to be up
            "resources": here,
        }
        if journal:
            # Ray starts the actor again where it is killed; and where Ray itself kills it, it is to spare the engine.
            options |= {"max_restarts": -1, "runtime_env": {"env_vars": {_SPARES_CHILDREN: "false"}}}
        try:
            return ray.remote(EngineActor).options(**options).remote(journal)
        except ValueError as error:
            if "already taken" not in str(error):
                raise
            raise ClusterError(
                f"there is a cluster named {name} on this Ray cluster: end it with `atoll down`, from another machine "
                "than its own with --ray-address; or give the new one another --name"
            ) from None

    def _get(self, reference: Any, seconds: float, what: str) -> Any:
        exceptions = self._ray.exceptions
        try:
            return self._ray.get(reference, timeout=seconds)
        except exceptions.GetTimeoutError:
            raise ClusterError(f"Ray has not started {what} within {seconds:.0f} s: see `ray status`") from None
        except exceptions.RayError as error:
            raise ClusterError(f"{what} has ended: {_last_line(error)}") from None

    def wait_until_up(self) -> None:
        """Returns once the cluster is up. Raises ClusterError where it does not start."""
        up = Up(*self._get(self._actor.up.remote(), self._seconds, "its engine"))
        self._messages = up.messages
        if up.error:
            raise ClusterError(up.error)

    def last_messages(self) -> str:
        """The last lines that its processes wrote, where it did not start."""
        return self._messages

    def leave(self) -> None:
        """Leaves it running."""
        self._ray.shutdown()

    def wait_for_end(self) -> None:
        """Blocks until it has ended."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.ended.remote())

    def end(self) -> None:
        """Ends it, with all that it has in Ray."""
        if self._actor is not None:
            _end(self._ray, self._actor)
        self._ray.shutdown()


def end_cluster(ray_address: str, name: str) -> bool:
    """Ends the cluster of that name, and returns when Ray has nothing of it; whether there was one.

    Raises ClusterError where there is no Ray cluster.
    """
    ray = connect(ray_address)
    try:
        _end(ray, ray.get_actor(_actor_name(name)))
    except ValueError:
        return False  # there is no such actor
    finally:
        ray.shutdown()
    return True


def _end(ray: Any, actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actor.end.remote(), timeout=_END_SECONDS)
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)


def _last_line(error: Exception) -> str:
    """Of an error of Ray's, which has the traceback of another process in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
