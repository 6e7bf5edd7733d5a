"""Writes reference/messages.md from the error messages in the source: `python -m docs.messages_page`."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from docs.error_messages import EXCEPTIONS, ErrorMessage, messages, words_of
from docs.errors_page import CAUSES
from docs.headings import anchor_of

PAGE = Path(__file__).resolve().parent / "reference" / "messages.md"
TROUBLESHOOTING = PAGE.parent.parent / "guides" / "troubleshooting.md"
_HEAD = """\
# Error messages

<!-- Written by `python -m docs.messages_page` from the source. -->

This page lists the error messages of Atoll. To find a message, search the page for some of its words. `...` stands for
a value, such as a name or a number. The sections are the parts of Atoll that raise the errors. The text above each
table explains what its messages have in common, and what to do. If a message says what to do, follow the message.

The column *type* has the exception, or the [code](errors.md#codes) with which the text of an error on the cluster
begins, as in `RESOURCE_EXHAUSTED: out of memory`. `#` is a link to the message. *more* leads to an explanation of the
message in [troubleshooting](../guides/troubleshooting.md).
"""

# The parts of Atoll that make errors: the title, the packages and modules, what their messages mean, and what to do.
AREAS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    (
        "Connecting a script",
        ("client/", "session/", "__init__.py"),
        "JAX in the script's process cannot connect to the cluster, or a call is not possible on Atoll.",
        "change the call, or the way in which you start the script, as the message says.",
    ),
    (
        "Addresses, tokens and certificates",
        ("wire/", "security/", "grpc/"),
        "A process cannot connect to another one, or one of the two refuses the connection.",
        "compare the address, the token and the versions on both machines. On the machine of `atoll up`, "
        "`atoll status` shows the address.",
    ),
    (
        "Commands",
        ("operate/", "web/"),
        "A command got an option that it cannot use, or the cluster is not in the state that the command needs.",
        "correct the command. [Commands](commands.md) lists the options, and `atoll status` shows the cluster.",
    ),
    (
        "Settings and starts of clusters",
        (
            "cluster/",
            "engines/",
            "manifests/",
            "devices/accelerators.py",
            "virtual/",
            "quantities.py",
        ),
        "A setting is invalid, or the processes of a cluster did not start.",
        "correct the [setting](settings.md), or read the log of the cluster: `atoll logs`.",
    ),
    (
        "Islands, tenants and operators",
        (
            "controller/operators/",
            "controller/islands/",
            "controller/faults.py",
            "controller/admission.py",
            "state/tenants.py",
            "protocol/permissions.py",
        ),
        "The controller refuses a request of a script or an operator, or an island failed or did not become ready.",
        "look at the islands with `atoll status`, and at the rights of each role in [permissions](permissions.md).",
    ),
    (
        "Sessions and launches",
        ("cluster/virtual_devices.py", "controller/sessions/", "launch/", "state/", "arrays.py"),
        "The controller cannot run a call, or cannot keep an array or a session.",
        "if a [limit](limits.md) is reached, free memory or wait. Compute lost arrays again, or restore them. "
        "`atoll why` shows what a session waits for.",
    ),
    (
        "Named arrays and pins",
        (
            "named_arrays/",
            "pins.py",
            "client/published_trees.py",
            "controller/named_arrays/",
            "controller/sessions/name_waits.py",
            "cluster/array_names.py",
            "executables/published_executables.py",
        ),
        "A version cannot be published, read or pinned.",
        "look at the names and versions with `atoll arrays`. Guide: [named arrays](../guides/named-arrays.md).",
    ),
    (
        "Compilation and functions",
        ("executables/", "devices/", "worker/", "ifrt/"),
        "A function cannot be compiled or run on the devices as it was called.",
        "change the function or its arguments. `jax.jit(f).lower(...).as_text()` shows the function as Atoll gets it.",
    ),
    (
        "Programs, pipelines and elastic training",
        ("programs/", "pipelines/", "elastic/"),
        "A function cannot become a program or a pipeline, a schedule cannot run, or an elastic run has no island.",
        "change the lines that the message names. Guides: [programs](../guides/programs.md), "
        "[pipelines](../guides/pipelines.md), [elastic training](../guides/elastic.md).",
    ),
    (
        "Python on the hosts, callbacks, input, kernels",
        (
            "host_services/",
            "ffi.py",
            "data.py",
            "client/ffi_handlers.py",
            "client/library_dependencies.py",
            "tensorflow/",
            "tunix.py",
            "protocol/ffi_libraries.py",
            "protocol/profiles.py",
        ),
        "Python code or a kernel failed on a host, or a callback failed in the script.",
        "correct the function. Guides: [Python on the hosts](../guides/python-on-hosts.md), "
        "[input](../guides/input.md), [checkpoints](../guides/checkpoints.md), [FFI kernels](../guides/ffi.md), "
        "[TensorFlow](../guides/tensorflow.md).",
    ),
    (
        "Moving and suspending sessions",
        ("migration/", "controller/session_persistence.py"),
        "A session cannot move to other devices, or it cannot be suspended or resumed.",
        "wait until the work that the message names has ended, or choose other devices. "
        "[Suspending](../design/suspending.md) lists what cannot move.",
    ),
    (
        "Journals, standbys and leases",
        (
            "journal/",
            "controller_process/",
            "leadership/",
            "controller/controller_dumps.py",
            "state/versions.py",
            "state/object_dumps.py",
        ),
        "A controller cannot continue a cluster, follow one, or serve it.",
        "see [High availability](../operate/high-availability.md) and [Upgrade](../operate/upgrade.md). A damaged "
        "journal cannot be repaired: restore the directory from a backup, or start a new cluster.",
    ),
    (
        "Transfers between hosts",
        ("transfers/", "peers/"),
        "A connection between two hosts, or between a script and a host, could not be opened, or has ended.",
        "check that the machines reach each other ([ports](../start/several-machines.md#before-you-start)), and "
        "compute lost arrays again, or restore them.",
    ),
    (
        "Invalid messages between processes",
        ("ir/", "protocol/", "controller/validation/"),
        "A process received a message that is invalid in its version.",
        "install the same version of Atoll and JAX on both sides. If both have it, this is a bug: report it with "
        "[`atoll bundle`](../guides/troubleshooting.md#report-a-bug).",
    ),
)


class UnlistedFileError(LookupError):
    """A file makes errors and is in no area."""


def area_of(file: str) -> str:
    """Return the title of the area with the longest prefix of `file`."""
    found = [(len(prefix), title) for title, prefixes, *_ in AREAS for prefix in prefixes if file.startswith(prefix)]
    if not found:
        raise UnlistedFileError(f"{file} makes errors: add it, or its package, to AREAS of docs/messages_page.py")
    return max(found)[1]


def anchors(texts: list[str]) -> dict[str, str]:
    """Return an anchor for each text, made of its first words, so that it stays if other messages change."""
    long = {text: "-".join(words_of(text)).lower().replace("'", "") for text in texts}
    short = {text: "-".join(each.split("-")[:8]) for text, each in long.items()}
    counts = Counter(short.values())
    wanted = {text: short[text] if counts[short[text]] == 1 else long[text] for text in texts}
    used: Counter[str] = Counter()
    found: dict[str, str] = {}
    for text, each in wanted.items():
        used[each] += 1
        found[text] = f"m-{each}-{used[each]}" if used[each] > 1 else f"m-{each}"
    return found


@cache
def headings() -> dict[str, list[str]]:
    """Return the anchors of the headings of the troubleshooting page that quote messages, with the quoted texts."""
    lines = re.findall(r"^### (.+)$", TROUBLESHOOTING.read_text(), re.MULTILINE)
    quoted = {anchor_of(each): [a or b for a, b in re.findall(r'`([^`]+)`|"([^"]+)"', each)] for each in lines}
    return {anchor: texts for anchor, texts in quoted.items() if texts}


@cache
def _tokens(text: str) -> tuple[str, ...]:
    without_code = re.sub(r"^[A-Z_]{5,}: ", "", text)
    return tuple(re.findall(r"\.\.\.|[\w'./-]+?(?=\.\.\.|[^\w'./-]|$)", without_code.replace("(...)", "...")))


def quotes(quoted: str, text: str) -> bool:
    """Return whether `quoted`, which has example values or "...", is a part of a message of this text."""
    ours, theirs = _tokens(quoted), _tokens(text)
    needed = max(2, 0.6 * len([each for each in ours if each != "..."]))
    if len(set(ours) & set(theirs) - {"..."}) < 2:
        return False

    @cache
    def matches(i: int, j: int) -> int:
        """Return how many words are equal if ours from i on match theirs from j on, or -1."""
        if i == len(ours):
            return 0
        if j == len(theirs):
            return 0 if ours[i:] == ("...",) else -1
        options = [1 + matches(i + 1, j + 1)] if ours[i] == theirs[j] and matches(i + 1, j + 1) >= 0 else []
        if "..." in (ours[i], theirs[j]):
            options += [matches(i + 1, j), matches(i, j + 1), matches(i + 1, j + 1)]
        return max(options, default=-1)

    return max((matches(0, j) for j in range(len(theirs))), default=-1) >= needed


def explained_at(text: str) -> str:
    """Return the anchor of the heading of the troubleshooting page that explains this message, or ""."""
    return next((anchor for anchor, texts in headings().items() if any(quotes(each, text) for each in texts)), "")


def _type(kind: str) -> str:
    if kind in CAUSES:
        return f"[`{kind}`](errors.md#codes)"
    if kind in EXCEPTIONS:
        return f"[`{kind}`](errors.md#exceptions)"
    return f"`{kind}`" if kind.endswith("Error") else kind


def _row(message: ErrorMessage, kinds: list[str], anchor: str) -> str:
    text = message.text.replace("|", "\\|")
    shown = f"`` {text} ``" if "`" in text else f"`{text}`"
    explained = explained_at(message.text)
    more = f" ([more](../guides/troubleshooting.md#{explained}))" if explained else ""
    return f'| <a id="{anchor}" href="#{anchor}">#</a> {shown}{more} | {", ".join(map(_type, kinds))} |\n'


def page() -> str:
    """Return the page."""
    first: dict[str, ErrorMessage] = {}
    kinds: dict[str, list[str]] = {}
    for each in messages():
        first.setdefault(each.text, each)
        kinds.setdefault(each.text, []).append(each.kind)
    names = anchors(list(first))
    rows: dict[str, str] = defaultdict(str)  # by area
    for each in first.values():
        rows[area_of(each.file)] += _row(each, sorted(set(kinds[each.text])), names[each.text])
    text = _HEAD
    for title, _, meaning, what_to_do in AREAS:
        text += f"\n## {title}\n\n{meaning}\n\n**Do:** {what_to_do}\n\n| message | type |\n|---|---|\n{rows[title]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
