"""Run figure 2 of the Pathways paper: computations on three slices, as one program.

    JAX_PLATFORMS=atoll python examples/figure2.py

Without `pw.program`, each of the four calls and each transfer between the slices is a separate message.
"""

import jax
import numpy

import atoll as pw


def get_devices(n):
    """Allocates `n` virtual TPU devices on an island."""
    device_set = pw.make_virtual_device_set()
    return device_set.add_slice(tpu_devices=n).tpus


a = jax.pmap(lambda x: x * 2.0, devices=get_devices(2))
b = jax.pmap(lambda x: x + 1.0, devices=get_devices(2))
c = jax.pmap(lambda x: x / 2.0, devices=get_devices(2))


@pw.program  # Program tracing (optional)
def f(v):
    x = a(v)
    y = b(x)
    z = a(c(x))
    return (y, z)


print(f(numpy.array([1.0, 2.0])))
# (Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))
