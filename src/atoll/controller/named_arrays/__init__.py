"""Named arrays in the controller: the requests for versions, and what moves, copies, stores and frees their arrays.

The package `atoll.named_arrays` decides in which state a version is. The modules of this package perform that:

- A session publishes, asks for and closes versions: `published_arrays`, which performs all actions.
- A session without a client owns the arrays of a tenant's versions: `vaults`.
- Sessions read a version, each from the copy that `atoll.named_arrays.transfer_trees` chooses: `version_reads`, by the
  programs of `read_programs`.
- A version gets copies on other islands, as replicas or before a drain: `array_copies`.
- A version is written to files, and restored from them: `array_files`.
- A version that is in files leaves devices whose memory a launch waits for: `version_relief`.
"""
