"""Pipelines of unchanged models: `atoll.pipeline` cuts a loss function into stages on separate meshes.

See section 5.3 of the paper. The loss function is traced once and cut (`pipeline_cut.py`), and each part gets compiled
functions (`parts.py`). A schedule is a table (`schedule.py`, `schedules.py`) that determines the order of the functions
on each stage (`order.py`). A training step is one `atoll.program` (`step.py`).
"""
