"""Test that a script whose proxy is killed gets a helpful error, and continues from its checkpoint in the
same process.
"""

from __future__ import annotations

import pytest

from tests.end_to_end.script_process import StartScript

# One call is in progress when the proxy is killed, and another one follows.
SCRIPT = """
import jax, jax.extend, jax.numpy as jnp, numpy as np
import os, psutil, sys, threading, time

class Errors:  # standard error, with an event that is set when the loss of the proxy is reported
    reported = threading.Event()

    def write(self, text):
        os.write(2, text.encode())
        self.reported.set()

    def flush(self):
        pass

sys.stderr = Errors()

@jax.jit
def update(weights, rows):
    return weights - 0.1 * jax.grad(lambda weights: jnp.mean(jnp.tanh(rows @ weights) ** 2))(weights)

def train(weights, steps):
    for step in steps:
        weights = update(weights, np.random.default_rng(step).normal(size=(4, 8)).astype(np.float32))
    return weights

def is_proxy(command):
    return "atoll.ifrt.proxy_main" in command and f'"client":{os.getpid()},' in command[-1]

def kill_proxy():
    (proxy,) = (each for each in psutil.process_iter(["cmdline"]) if is_proxy(each.info["cmdline"] or ()))
    Errors.reported.clear()
    proxy.kill()
    Errors.reported.wait()
    time.sleep(0.2)
    os.write(2, b"LOST\\n")

def refused(call):
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        return "IFRT proxy server was terminated" in str(error)

start = np.eye(8, dtype=np.float32)
undisturbed = np.asarray(train(start, range(20)))
for _ in range(int(os.environ["LOSSES"])):
    weights = train(start, range(10))
    checkpoint = np.asarray(weights)
    waits = jax.jit(lambda x: jax.lax.while_loop(lambda y: y > 0, lambda y: y + 1.0, x))(1.0)
    kill_proxy()
    print(refused(waits.block_until_ready), refused(lambda: np.asarray(train(weights, [10]))))
    del waits, weights
    jax.extend.backend.clear_backends()
    os.write(2, b"FOUND\\n")
    print(np.array_equal(train(checkpoint, range(10, 20)), undisturbed), len(jax.devices()))
"""


@pytest.mark.parametrize("losses", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_script_whose_proxy_is_killed_goes_on_from_its_checkpoint_once_it_has_connected_anew(
    start_script: StartScript, losses: int
) -> None:
    # The proxy is executed, because the status of a forked process arrives after its end.
    script = start_script(SCRIPT, islands="1x1x2", LOSSES=str(losses), ATOLL_TEST_EXECUTED="proxy_main")
    for _ in range(losses):
        assert script.line() == "True True"
        assert script.line() == "True 2"
    assert script.process.wait(300) == 0
    script.assert_gone()
    output = [line for line in script.errors().splitlines() if line.startswith("atoll: ")]
    assert len(output) == losses, script.errors()
    assert all("has ended (killed by SIGKILL)" in line and "clear_backends()" in line for line in output)
    assert script.errors().count("LOST\nFOUND\n") == losses, script.errors()  # jaxlib logs nothing in between


# The number of an array in its client is the number of another array in the next client.
HELD_SCRIPT = """
import jax, jax.extend, jax.numpy as jnp, numpy as np
import os, psutil

rows = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
held = [jnp.arange(4.0) * i for i in range(8)] + [jax.device_put(np.ones(4), rows)]
part = held[-1].addressable_shards[0].data
was_read = jnp.ones(3)
np.asarray(was_read)

def is_proxy(command):
    return "atoll.ifrt.proxy_main" in command and f'"client":{os.getpid()},' in command[-1]

if os.environ["KILL"] == "yes":
    (proxy,) = (each for each in psutil.process_iter(["cmdline"]) if is_proxy(each.info["cmdline"] or ()))
    proxy.kill()
    proxy.wait()
jax.extend.backend.clear_backends()
others = jax.block_until_ready([jnp.full(4, 100.0 + i) for i in range(200)])

def result(use, array):
    try:
        return use(array).tolist()
    except RuntimeError as error:  # a function for devices of the former client cannot be compiled
        return "refused" if "deleted" in str(error) or "terminated" in str(error) else str(error)

uses = (np.asarray, jax.jit(lambda x: x * 2), lambda x: x + 1, jax.block_until_ready)
print({str(result(use, array)) for array in (*held, part, was_read) for use in uses})
print(all(array.is_deleted() for array in (*held, part, was_read)), any(array.is_deleted() for array in others))
"""


@pytest.mark.parametrize("kill", ["no", "yes"])
def test_a_later_client_never_uses_its_arrays_in_place_of_those_of_a_former_client(
    start_script: StartScript, kill: str
) -> None:
    script = start_script(HELD_SCRIPT, islands="1x1x2", KILL=kill)
    assert script.line() == "{'refused'}", script.errors()
    assert script.line() == "True False"
    assert script.process.wait(300) == 0
    script.assert_gone()


CONTROLLER_SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
import os

def refused(call):
    try:
        call()
    except jax.errors.JaxRuntimeError as error:
        return "the Atoll controller is gone" in str(error)

values = jax.block_until_ready([jnp.arange(8.0) + i for i in range(6)])
waits = jax.jit(lambda x: jax.lax.while_loop(lambda y: y > 0, lambda y: y + 1.0, x))(1.0)
print("ready", flush=True)
print(refused(waits.block_until_ready))
os.write(2, b"LOST\\n")
print(refused(lambda: np.asarray(values[0] + values[1])), refused(lambda: np.asarray(jax.jit(jnp.cos)(values[2]))))
print(refused(lambda: jax.device_put(np.ones(8)).block_until_ready()))
os.write(2, b"END\\n")
"""


def test_only_the_errors_of_a_script_say_that_the_controller_of_its_embedded_cluster_is_gone(
    start_script: StartScript,
) -> None:
    """jaxlib would log a warning for each request that fails, before the script's own error."""
    script = start_script(CONTROLLER_SCRIPT, islands="1x1x2", is_executed=True)
    assert script.line() == "ready", script.errors()
    script.processes()["atoll.controller_process.controller_main"].kill()
    assert [script.line() for _ in range(3)] == ["True", "True True", "True"], script.errors()
    assert script.process.wait(300) == 0
    script.assert_gone()
    output = [line for line in script.errors().splitlines() if "the cluster ends: the controller ended" not in line]
    assert output == ["LOST", "END"], script.errors()
