"""How programs are compiled in tests: quickly. Most run once or twice, and what LLVM optimizes never pays.

Atoll and stock JAX get the same, so that their results can be compared bit for bit.
"""

from __future__ import annotations

FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def quick(environment: dict[str, str]) -> dict[str, str]:
    """A process's environment with these flags beside its own."""
    return environment | {"XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} {FLAGS}".strip()}
