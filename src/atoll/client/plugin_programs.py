"""IFRT's plugin programs: the one way in which JAX's client sends a server anything but XLA programs.

The reply is a loaded executable, whatever it stands for.
"""

from __future__ import annotations

from typing import Any

from atoll.protocol.questions import Question, write_question

_ATOLL = "proxy/atoll"  # jaxlib's name for a client of our proxy


def is_atoll(client: Any) -> bool:
    """Whether a JAX client's server is Atoll."""
    return bool(client.runtime_type == _ATOLL)


def submit(client: Any, payload: bytes) -> Any:
    """The executable that the server makes of this. Raises jax.errors.JaxRuntimeError with the server's refusal."""
    from jax.extend.ifrt_programs import ifrt_programs

    plugin: Any = ifrt_programs
    program = plugin.make_plugin_program(payload)
    return client.compile_ifrt_program(program, plugin.make_plugin_compile_options())


def ask(client: Any, question: Question) -> bytes:
    """The answer to a question of Atoll's own. Raises jax.errors.JaxRuntimeError with the server's refusal."""
    return bytes(submit(client, write_question(question)).fingerprint)
