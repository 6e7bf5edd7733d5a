"""Results that take as long as they like, and what waits for them: the rules for calls of colocated Python.

A gang that waits for such a result on its host would take room there from everybody. So a launch that needs one waits
in the controller, and where it needs nothing else it *stands aside*: what its session launches after it goes on before
it. It joins its lines by its age as soon as the results are there. What it gives is promised in its turn.

Order is kept: a launch that also needs what is no promise waits in its place in line, since a later one may consume
that input; and so does a call of Python that needs what a launch aside will give, since calls have an order of their
own.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.scheduling.tickets import Payload, Promise, Ticket


def await_promises(
    tickets: Sequence[Ticket[Payload]], inputs: Sequence[Promise[Payload] | None], *, colocated: bool
) -> Promise[Payload] | None:
    """Has the tickets of a launch wait for those of its inputs that are promised; `colocated`: it calls Python.

    Returns the promise of its own results; None where they are in time for whatever comes after it in line.
    """
    unkept = {id(each): each for each in inputs if each is not None and not each.is_kept}
    # A call of Python may be in flight together with the one that gives its input.
    pending = [each for each in unkept.values() if each.is_aside or not colocated]
    for promise in pending:
        for ticket in tickets:
            ticket.missing += 1
            promise.waiting.append(ticket)
    if colocated:
        return Promise(is_aside=False)
    if len(pending) != 1 or len(tickets) != 1 or any(each is not pending[0] for each in inputs):
        return None
    tickets[0].aside = Promise(is_aside=True)
    return tickets[0].aside
