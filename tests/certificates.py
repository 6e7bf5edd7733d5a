"""Certificate authorities and identities for tests, with any lifetime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from atoll.security import certificate_authority as module
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.roles import Role
from atoll.wire.tls.identity import Identity


@cache
def known_authority() -> CertificateAuthority:
    return CertificateAuthority.make("a test's")


def identity(role: Role, authority: CertificateAuthority | None = None) -> Identity:
    return Identity((authority or known_authority()).certificate_for(role, f"a {role} of a test"))


@contextmanager
def clock_ahead_by(seconds: float) -> Iterator[None]:
    """Advance the clock for certificates that are signed in the block."""
    now: Callable[[], float] = time.time

    class Clock:
        @staticmethod
        def time() -> float:
            return now() + seconds

    before, module.time = module.time, Clock  # type: ignore[assignment]
    try:
        yield
    finally:
        module.time = before
