"""Resharding on the same devices: a compiled computation that returns its argument, as inside of a jit.

XLA moves the parts between the devices, by collectives. A transfer would take them through the hosts' memory.
"""

from __future__ import annotations

from typing import Any

import jax

from atoll.client import jax_internals as internals
from atoll.programs.program_functions import Function, FunctionTable, JitCall
from atoll.programs.values import Value

internals.leave_out_of_tracebacks(__file__)


class ReshardingTable:
    """Of one program: what gives its arrays other shardings on the same devices."""

    def __init__(self, functions: FunctionTable) -> None:
        self._functions = functions
        self._jaxprs: dict[Any, Any] = {}  # by type: functions are found by the identity of theirs

    def find(self, value: Value, target: Any) -> Function | None:
        """The function that gives the array the sharding `target`; None where only a transfer can."""
        source = value.sharding
        if not internals.can_compile_resharding(value.aval, source, target):
            return None
        aval = value.aval.update(sharding=None)
        jaxpr = self._jaxprs.get(aval)
        if jaxpr is None:
            with internals.set_current_trace(internals.eager_trace):
                jaxpr = self._jaxprs[aval] = jax.make_jaxpr(lambda x: x)(aval)
        inputs, outputs = ([internals.by_tiles(each, aval.ndim)] for each in (source, target))
        call = JitCall(jaxpr, "reshard", (), (), (), (), None)
        devices = internals.devices_of(source)
        assert devices is not None
        return self._functions.function(call, devices, inputs, outputs, ())
