"""The life of launches, and of the functions and programs that they run. Pure.

- A client's launch arrives: `launcher.Launcher.launch_within_window`, then `launch`.
- Its nodes and gangs are made: `launch_builder.LaunchBuilder`.
- A node is put in line: `scheduler.Scheduler.enqueue`; or deferred: `dependency_tracker.DependencyTracker.order`.
- A ready node is committed, and its gangs get their positions in the order: `scheduler.Scheduler._commit`.
- A policy chooses the node: `policies.find_policy` by name; `policy.Policy` is the interface.
- A gang is sent to its hosts: `launcher.Launcher.start_ready`, with `run_messages.RunMessages`; a delegated one:
  `delegated_runs.DelegatedRuns.start`.
- A gang ends or fails: `launcher.Launcher.parts_ended`, `part_failed`, `fail`.
- An island fails: its launches in `failures.Failures`, and those that survive in `requeued_launches.RequeuedLaunches`.
  Its arrays fail in `controller.islands.island_losses`.
- Bytes of a client arrive, or are not needed any more: `launch_feeds.LaunchFeeds`.
- A function is compiled: `compilation.Compilation`; a program is lowered: `registry.ProgramRegistry`.
- Messages leave in order: `outbox.Outbox`, over `connections.Connections`.
"""
