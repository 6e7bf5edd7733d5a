"""Functions that an honest client of the attacked cluster runs, in a separate Python process that imports
this module.
"""

from __future__ import annotations

import jax
import numpy as np


def honest_work() -> list[float]:
    value = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[2])
    return [float(x) for x in jax.jit(lambda x: x * 2)(value)]
