"""A journal as a dump of events that can be replayed anywhere (`operate.log_replay`), without its secrets.

The dump begins with the state of the controller at the journal's snapshot, so it can be replayed however many events
came before. Secrets are the digests of tokens, and the numbers that admit hosts and sessions to data ports. Each is
replaced by another one of the same length, equal ones by equal ones, so the controller decides as before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import msgspec

from atoll.controller.controller_dumps import dump_controller
from atoll.controller.core import Controller
from atoll.controller_process.process_state import decode_snapshot
from atoll.errors import JournalError
from atoll.journal.event_log import Header, line_of, without_contents
from atoll.journal.files import ReadableDirectory
from atoll.journal.journal import read_journal
from atoll.journal.records import decode_event, records_of
from atoll.protocol import events as e
from atoll.protocol import messages as m
from atoll.state.object_dumps import Objects

# Digests and secrets as msgpack encodes them: strings of 64 and 32 hexadecimal digits, after their lengths.
_SECRET = re.compile(rb"(?<=\xd9\x40)[0-9a-f]{64}|(?<=\xd9\x20)[0-9a-f]{32}")


class Pseudonyms:
    """Replaces the secrets that it was given in encoded content."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._secrets: dict[bytes, bytes] = {}

    def add(self, *secrets: str) -> None:
        """Replace these secrets from now on. Raises JournalError if one does not have the form of secrets."""
        for secret in filter(None, secrets):
            found = secret.encode()
            if _SECRET.fullmatch(bytes((0xD9, len(found))) + found, 2) is None:
                raise JournalError("the journal has a secret of an unknown form, which cannot be hidden")
            self._secrets[found] = blake2b(found, key=self._key, digest_size=len(found) // 2).hexdigest().encode()

    def hide(self, content: bytes) -> bytes:
        """Return the content without the secrets."""
        return _SECRET.sub(lambda match: self._secrets.get(match[0], match[0]), content)


def dump_of_journal(path: Path) -> Iterator[bytes]:
    """Yield the lines of the dump. Changes no file, also while a controller writes the journal.

    The first step raises JournalError if the journal has no snapshot or cannot be read, and OSError.
    """
    found = read_journal(ReadableDirectory(path))
    if found is None:
        raise JournalError(f"{path} contains no journal")
    controller, _ = decode_snapshot(found.payload)
    pseudonyms = Pseudonyms()
    _add_secrets(controller, pseudonyms)
    settings = msgspec.structs.replace(controller.settings, tenants=())
    state = dump_controller(controller)
    _remove_contents(state.objects)
    base = pseudonyms.hide(msgspec.msgpack.encode(state))
    yield msgspec.json.encode(Header(found.version, settings, base=base))
    number = 0
    for turn in found.turns:
        for record in records_of(turn):
            number += 1
            pseudonyms.add(*_secrets_of(decode_event(record)))
            yield msgspec.json.encode(line_of(number, pseudonyms.hide(bytes(record))))


def _remove_contents(objects: Objects) -> None:
    """Replace the contents of arrays by zeros, as in the lines of events."""
    for launch in objects.tables.get("launch", ()):
        launch.contents = launch.contents and bytes(len(launch.contents))
    for beginning in objects.tables.get("beginning launch", ()):
        beginning.message = without_contents(beginning.message)
    for inboxes in objects.tables.get("inboxes", ()):
        order, waiting = inboxes._turns
        inboxes._turns = order, {each: [without_contents(message) for message in waiting[each]] for each in waiting}


def _add_secrets(controller: Controller, pseudonyms: Pseudonyms) -> None:
    tokens = controller.tokens
    pseudonyms.add(tokens.client, tokens.host, *(each.token_hash for each in tokens.tenants()))
    pseudonyms.add(*(each.token_hash for each in controller.settings.tenants))
    for peer in controller.connections.peers.values():
        pseudonyms.add(peer.secret, peer.hello.token if peer.hello is not None else "")
    pseudonyms.add(*(session.secret for session in controller.sessions.values()))


def _secrets_of(event: e.AnyEvent) -> tuple[str, ...]:
    match event:
        case e.ConnectionOpened(secret=secret):
            return (secret,)
        case e.SessionsPersisted(secrets=secrets):
            return tuple(secrets.values())
        case e.Received(message=m.Hello(token=token)):
            return (token,)
        case e.Received(message=m.SetTenant(token_hash=token)):
            return (token,)
    return ()
