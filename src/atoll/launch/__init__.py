"""The life of launches, and of the functions and programs that they run. Pure.

- All parts of a launch's life are made and connected: `launches.Launches`.
- A client's launch arrives: `launcher.Launcher.launch_within_window`, then `launch`.
- Its nodes and gangs are made: `launch_builder.LaunchBuilder`.
- A launch is put in line: `launch_queue.LaunchQueue.line_up`; its nodes join their lines by
  `scheduler.Scheduler.enqueue`, or are deferred by `dependency_tracker.DependencyTracker.order`.
- A ready node is committed, and its gangs get their positions in the order: `scheduler.Scheduler._commit`.
- A policy chooses the node: `policies.find_policy` by name; `policy.Policy` is the interface.
- A gang is sent to its hosts: `gang_starts.GangStarts.start_ready`, with `run_messages.RunMessages`; a delegated one:
  `delegated_runs.DelegatedRuns.start`. Delegated runs are revoked: `run_revocations.RunRevocations`.
- A gang ends or fails: `gang_ends.GangEnds.parts_ended`, `part_failed`.
- A launch fails: `failing_launches.FailingLaunches.fail`. It ends with its last gang: `launch_ends.LaunchEnds.end`.
- An island fails: its launches in `failures.Failures`, and those that survive in `requeued_launches.RequeuedLaunches`.
  Its arrays fail in `controller.islands.island_losses`.
- Bytes of a client arrive, or are not needed any more: `launch_feeds.LaunchFeeds`.
- A function is compiled: `compilation.Compilation`; a program is lowered: `registry.ProgramRegistry`.
- Messages leave in order: `outbox.Outbox`, over `connections.Connections`.
"""
