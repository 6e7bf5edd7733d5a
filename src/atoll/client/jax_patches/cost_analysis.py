"""Lets the cost of a program be known before it is compiled: `jit(f).lower(x).cost_analysis()`, flax's `tabulate`.

jaxlib computes it inside a client of its own, of which there is one for the local CPU. The estimates are those of the
program as it is written, so whose they are makes no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.client.jax_patches.patch import Patch, Replacement
from atoll.client.plugin_programs import is_atoll


def _on_the_local_cpu(analyse: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def hlo_module_cost_analysis(client: Any, module: Any) -> Any:
        return analyse(jax.devices("cpu")[0].client if is_atoll(client) else client, module)

    return hlo_module_cost_analysis


PATCH = Patch(
    name="cost analysis",
    lifts="This operation is implemented for a PjRt-compatible backend only",
    replacements=(Replacement("jaxlib._jax", "hlo_module_cost_analysis", _on_the_local_cpu, ("arg0", "arg1")),),
)
