"""Writes reference/limits.md from the constants of the code: `python -m docs.limits_page`."""

from __future__ import annotations

from pathlib import Path

from atoll.cluster.environment_variables import TABLES
from atoll.cluster.settings import SETTINGS, default_text
from atoll.cluster.tenant_settings import TenantSettings, limit_text
from atoll.cluster.topology import MAX_DEVICES, MAX_HOSTS, MAX_PER_LEVEL
from atoll.controller.sessions.proxy_requests import MAX_EARLY_FEEDS
from atoll.controller.validation.proxy_validation import MAX_FUNCTIONS, MAX_PROGRAMS
from atoll.ir import control_flow_split, validation
from atoll.launch.launch_checks import LAUNCH_WINDOW
from atoll.migration.rules import MAX_MOVED_ARRAYS, MAX_MOVED_ON_HOST, MAX_MOVED_SHARDS
from atoll.named_arrays import named_arrays
from atoll.protocol.messages import MAX_PUBLISHED
from atoll.protocol.questions import MAX_ARRAYS, MAX_SHARDS

PAGE = Path(__file__).resolve().parent / "reference" / "limits.md"
_HEAD = """\
# Limits

<!-- Written by `python -m docs.limits_page` from constants of the code. -->

These are the limits that a user or an operator may meet. An error names the limit that was exceeded. [Bounds and
invariants](../design/bounds.md) lists all bounds, including those of queues, buffers and retries.

## Sizes

| limit | value | if exceeded |
|---|---:|---|
"""
_SIZES = (
    ("islands of a cluster, hosts of an island, devices of a host", MAX_PER_LEVEL, "the cluster does not start"),
    ("hosts of a cluster", MAX_HOSTS, "the cluster does not start"),
    ("devices of a cluster", MAX_DEVICES, "the cluster does not start"),
    ("programs of a session", MAX_PROGRAMS, "an error; release programs that are not used"),
    ("functions of a session", MAX_FUNCTIONS, "an error; release functions that are not used"),
    ("nodes of a program", validation.MAX_NODES, "an error; put parts into one jitted function"),
    ("control flow nodes of a program", control_flow_split.MAX_CONTROL_FLOW, "an error"),
    ("arguments of a program", validation.MAX_ARGUMENTS, "an error; stack arrays"),
    ("results of a program", validation.MAX_RESULTS, "an error; stack arrays"),
    ("shards of a program's arrays", validation.MAX_SHARDS, "an error"),
    ("rank of an array", validation.MAX_RANK, "an error"),
    (
        "arrays of a published version, where up to 128 small ones of one shape count once",
        MAX_PUBLISHED,
        "an error; stack arrays",
    ),
    ("versions that a name of published arrays keeps", named_arrays.MAX_KEPT, "an error"),
    ("replicas of a published version, with the published one", named_arrays.MAX_REPLICAS, "an error"),
    ("names of published arrays of a tenant", named_arrays.MAX_NAMES, "an error; remove some with `atoll arrays rm`"),
    ("arrays in all versions of a tenant", named_arrays.MAX_ARRAYS, "an error; keep fewer versions"),
    ("launches of a session in flight", LAUNCH_WINDOW, "the script waits"),
    (
        "arrays of a session that is moved or suspended",
        MAX_MOVED_ARRAYS,
        "an error; the session stays where it is",
    ),
    ("shards of these arrays", MAX_MOVED_SHARDS, "an error; the session stays where it is"),
    ("shards of these arrays on one host", MAX_MOVED_ON_HOST, "an error; the session stays where it is"),
    ("buffers that a session has sent and that no launch has used yet", MAX_EARLY_FEEDS, "the session ends"),
    ("small arrays that `jax.device_get` reads with one request", MAX_ARRAYS, "more requests"),
    ("different shards of all arrays of such a request", MAX_SHARDS, "more requests"),
)
_TENANTS = """
## Limits of tenants

[Tenants](../operate/sharing.md#tenants) have the following limits by default while other tenants have sessions. The
file of tenants and `atoll tenants set` change them. [Quotas](../operate/sharing.md#quotas) have no limit by default.

| key | default |
|---|---|
"""
_SETTINGS = """
## Limits with a setting

[Settings](settings.md) describes each of them.

| setting | limit | default |
|---|---|---|
"""
_NAMES = ("max_sessions", "lease_seconds", "abandoned_seconds", "wait_seconds")
_VARIABLES = (
    "ATOLL_CACHE_BYTES",
    "ATOLL_TENANT_CACHE_BYTES",
    "ATOLL_PYTHON_MEMORY",
    "ATOLL_COMPILER_SECONDS",
    "ATOLL_COMPILER_MEMORY",
)


def page() -> str:
    """Return the page."""
    text = _HEAD + "".join(f"| {subject} | {value:,} | {effect} |\n" for subject, value, effect in _SIZES)
    text += _TENANTS
    default = TenantSettings("")
    for key in ("launch_rate", "compile_seconds", "upload_rate", "run_seconds"):
        text += f"| `{key}` | {limit_text(key, getattr(default, key))} |\n"
    text += _SETTINGS
    for name in _NAMES:
        text += f"| `{SETTINGS[name].variable}` | {SETTINGS[name].help} | {default_text(name)} |\n"
    variables = {each.variable: each for table in TABLES for each in table.settings}
    for name in _VARIABLES:
        text += f"| `{name}` | {variables[name].help} | {variables[name].default} |\n"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
