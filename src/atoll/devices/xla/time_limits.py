"""XLA's time limits on programs that run on several devices, which workers disable.

XLA ends its process if the devices of one program do not all reach a collective within a limit: 20 s and then 40 s on
CPUs, 30 s and 40 s on GPUs. XLA assumes that only a deadlock takes that long. A worker's devices are shared by many
sessions, so one device may run another session's program for any time while the others wait. XLA only reads the limits
for CPUs from the environment of its process; compile options do not change them.

jaxlib 0.10.2 to 0.12 parse these names; XLA ends a process with an unknown name. The limits of NCCL itself and of an
execution (`xla_gpu_nccl_termination_timeout_seconds` and `xla_gpu_execution_terminate_timeout`) are off by default. The
options for GPUs are not tested with a program.
"""

from __future__ import annotations

from collections.abc import Sequence

_UNLIMITED = (1 << 31) - 1  # seconds; the options are int32
_CPU = (
    "xla_cpu_collective_call_terminate_timeout_seconds",  # devices of one host
    "xla_cpu_collective_timeout_seconds",  # hosts of one island
)
_GPU = ("xla_gpu_executable_terminate_timeout", "xla_gpu_first_collective_call_terminate_timeout_seconds")
_LIMITS = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "rocm": _GPU}


def flags_without_limits(platform: str, flags: Sequence[str]) -> list[str]:
    """Add options that disable the platform's time limits to `flags`, the flags in XLA_FLAGS.

    XLA uses the last of equal flags. If `flags` is the name of a file, return it unchanged: XLA accepts no flags then.
    """
    if flags and not flags[0].startswith("-"):
        return list(flags)
    return [*flags, *(f"--{name}={_UNLIMITED}" for name in _LIMITS.get(platform, ()))]
