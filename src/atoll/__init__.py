"""Atoll: an open Pathways runtime for JAX. One controller, many accelerators, unmodified programs.

    JAX_PLATFORMS=atoll python train.py

runs any JAX script on an embedded cluster. `connect` does the same from Python. `program` turns a function over several
compiled functions into one launch. `pipeline` splits a model across several meshes. `elastic.run` continues a training
when islands fail, and `replicate` keeps second copies of arrays. `make_virtual_device_set` requests slices of the
cluster's islands. `trace` records what the cluster runs. The command `atoll` starts clusters that outlive a script. All
exceptions are subclasses of `AtollError`; `atoll.errors` shows the tree.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll import elastic as elastic
    from atoll import errors as errors
    from atoll import ffi as ffi
    from atoll._version import __version__ as __version__
    from atoll.arrays import publish as publish
    from atoll.arrays import subscribe as subscribe
    from atoll.arrays import wait_until_stored as wait_until_stored
    from atoll.client.client_slices import Slice as Slice
    from atoll.client.client_slices import VirtualDeviceSet as VirtualDeviceSet
    from atoll.client.client_slices import make_virtual_device_set as make_virtual_device_set
    from atoll.client.client_trace import trace as trace
    from atoll.client.connect import ConnectedCluster as ConnectedCluster
    from atoll.client.connect import connect as connect
    from atoll.elastic.replica import Replica as Replica
    from atoll.elastic.replica import recover as recover
    from atoll.elastic.replica import replicate as replicate
    from atoll.errors import AccessError as AccessError
    from atoll.errors import AddressError as AddressError
    from atoll.errors import AtollError as AtollError
    from atoll.errors import BackendError as BackendError
    from atoll.errors import ClusterError as ClusterError
    from atoll.errors import ConnectError as ConnectError
    from atoll.errors import FrameError as FrameError
    from atoll.errors import HandshakeCutError as HandshakeCutError
    from atoll.errors import IncompatibleJournalError as IncompatibleJournalError
    from atoll.errors import JournalError as JournalError
    from atoll.errors import LeaseError as LeaseError
    from atoll.errors import ListenError as ListenError
    from atoll.errors import NotServingError as NotServingError
    from atoll.errors import PipelineError as PipelineError
    from atoll.errors import ProgramError as ProgramError
    from atoll.errors import RecoveryError as RecoveryError
    from atoll.errors import SettingsError as SettingsError
    from atoll.errors import SliceError as SliceError
    from atoll.errors import StatusError as StatusError
    from atoll.errors import SupersededError as SupersededError
    from atoll.errors import UnreachableError as UnreachableError
    from atoll.errors import VersionError as VersionError
    from atoll.pins import Pin as Pin
    from atoll.pins import Version as Version
    from atoll.pins import pin as pin
    from atoll.pipelines.boundary import stage_boundary as stage_boundary
    from atoll.pipelines.pipeline import Pipeline as Pipeline
    from atoll.pipelines.pipeline import PipelineState as PipelineState
    from atoll.pipelines.pipeline import pipeline as pipeline
    from atoll.pipelines.schedule import Schedule as Schedule
    from atoll.pipelines.schedules import schedule as schedule
    from atoll.programs.choices import cond as cond
    from atoll.programs.choices import switch as switch
    from atoll.programs.choices import while_loop as while_loop
    from atoll.programs.routing import Routing as Routing
    from atoll.programs.routing import route as route
    from atoll.programs.routing import unroute as unroute
    from atoll.programs.traced_program import Program as Program
    from atoll.programs.traced_program import program as program
    from atoll.protocol.spans import Span as Span

# Public names by module. A module is imported at the first use of a name: JAX imports this package in every script.
_NAMES = {
    "atoll._version": ("__version__",),
    "atoll.arrays": ("publish", "subscribe", "wait_until_stored"),
    "atoll.pins": ("Pin", "pin", "Version"),
    "atoll.client.connect": ("connect", "ConnectedCluster"),
    "atoll.programs.traced_program": ("program", "Program"),
    "atoll.programs.choices": ("cond", "switch", "while_loop"),
    "atoll.programs.routing": ("route", "unroute", "Routing"),
    "atoll.client.client_slices": ("make_virtual_device_set", "Slice", "VirtualDeviceSet"),
    "atoll.client.client_trace": ("trace",),
    "atoll.pipelines.pipeline": ("pipeline", "Pipeline", "PipelineState"),
    "atoll.pipelines.boundary": ("stage_boundary",),
    "atoll.pipelines.schedules": ("schedule",),
    "atoll.pipelines.schedule": ("Schedule",),
    "atoll.elastic.replica": ("replicate", "recover", "Replica"),
    "atoll.protocol.spans": ("Span",),
    "atoll.errors": (
        "AtollError",
        "AddressError",
        "ListenError",
        "ConnectError",
        "UnreachableError",
        "NotServingError",
        "VersionError",
        "AccessError",
        "HandshakeCutError",
        "FrameError",
        "ClusterError",
        "SettingsError",
        "IncompatibleJournalError",
        "JournalError",
        "SupersededError",
        "LeaseError",
        "BackendError",
        "PipelineError",
        "ProgramError",
        "RecoveryError",
        "SliceError",
        "StatusError",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AccessError",
    "AddressError",
    "AtollError",
    "BackendError",
    "ClusterError",
    "ConnectError",
    "ConnectedCluster",
    "FrameError",
    "HandshakeCutError",
    "IncompatibleJournalError",
    "JournalError",
    "LeaseError",
    "ListenError",
    "NotServingError",
    "Pin",
    "Pipeline",
    "PipelineError",
    "PipelineState",
    "Program",
    "ProgramError",
    "RecoveryError",
    "Replica",
    "Routing",
    "Schedule",
    "SettingsError",
    "Slice",
    "SliceError",
    "Span",
    "StatusError",
    "SupersededError",
    "UnreachableError",
    "Version",
    "VersionError",
    "VirtualDeviceSet",
    "__version__",
    "cond",
    "connect",
    "elastic",
    "errors",
    "ffi",
    "make_virtual_device_set",
    "pin",
    "pipeline",
    "program",
    "publish",
    "recover",
    "replicate",
    "route",
    "schedule",
    "stage_boundary",
    "subscribe",
    "switch",
    "trace",
    "unroute",
    "wait_until_stored",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "elastic", "errors", "ffi", "tensorflow", "testing"):
        return importlib.import_module(f"atoll.{name}")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'atoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
