"""Pipelines of unchanged models: `atoll.pipeline` cuts a loss function into stages on meshes of their own.

Section 5.3 of the paper. The loss function is traced once and cut (`pipeline_cut.py`); each part gets compiled
functions (`parts.py`); a schedule, which is data (`schedule.py`, `schedules.py`), says in which order each stage runs
them (`order.py`); a step of training is one `atoll.program` (`step.py`).
"""
