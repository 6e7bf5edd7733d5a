"""Dialogs that ask before an operation, and the result of the operation."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial

from nicegui import ui

from atoll.errors import AtollError


async def confirmed(question: str, word: str) -> bool:
    """Ask a question in a dialog, and return whether the person confirms."""
    return bool(await chosen(question, word))


async def chosen(question: str, *words: str) -> str:
    """Ask a question in a dialog, and return the word that the person chooses, "" for none."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Cancel", on_click=lambda: dialog.submit("")).props("flat no-caps")
            for word in words:
                ui.button(word, on_click=partial(dialog.submit, word)).props("no-caps color=negative")
    answer = str(await dialog or "")
    delete(dialog)
    return answer


async def operate(what: str, operation: Awaitable[str]) -> None:
    """Await an operation, and show its result or its error."""
    notification = ui.notification(f"{what} ...", spinner=True, timeout=None)
    try:
        text, kind = await operation, "positive"
    except AtollError as error:
        text, kind = str(error), "negative"
    finally:
        notification.dismiss()
    ui.notify(text, type=kind, multi_line=True, timeout=8000, close_button="Close")


def delete(dialog: ui.dialog) -> None:
    """Delete a dialog, unless it was deleted with its page when its browser closed the page."""
    if not dialog.is_deleted:
        dialog.delete()
