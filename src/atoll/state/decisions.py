"""The decisions that a controller makes for the events of its journal.

A journal is replayed with the decisions of the version that wrote it, because hosts have received these. The setting
`decisions` has the number of that version's decisions.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Decisions:
    """Decisions that differ between versions. Each is False for the versions before the change.

    Attributes:
        counts_lists: All long lists in a message count for its cost. Before, some did not count.
        exact_charges: Charges are exact: see `GangCharges`.
        follows_losses: Functions of several islands are treated according to the states of all of them. Before, only
            the island that had restarted counted.
        frees_errors: Hosts forget buffers that have become errors. Before, they waited for the client.
        completes_in_steps: A turn looks at the pending versions of sessions of whose arrays some are ready or have
            failed, and at some of these sessions only. It frees some of the arrays of versions that end. Before, a turn
            looked at all pending versions, and freed all arrays of a version at once.
        keeps_parts: Memory that other hosts have for results which are not complete counts until their launches have
            ended. Before, it counted as free at once.
        counts_numbers: A session that has released a function waits for its compilation if it has the same function
            under another number. Before, it did not wait.
        keeps_functions: A session keeps a function that loses an island while it is compiled again. Before, it lost the
            function if another host then reported a failure.
        releases_in_steps: Deferred releases of functions are done in steps. Before, all were done at once.
        begins_in_steps: A version with many arrays begins over several flushes. Meanwhile, later messages of its
            session wait. Before, all arrays were checked and marked at once.
        counts_values: Programs with few nodes but many values are lowered in steps. Before, they were lowered at once.
        notes_failures: A session keeps a function that cannot be compiled again, with the reason, which its launches
            get. Before, it lost the function, and the launches failed on the hosts, which did not know it.
        frees_once: A host gets one message to forget a result of a failed launch that the client awaits and has
            released. Before, it got two.
        counts_ended_parts: A launch whose delegated run was revoked fails with an island on which it has begun and not
            ended, also while hosts of other islands still run their parts. Before, it continued without the values that
            were lost, and waited forever.
        waits_for_repeats: Launches of a function that could not be compiled again wait while it is compiled once more.
            Before, they failed with the former reason.
        counts_unbegun_parts: A launch whose delegated run was revoked, and not begun on an island, fails with that
            island if it is removed, and is otherwise continued there, as a launch in line. Before, its results there
            were lost, and it waited forever for an island that was removed, or if all of its islands had failed.
        keeps_kinds: A node that lacks several kinds of inputs waits for one that is still missing. Before, it waited
            for the kind that was noted last, also after that had arrived, and the watchdog did not report the others.
        drops_later: A host that is not there when files of spilled arrays are dropped removes them when it is there
            again, also those of a persisted session whose tenant does not exist anymore. Before, they stayed.
        watches_beside_python: The watchdog reports gangs that run beside one that calls Python. Before, it took them
            for gangs that wait for that one.
        replaces_early: A spare engine also gets the role of an engine that is lost before all islands have become
            ready. Before, a cluster that continued from such a journal waited forever.
        writes_what_stays: If a version is complete after newer ones, and therefore freed at once, it is not written to
            files. Before, it was put in line, and then no other version of its tenant was written.
        tries_after_calls: An island tries to start gangs when a call into Python has ended, because full hosts may take
            gangs then. Before, gangs in line waited for another event of the island, if necessary forever.
        admits_more_callbacks: A session can have 24 runs in flight that wait for its callbacks, and an island 28.
            Before, these limits were 20 and 24.
        moves_over_islands: A migration may change the islands of a function on several islands. Before, this was
            refused, also if a suspended session was resumed.
        counts_grouped_reads: A launch that reads several arrays with one request uses all of them. So it fails if one
            of them fails before it starts, and they stay on their devices until then. Before, it used none of them.
        awaits_processes: A call of Python on several hosts fails by the end of a process when the processes on the
            other hosts have also ended, so that the loss of a host is known. Before, it failed at once.
        drops_sources: A host drops the source of a function that its session has released before the source arrived
            there. Before, it compiled the function, and kept it forever.
        avoids_overruns: A new slice is on an island with a stopped run that has not ended only if no other island fits.
            Before, this run did not count.
        names_ended_runs: A host learns which runs of a closed world must not begin in a later one. Before, such a run
            could begin there and meet another run on the other hosts.
        joins_blocks: The memory that a joint gang takes for a value is released at once if it was not divided. Before,
            it was released on each island if it was released with other memory, and then counted as released often.
        joins_few: A call of a function that communicates between islands has a joint gang also on few islands. Before,
            it had one gang on each, and some islands could begin it while the others never did.
        starts_together: The gangs of such a call that has no joint gang start in one step. Before, each started when
            its island could, and some islands could begin the call while the others never did.
        replaces_soon: The world of a run that failed on one host because its session has ended is replaced after a
            second. Before, this took five seconds, as for other runs that wait for a host where they failed.
    """

    counts_lists: bool
    exact_charges: bool
    follows_losses: bool
    frees_errors: bool
    completes_in_steps: bool
    keeps_parts: bool
    counts_numbers: bool
    keeps_functions: bool
    releases_in_steps: bool
    begins_in_steps: bool
    counts_values: bool
    notes_failures: bool
    frees_once: bool
    counts_ended_parts: bool
    waits_for_repeats: bool
    counts_unbegun_parts: bool
    keeps_kinds: bool
    drops_later: bool
    watches_beside_python: bool
    replaces_early: bool
    writes_what_stays: bool
    tries_after_calls: bool
    admits_more_callbacks: bool
    moves_over_islands: bool
    counts_grouped_reads: bool
    awaits_processes: bool
    drops_sources: bool
    avoids_overruns: bool
    names_ended_runs: bool
    joins_blocks: bool
    joins_few: bool
    starts_together: bool
    replaces_soon: bool

    @classmethod
    def of(cls, number: int) -> Decisions:
        """Return the decisions for a value of the setting `decisions`. Each value includes those of lower ones."""
        return cls(
            counts_lists=number >= 1,
            exact_charges=number >= 2,
            follows_losses=number >= 2,
            frees_errors=number >= 3,
            completes_in_steps=number >= 4,
            keeps_parts=number >= 4,
            counts_numbers=number >= 4,
            keeps_functions=number >= 5,
            releases_in_steps=number >= 5,
            begins_in_steps=number >= 5,
            counts_values=number >= 5,
            notes_failures=number >= 6,
            frees_once=number >= 6,
            counts_ended_parts=number >= 7,
            waits_for_repeats=number >= 7,
            counts_unbegun_parts=number >= 8,
            keeps_kinds=number >= 8,
            drops_later=number >= 9,
            watches_beside_python=number >= 9,
            replaces_early=number >= 10,
            writes_what_stays=number >= 10,
            tries_after_calls=number >= 10,
            admits_more_callbacks=number >= 10,
            moves_over_islands=number >= 10,
            counts_grouped_reads=number >= 10,
            awaits_processes=number >= 10,
            drops_sources=number >= 10,
            avoids_overruns=number >= 10,
            names_ended_runs=number >= 10,
            joins_blocks=number >= 10,
            joins_few=number >= 10,
            starts_together=number >= 10,
            replaces_soon=number >= 10,
        )
