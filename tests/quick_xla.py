"""How programs are compiled in tests: quickly. Most run once or twice, and what LLVM optimizes never pays.

Nor does what XLA's newer emitters make of fused operations: without them a small program compiles in two thirds of the
CPU time. That is an extra option, since a JAX that does not know a flag of its own ends its process over it, and
one of the versions that Atoll is for knows no such option. Atoll and stock JAX get the same, so that their results can
be compared bit for bit.
"""

from __future__ import annotations

FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true",
    )
)


def quick(environment: dict[str, str]) -> dict[str, str]:
    """A process's environment with these flags beside its own."""
    return environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()}
