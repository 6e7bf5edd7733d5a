"""Islands and their hosts: how they start, fail and restart.

- A failure is detected, and a restart is requested: `island_recovery`.
- The failure changes the island's state: `cluster.lifecycle`. `Controller._subscribe` lists what follows, in order.
- Sessions lose launches and arrays: `island_losses`, with `launch.failures`.
- A restarted island's hosts join again: `host_admission`, `island_hosts`; their relays: `relay_groups`.
- The engine reports and starts islands: `engine_requests`, `engine_role`.
"""
