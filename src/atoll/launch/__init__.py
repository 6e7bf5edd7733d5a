"""The life of launches, and of the functions and programs that they run. Pure.

- A client's launch arrives: `launcher.Launcher.launch`. `launch_builder.LaunchBuilder` makes its nodes.
- A node is put in line: `scheduler.Scheduler.enqueue`; or deferred: `dependency_tracker.DependencyTracker.order`.
- A ready node is committed, and its gangs get their places in the order: `scheduler.Scheduler.next`.
- A policy chooses the node: `policies.find_policy` by name; `policy.Policy` is the interface.
- A gang is sent to its hosts: `launcher.Launcher.start_ready`; a delegated one: `delegated_runs.DelegatedRuns.start`.
- A gang ends or fails: `launcher.Launcher.runs_ended`, `run_failed`, `fail`. An island fails: `failures.Failures`.
- A function is compiled: `compilation.Compilation`; a program is lowered: `registry.ProgramRegistry`.
- Messages leave in order: `outbox.Outbox`, over `connections.Connections`.
"""
