"""All of jaxlib's private interface that a worker uses, in one place, checked when a worker starts.

Nothing else in the worker touches `jax._src` or `jaxlib._jax`. Dangers of it that this package knows (jaxlib 0.10.2):

- A deleted buffer, a wrong count, shape or device order given to an executable over two or more devices ends the
  process, so `Executable.execute` must only be called with what `worker.step_runner` has checked. So does a buffer that
  was donated to a move while another array has it: `worker.store` counts who has what.
- More than 32 executions in flight can deadlock XLA's thread pool: see `XlaBackend.max_in_flight`. (A larger
  pool, by NPROC, would too, but results then differ from stock JAX's in their last bits: XLA cuts matrix products by
  the number of threads.)
- Of an island of several hosts, a process that lacks one of its peers hangs or aborts: the engine restarts the island.
"""
