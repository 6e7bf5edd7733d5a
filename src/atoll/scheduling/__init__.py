"""In which order gangs run. Pure, and free of the controller: what a gang does is opaque here.

- A launch is put in line: `scheduler.Scheduler.enqueue`, with one node (`nodes`) for each of its dispatch units.
- A policy is chosen: `policies.find_policy`, by the name in the cluster's settings; `policy.Policy` is the contract.
- A ready node is picked, committed, and its gangs start: `scheduler.Scheduler.next`.
- A dispatch unit is formed: `dispatch_units.UnitBuilder`, of the gang specifications (`gangs.GangSpec`) of a program.
- Gangs are dispatched one after another instead of ahead: `sequential.SequentialDispatch`.
"""
