"""Reads from a compiled program which of its devices communicate with one another.

XLA adds collectives when it partitions a program, so only the compiled program shows all of them.

A program's devices have the numbers replica * partitions + partition. A collective has groups of devices, in one of
these forms (xla/hlo/ir/collective_device_list.h, xla/service/collective_ops_utils.h):

    replica_groups={{0,1},{2,3}}         the groups; {} is one group of all
    replica_groups=[2,4]<=[8]            2 groups of 4, of the numbers 0 to 7 in order
    replica_groups=[4,2]<=[2,4]T(1,0)    the same, of an array of shape (2, 4) that was transposed
    replica_groups=mesh['a'=2,'b'=4] {'b'}      the same, along axes of a mesh of the numbers 0 to 7 in order
    replica_groups=mesh['a'=8] {'a':(2)4}       the same: the axis is divided into 2, 4 and the rest

The numbers are devices, or replicas, or partitions, which depends on other attributes: see `_spread`. On CPUs, a
permutation of some of these numbers is a rendezvous of all (xla/backends/cpu/runtime/collective_permute_thunk.cc).

Everything that this module does not know counts as communication of all devices: operations, custom calls, attributes
of collectives, and forms of groups. Otherwise, a program could wait forever for devices on another island.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import numpy as np

from atoll.devices.compilers.compiler_messages import Parts

_Groups = tuple[tuple[int, ...], ...]

# Operations without communication (xla/hlo/ir/hlo_opcode.h). If they call computations, the text has these as well.
_ALONE = frozenset(
    """
    abs acos acosh add add-dependency after-all and asin asinh async atan2 atanh batch-norm-grad batch-norm-inference
    batch-norm-training bitcast bitcast-convert broadcast call case cbrt ceil cholesky clamp compare complex
    concatenate conditional constant convert convolution copy cosh cosine count-leading-zeros divide dot
    dynamic-reshape dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
    get-dimension-size get-tuple-element imag iota is-finite log log-plus-one logistic map maximum minimum multiply
    negate not opt-barrier optimization-barrier or pad parameter partition-id popcnt power ragged-dot real reduce
    reduce-precision reduce-window remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state
    round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice sort sqrt stochastic-convert subtract
    tan tanh topk transpose triangular-solve tuple while xor
    """.split()  # noqa: SIM905
)
_COLLECTIVES = (
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all"),
    "reduce-scatter",
)
# Collectives whose numbers are partitions if they have a channel. The numbers of the others are replicas.
_OF_PARTITIONS = ("all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all")
# Attributes of collectives that this module reads, or that do not change the groups.
_ATTRIBUTES = {
    *("async_execution_thread", "calls", "channel_id", "constrain_layout", "dimensions", "replica_groups"),
    *("source_target_pairs", "to_apply", "use_global_device_ids"),
}
# Attributes after those of the operation. They contain texts of users.
_REST = re.compile(
    r", (?:backend_config|control-predecessors|frontend_attributes|metadata|origin|sharding|statistics)="
)
# Custom calls without communication: of JAX's libraries, of XLA, and of Atoll (see `stops` and `executable`).
_TARGETS = re.compile(
    r"lapack_\w+|tridiagonal_solve_perturbed_ffi|cpu_csr_sparse_dense_ffi|TopK|__onednn\$\w+|atoll_gate|atoll_loop_check"
)
# "  ROOT %name = f32[8]{0} add(", without the operation if the result is a tuple or the form is unknown.
_DEFINITION = re.compile(r"^[ \t]+(?:ROOT )?\S+ = (?:(\()|\S+ ([a-z][a-z0-9\-]*)\(|)", re.MULTILINE)
_PARENTHESIS = re.compile(r"[()\n]")
_AFTER_TUPLE = re.compile(r" ([a-z][a-z0-9\-]*)\(")
_ATTRIBUTE = re.compile(r", ([a-z][\w\-]*)=")
_TARGET = re.compile(r", custom_call_target=\"([^\"\\]*)\"")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+'(?::\(\d+\)\d+)?,?)*)\}")
_AXIS = re.compile(r"'(\w+)'=(\d+)")
_ALONG = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_GROUP = re.compile(r"\{([\d,\s]*)\}")


def communicating_parts(text: str, replicas: int, partitions: int) -> Parts:
    """Return the sets of devices that communicate within a program. `text` is that of the compiled HLO module.

    Devices that communicate through others are in the same set. A device that communicates with no other is in none.
    """
    count = replicas * partitions
    if count == 1:
        return ()
    found: dict[_Groups, None] = {}
    defined = 0
    for match in _DEFINITION.finditer(text):
        defined += 1
        operation, end = (match[2], match.end()) if match[1] is None else _after_tuple(text, match.start(1))
        if operation in _ALONE:
            continue
        groups = _groups_of(operation, text[end : _end_of_line(text, end)], replicas, partitions)
        if groups is None:
            return (tuple(range(count)),)
        found[groups] = None
    if not defined:
        return (tuple(range(count)),)
    return _united((group for groups in found for group in groups), count)


def _end_of_line(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _after_tuple(text: str, start: int) -> tuple[str | None, int]:
    """Return the operation whose result is the tuple that begins at `start`, and where its operands begin."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, start):
        if match[0] == "\n":
            break
        depth += 1 if match[0] == "(" else -1
        if not depth:
            found = _AFTER_TUPLE.match(text, match.end())
            return (found[1], found.end()) if found is not None else (None, match.end())
    return None, start


