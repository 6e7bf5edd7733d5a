"""JAX scripts that know nothing of Atoll. A package so that benchmarks can measure them."""
