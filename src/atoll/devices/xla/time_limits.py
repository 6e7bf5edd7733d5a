"""XLA's time limits on programs that run on several devices.

XLA ends its process if the devices of one program do not all reach a collective within a limit: 20 s and then 40 s on
CPUs, 30 s and 40 s on GPUs. XLA assumes that only a deadlock takes that long. A worker's devices belong to many
sessions, so one device may be busy with another session's program for as long as that program takes, while the others
wait. Therefore workers run without these limits. XLA reads those for CPUs from the environment of its process only;
compile options do not change them.

The names are those that jaxlib 0.10.2 to 0.12 parse; XLA ends a process that has a name that it does not know. The
limits of NCCL itself and of an execution (`xla_gpu_nccl_termination_timeout_seconds` and
`xla_gpu_execution_terminate_timeout`) are off by default. No program has run with the options for GPUs.
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
    """Return `flags`, as XLA_FLAGS has them, with the time limits of the platform's programs disabled.

    The last of equal flags counts. Flags that are the name of a file stay as they are: XLA takes a file or flags.
    """
    if flags and not flags[0].startswith("-"):
        return list(flags)
    return [*flags, *(f"--{name}={_UNLIMITED}" for name in _LIMITS.get(platform, ()))]
