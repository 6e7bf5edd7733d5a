"""Test that an island of two hosts survives changes of the system clock."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StartCluster

pytestmark = pytest.mark.thorough
SECONDS = 30.0
# XLA checks for heartbeats once per second.
LOOKS = 4.0

# A preloaded library that adds the number in a file to the system's clock.
SHIFT = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset(void) {
  static volatile long *number;
  if (!number) {
    int file = open(getenv("CLOCK_OFFSET"), O_RDONLY);
    if (file < 0) return 0;
    void *memory = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return 0;
    number = memory;
  }
  return *number;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*next)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = next(clock, now);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  int (*next)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
  int result = next(now, zone);
  if (!result) now->tv_sec += offset();
  return result;
}

time_t time(time_t *out) {
  time_t (*next)(time_t *) = dlsym(RTLD_NEXT, "time");
  time_t now = next(0) + offset();
  if (out) *out = now;
  return now;
}
"""

_kept: list[jax.Array] = []


def keep() -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    _kept.append(jax.device_put(np.arange(8, dtype=np.float32), sharding))


def total() -> float:
    return float(jax.jit(lambda x: x.sum())(_kept[0]))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_clock_that_is_set_ends_no_worker(
    start_cluster: StartCluster, start_python: StartPython, tmp_path: Path
) -> None:
    source, library, offset = (tmp_path / name for name in ("shift.c", "shift.so", "offset"))
    source.write_text(SHIFT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    offset.write_bytes(bytes(mmap.PAGESIZE))
    environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(offset), "ATOLL_TEST_EXECUTED": "1"}
    cluster = start_cluster(environment, islands="1x2x1")
    client = start_python(ATOLL_ADDRESS=cluster.address)
    client.call(keep)
    with open(offset, "r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
        for seconds in (3600, 3599, 2 * 86400):
            memory[:8] = struct.pack("q", seconds)
            with pytest.raises(AssertionError):  # nothing has been restarted
                cluster.until(lambda report: any(each["restarts"] for each in report["islands"]), LOOKS)
            assert client.call(total, seconds=SECONDS) == 28.0
