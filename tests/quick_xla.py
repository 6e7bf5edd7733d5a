"""Compile programs quickly in tests. Most of them run once or twice, so that optimizing them does not pay.

XLA divides the code of a program into up to 32 LLVM modules, which its threads compile at the same time. Each module
repeats the same preparations. With one module, a program of medium size compiles in half of the CPU time.

Without XLA's newer emitters of fused operations, a small program compiles in two thirds of the CPU time. This is an
extra option, since JAX ends a process that has a flag which it does not know, and one of the versions that Atoll
supports does not know this flag. Atoll and stock JAX get the same flags, so that tests can compare their results bit
for bit.
"""

from __future__ import annotations

FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    )
)


def quick(environment: dict[str, str]) -> dict[str, str]:
    """Return a process's environment with these flags added."""
    return environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()}
