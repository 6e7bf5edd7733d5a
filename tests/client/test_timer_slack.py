"""Tests of the timer slack of threads that jaxlib's client creates."""

from __future__ import annotations

import threading
from pathlib import Path

from atoll.client.timer_slack import SLACK_NANOSECONDS, relaxed
from tests.conftest import RunScript


def slack() -> int:
    return int(Path(f"/proc/{threading.get_native_id()}/timerslack_ns").read_text())


def test_threads_made_in_the_block_keep_its_slack_and_their_maker_does_not():
    before = slack()
    found: list[int] = []
    with relaxed():
        thread = threading.Thread(target=lambda: found.append(slack()))
        thread.start()
    thread.join()
    assert found == [SLACK_NANOSECONDS]
    assert slack() == before


def test_a_client_that_waits_leaves_the_cpu_alone(run_script: RunScript):
    script = """
        import time
        from pathlib import Path
        import jax, jax.numpy as jnp

        def wake_ups():
            texts = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
            return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if "_ctxt_" in line)

        jax.block_until_ready(jnp.ones(4) + 1)
        before = wake_ups()
        time.sleep(2)
        print((wake_ups() - before) / 2)
    """
    a_second = float(run_script(script, islands="1x1x1").check().stdout)
    assert a_second < 300, "with a slack of 2 ms, one of jaxlib's threads wakes 500 times per second"
