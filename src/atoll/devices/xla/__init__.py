"""XLA's devices. This package contains all uses of jaxlib's private interface by a worker.

A worker checks that interface when it starts. Known hazards (jaxlib 0.10.2):

- An executable on two or more devices ends the process if it gets a deleted buffer, or a wrong number, shape or device
  order of arguments. Therefore `worker.step_runner` checks the arguments of `XlaExecutable.execute`.
- A buffer that is donated to a move while another array shares it ends the process. `worker.store` counts references.
- More than 32 executions in flight can deadlock XLA's thread pool: see `XlaBackend.max_in_flight`. A larger pool (set
  with NPROC) changes the last bits of results, because XLA splits matrix products by the number of threads.
- If a process of an island fails, the other processes hang or abort. The engine restarts the island.
"""
