"""Start and end a cluster on Ray. Its engine runs in an actor on a node of Ray."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from atoll.engines.engine_options import EngineEnd
from atoll.engines.ray.actors import EngineActor, EngineBegun, EngineStart, Up, engine_environment
from atoll.engines.ray.ray_connection import connect
from atoll.engines.start_engine import START_GRACE_SECONDS, check_settings
from atoll.errors import ClusterError
from atoll.security.join_token import JoinToken, read_join
from atoll.security.roles import Role

_ACTOR_SECONDS = 60.0  # for Ray to start an actor
_END_SECONDS = 15.0
_SPARES_CHILDREN = "RAY_kill_child_processes_on_worker_exit"  # Ray's setting, per process


def _actor_name(cluster: str) -> str:
    return f"atoll-{cluster}"


class RayCluster:
    """A cluster that is started on Ray. `address` is the address of its controller.

    `joins` are its join tokens by role; empty without TLS. With `stays`, the cluster outlives this process; otherwise
    it ends with it. The constructor raises AtollError.
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
        # Use the node that this process is connected to: its own machine, or Ray's head. Each node has a resource with
        # its address as the name.
        node = ray.get_runtime_context().get_node_id()
        (address,) = (each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node)
        here = {f"node:{address}": 0.001}
        options: dict[str, Any] = {
            "name": _actor_name(name),
            "lifetime": "detached" if stays else None,
            "num_cpus": 0,
            "max_concurrency": 4,  # so `end` runs while `up` waits
            "resources": here,
        }
        if journal:
            # Ray restarts the actor if it is killed. If Ray itself kills the actor, Ray must not kill the engine.
            options |= {"max_restarts": -1, "runtime_env": {"env_vars": {_SPARES_CHILDREN: "false"}}}
        try:
            return ray.remote(EngineActor).options(**options).remote(journal)
        except ValueError as error:
            if "already taken" not in str(error):
                raise
            raise ClusterError(
                f"there is a cluster named {name} on this Ray cluster: end it with `atoll down` (with --ray-address "
                "from another machine), or give the new cluster another --name"
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
        """Return when the cluster is up. Raise ClusterError if it does not start."""
        up = Up(*self._get(self._actor.up.remote(), self._seconds, "its engine"))
        self._messages = up.messages
        if up.error:
            raise ClusterError(up.error)

    def last_messages(self) -> str:
        """Return the last lines that the processes of the cluster wrote if it did not start, else their warnings."""
        return self._messages

    def leave(self) -> None:
        """Disconnect from Ray, and leave the cluster running."""
        self._ray.shutdown()

    def wait_for_end(self) -> EngineEnd:
        """Block until the cluster has ended, and return why."""
        try:
            return EngineEnd(*self._ray.get(self._actor.ended.remote()))
        except self._ray.exceptions.RayError as error:
            return EngineEnd(f"the actor of its engine has ended: {_last_line(error)}", expected=False)

    def end(self) -> None:
        """End the cluster with everything that it has in Ray."""
        if self._actor is not None:
            _end(self._ray, self._actor)
        self._ray.shutdown()


def end_cluster(ray_address: str, name: str) -> bool:
    """End the cluster with this name. Return whether it existed.

    Raise ClusterError if there is no Ray cluster.
    """
    ray = connect(ray_address)
    try:
        _end(ray, ray.get_actor(_actor_name(name)))
    except ValueError:
        return False  # there is no such actor
    finally:
        ray.shutdown()
    return True


def has_ended(ray_address: str, name: str) -> bool:
    """Return whether Ray has no engine of a cluster with this name.

    Raise ClusterError if that is unknown, because there is no connection to Ray.
    """
    ray = connect(ray_address)
    try:
        ray.get_actor(_actor_name(name))
    except ValueError:
        return True
    finally:
        ray.shutdown()
    return False


def _end(ray: Any, actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(actor.end.remote(), timeout=_END_SECONDS)
    with contextlib.suppress(Exception):
        ray.kill(actor, no_restart=True)


def _last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which contains the traceback of another process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