def _groups_of(operation: str | None, rest: str, replicas: int, partitions: int) -> _Groups | None:
    """Return the groups of devices that communicate in an operation; None if they are unknown.

    `rest` is the rest of the operation's line. The first operation of a pair, such as all-reduce-start and
    all-reduce-done, has the attributes.
    """
    if operation is None:
        return None
    base, _, stage = operation.rpartition("-")
    if stage not in ("start", "update", "done"):
        base, stage = operation, ""
    if base in _ALONE or (stage in ("update", "done") and (base in _COLLECTIVES or base == "custom-call")):
        return ()
    if base == "custom-call":
        target = _TARGET.search(rest)
        return () if target is not None and _TARGETS.fullmatch(target[1]) else None
    if base not in _COLLECTIVES:
        return None
    further = _REST.search(rest)
    return _groups(base, rest if further is None else rest[: further.start()], replicas, partitions)


def _groups(operation: str, line: str, replicas: int, partitions: int) -> _Groups | None:
    """Return the groups of devices of a collective; None if they are unknown. `line` contains no text of users."""
    if not _ATTRIBUTES.issuperset(_ATTRIBUTE.findall(line)):
        return None
    listed, iota, mesh = (form.search(line) for form in (_LISTED, _IOTA, _MESH))
    groups: _Groups | None
    if operation == "collective-permute":
        groups = ()
    elif listed is not None:
        groups = tuple(tuple(map(int, each.split(","))) for each in _GROUP.findall(listed[1]) if each.strip())
    elif iota is not None:
        groups = _of_iota(iota[1], iota[2], iota[3], replicas * partitions)
    elif mesh is not None:
        groups = _of_mesh(mesh[1], mesh[2], replicas * partitions)
    else:
        groups = None  # in a form of a later version
    return None if groups is None else _spread(operation, line, groups, replicas, partitions)


def _of_iota(shape: str, dimensions: str, order: str | None, limit: int) -> _Groups | None:
    """Return groups of numbers in order; None if they do not fit."""
    into, sizes = _numbers(shape), _numbers(dimensions)
    axes = list(range(len(sizes))) if order is None else _numbers(order)
    if math.prod(into) != math.prod(sizes) or math.prod(sizes) > limit or sorted(axes) != list(range(len(sizes))):
        return None
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(axes)
    return tuple(map(tuple, numbers.reshape(-1, into[-1]).tolist()))


def _of_mesh(axes: str, along: str, limit: int) -> _Groups | None:
    """Return the groups along axes of a mesh, or along parts of axes; None if the axes cannot be divided so."""
    sizes: list[int] = []
    chosen: list[int] = []
    wanted = {name: (int(before or 1), int(size) if size else 0) for name, before, size in _ALONG.findall(along)}
    if len(wanted) < len(_ALONG.findall(along)):  # several parts of one axis
        return None
    for name, text in _AXIS.findall(axes):
        size, (before, part) = int(text), wanted.pop(name, (1, 1))
        part = part or size
        if not before * part or size % (before * part):
            return None
        chosen.append(len(sizes) + 1)
        sizes += before, part, size // (before * part)
    if wanted or not 0 < math.prod(sizes) <= limit:
        return None
    numbers = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), chosen, range(-len(chosen), 0))
    return tuple(map(tuple, numbers.reshape(-1, math.prod([sizes[each] for each in chosen])).tolist()))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]


def _spread(operation: str, line: str, groups: _Groups, replicas: int, partitions: int) -> _Groups | None:
    """Return groups of devices for groups of the numbers that the collective uses; None if they do not fit."""
    has_channel = "channel_id=" in line
    if "use_global_device_ids=true" in line:
        most = replicas * partitions
        devices: list[list[tuple[int, ...]]] = [[(each,) for each in range(most)]]
    elif has_channel and operation in _OF_PARTITIONS:  # the same partitions of each replica
        most = partitions
        devices = [[(first + each,) for each in range(partitions)] for first in range(0, replicas * partitions, most)]
    elif has_channel:  # all partitions of these replicas
        most = replicas
        devices = [[tuple(range(each * partitions, (each + 1) * partitions)) for each in range(replicas)]]
    else:  # the same replicas of each partition
        most = replicas
        devices = [[(each * partitions + partition,) for each in range(replicas)] for partition in range(partitions)]
    groups = groups or (tuple(range(most)),)
    if any(not 0 <= each < most for group in groups for each in group):
        return None
    return tuple(tuple(device for number in group for device in own[number]) for own in devices for group in groups)


def _united(groups: Iterable[tuple[int, ...]], count: int) -> Parts:
    """Return the sets of devices that are connected by groups."""
    above = list(range(count))

    def top(device: int) -> int:
        while above[device] != device:
            above[device] = above[above[device]]
            device = above[device]
        return device

    for group in groups:
        for device in group:
            one, other = sorted((top(group[0]), top(device)))
            above[other] = one
    parts: dict[int, list[int]] = {}
    for device in range(count):
        parts.setdefault(top(device), []).append(device)
    return tuple(tuple(part) for part in parts.values() if len(part) > 1)
