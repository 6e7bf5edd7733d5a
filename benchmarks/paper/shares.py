"""Tenants with shares on one cluster, and the part of the devices' time that each of them had."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.operate.operator_requests import request_trace
from atoll.protocol.spans import Span
from atoll.wire.address import parse_address


def token_of(tenant: int) -> str:
    return f"token of tenant {tenant}"


def tenants(weights: Sequence[float]) -> tuple[TenantSettings, ...]:
    """One for each weight, with the token that `token_of` gives."""
    return tuple(
        TenantSettings(f"tenant-{number}", token_hash(token_of(number)), share=weight)
        for number, weight in enumerate(weights)
    )


def deviation(address: str, sessions: Sequence[int], weights: Sequence[float], since: float) -> float:
    """How far who is furthest from its share of the devices' time is from it, in percent of that share.

    Of what ended after `since`, by the monotonic clock of this machine, the controller's: what was before is of another
    round, at whose end those with small shares have more to do still. From when the last session has begun until the
    first has ended, as the hosts have measured it, over all islands.
    """
    spans = [span for span in spans_since(address, since) if span.session in sessions]
    got: dict[int, float] = defaultdict(float)
    for host in {span.host for span in spans}:
        here = [span for span in spans if span.host == host]
        begin = max(min(span.started for span in here if span.session == session) for session in sessions)
        end = min(max(span.ended for span in here if span.session == session) for session in sessions)
        for session, took in parts(here, sessions, begin, end).items():
            got[session] += took
    whole, all_weights = sum(got.values()), sum(weights)
    return max(
        100 * abs(got[session] / whole / (weight / all_weights) - 1)
        for session, weight in zip(sessions, weights, strict=True)
    )


def spans_since(address: str, since: float) -> list[Span]:
    """Return the spans that ended after `since`, by this machine's monotonic clock, which the controller uses."""
    return request_trace(parse_address(address), "", int(1e9 * since)).spans


def parts(spans: Sequence[Span], sessions: Sequence[int], begin: int, end: int) -> dict[int, float]:
    """Device-nanoseconds that each of these sessions had between two moments."""
    got = dict.fromkeys(sessions, 0.0)
    for span in spans:
        if span.session in got:
            got[span.session] += _within(span, begin, end) * len(span.devices)
    return got


def _within(span: Span, begin: int, end: int) -> int:
    return max(0, min(span.ended, end) - max(span.started, begin))
