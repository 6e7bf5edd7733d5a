"""A batch script for Slurm: one job that starts a cluster and runs a command on it.

The first node runs the controller and the command, and every node runs a host agent. The job creates the credentials
and passes them in the environment of its steps, so the nodes need no shared directory.

Before the time limit, Slurm sends SIGTERM to the script, which passes it to the command. The command runs in the
background, because bash handles signals only between commands.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.cluster.tenant_settings import DEFAULT_NAME, TENANT_MARK
from atoll.cluster.topology import Topology
from atoll.errors import SettingsError

_GPUS = ("cuda", "gpu", "rocm")
# Seconds for the controller to write the hosts' join token.
_START_SECONDS = 60
_MAX_PORTS = 10  # to try


@dataclass(frozen=True)
class SlurmJob:
    """The job to describe. `settings` are more flags for `atoll up`, `directives` are more directives for sbatch."""

    name: str
    topology: Topology
    command: Sequence[str]
    platform: str = ""
    settings: Sequence[str] = ()
    directives: Sequence[str] = ()
    file: str = ""  # content of a cluster file, which replaces `--islands`
    join_file: str = ""  # path of the join token for other clients; {tenant} is replaced by each name in `tenants`
    tenants: Sequence[str] = ()
    notice: int = 60  # seconds before the time limit at which the command gets SIGTERM
    requeue: bool = False  # run the job again if the command failed after that
    journal: str = ""  # directory for the journals of jobs; "" for none


def batch_script(job: SlurmJob) -> str:
    """Return the script for `sbatch`. Raise SettingsError if hosts have different numbers of GPUs."""
    hosts, shapes = job.topology.host_count, job.topology.shapes
    gpus = {shape.devices if shape.platform in _GPUS else 0 for shape in shapes}
    if len(gpus) > 1:
        text = "; ".join(f"island {number} has {shape}" for number, shape in enumerate(shapes))
        raise SettingsError(
            f"all nodes of a Slurm job have the same GPUs, and these islands differ: {text}. Start the cluster with "
            "`atoll up --engine hosts`, and run `atoll host` in a separate job for each kind of node"
        )
    directives = [f"--job-name={job.name}", f"--nodes={hosts}", "--ntasks-per-node=1"]
    directives.append(f"--signal=B:TERM@{job.notice}")
    directives += ["--requeue", "--open-mode=append"] if job.requeue else []
    if gpus != {0}:
        directives.append(f"--gpus-per-node={gpus.pop()}")
    platform = ["--platform", job.platform] if job.platform else []
    islands = [] if job.file else ["--islands", str(job.topology)]
    up = shlex.join(["atoll", "up", "--foreground", "--engine", "hosts", *islands, *platform, *job.settings])
    up += ' --cluster "$directory/cluster.toml"' if job.file else ""
    up += ' --journal "$journal"' if job.journal else ""
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in (*directives, *job.directives))]
    joins = [job.join_file.replace(TENANT_MARK, name) for name in (DEFAULT_NAME, *job.tenants)]
    return "\n".join(lines) + _BODY.format(
        up=up,
        file=_file(job.file),
        hosts=hosts,
        seconds=_START_SECONDS,
        ports=_MAX_PORTS,
        notice=job.notice,
        journal=f"journal={shlex.quote(job.journal)}/slurm-$SLURM_JOB_ID\n" if job.journal else "",
        ended=' "$journal"' if job.journal else "",
        requeue=_REQUEUE if job.requeue else "",
        command=shlex.join(job.command),
        join_file=shlex.quote(job.join_file) if job.join_file else '"$directory/clients"',
        own_join=shlex.quote(joins[0]) if job.join_file else '"$directory/clients"',
        written=" " + shlex.join(dict.fromkeys(joins)) if job.join_file else "",
    )


def _file(content: str) -> str:
    return f'printf %s {shlex.quote(content)} >"$directory/cluster.toml"\n' if content else ""


_REQUEUE = """if [ "$notices" -gt 0 ] && [ "$status" -ne 0 ]; then
  finish
  trap - EXIT
  scontrol requeue "$SLURM_JOB_ID"
fi
"""

_BODY = """
# The cluster of this job: its controller runs on this node, the first one, and a host runs on each of {hosts} nodes.
set -euo pipefail

directory=$(mktemp -d)
{journal}controller= hosts= command= notices=0
finish() {{
  trap '' TERM USR1
  # Hosts exit when their controller does.
  if [ -n "$controller" ]; then kill "$controller" 2>/dev/null && wait "$controller" || true; fi
  # srun ignores a signal that it receives while it starts its step, so send it until srun has ended.
  while [ -n "$hosts" ] && kill "$hosts" 2>/dev/null; do sleep 1; done
  rm -rf "$directory"{ended}{written}
}}
trap finish EXIT
# Slurm sends a notice {notice} s before the time limit. The command can then save its state.
notice() {{
  notices=$((notices + 1))
  [ -z "$command" ] || kill -TERM "$command" 2>/dev/null || true
}}
trap notice TERM USR1
{file}
for ((try = 0; try < {ports}; try++)); do
  port=$((20000 + (SLURM_JOB_ID + 997 * try) % 10000))
  {up} --name "slurm-$SLURM_JOB_ID" \\
    --listen "0.0.0.0:$port" --advertise "$(hostname -f)" \\
    --join-file {join_file} --host-join-file "$directory/hosts" &
  controller=$!
  for ((i = 0; i < {seconds} * 10; i++)); do
    [ -s "$directory/hosts" ] && break 2  # the controller writes this file last
    [ "$notices" = 0 ] || exit 143
    kill -0 "$controller" 2>/dev/null || break
    sleep 0.1
  done
  kill -0 "$controller" 2>/dev/null && break
  controller=
  # If another process listens at this port, try another one.
  (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null || (: <"/dev/tcp/$(hostname -f)/$port") 2>/dev/null || exit 1
done
[ -s "$directory/hosts" ] || {{ echo "the controller did not start within {seconds} s" >&2; exit 1; }}

ATOLL_JOIN=$(cat "$directory/hosts") srun --ntasks={hosts} --overlap --export=ALL atoll host &
hosts=$!

export ATOLL_JOIN
ATOLL_JOIN=$(cat {own_join})
export JAX_PLATFORMS=atoll,cpu
{command} &
command=$!
[ "$notices" = 0 ] || kill -TERM "$command" 2>/dev/null || true  # the notice came before `command` was set
while :; do
  status=0 before=$notices
  wait "$command" || status=$?
  [ "$notices" = "$before" ] && break  # otherwise, the notice has interrupted `wait`
done
{requeue}exit "$status"
"""
