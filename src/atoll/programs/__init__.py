"""Traced programs: functions over several compiled functions, as one launch each."""
