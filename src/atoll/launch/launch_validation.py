"""Compare the states of launches and gangs with what is counted. For tests, since it looks at all launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from atoll.launch.gang_charges import GangCharges
from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.launch.scheduler import Scheduler
from atoll.state.gang_states import GangState
from atoll.state.launch_states import LaunchState
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun


def validate_launches(
    scheduler: Scheduler[GangRun],
    in_flight: Mapping[int, Gang[GangRun]],
    charges: GangCharges,
    left_out: LeftOutCollectives,
    sessions: Container[int],
) -> None:
    """Raise AssertionError if states contradict what is counted."""
    scheduler.validate()
    differences = list(scheduler.count_differences(in_flight.values()))
    assert not differences, differences
    states = (GangState.HELD, GangState.GRANTED, GangState.RUNNING)
    assert all(gang.state in states for gang in in_flight.values())
    left_out.validate()
    running: Counter[object] = Counter(
        (gang.islands or gang.island, gang.node.tenant.name)
        for gang in in_flight.values()
        if gang.state is GangState.RUNNING
    )
    for key, tally in [*charges.tallies.items(), *charges.joint.items()]:
        assert tally.running == running[key], f"tally {key} counts {tally.running} gangs, and has {running[key]}"
    waiting = (gang for node in scheduler.all_nodes() for gang in node.gangs)
    gangs = [*in_flight.values(), *waiting]
    for launch in {id(gang.run.launch): gang.run.launch for gang in gangs}.values():
        assert launch.state is not LaunchState.ENDED, f"{launch.program.name} has ended, and has gangs"
        assert (launch.state is LaunchState.FAILING) == (launch.error is not None)
        if launch.error is None and launch.session in sessions:
            left = sum(not gang.is_over for node in launch.nodes for gang in node.gangs)
            assert launch.pending == left, f"{launch.program.name} counts {launch.pending} gangs and has {left}"
