"""Interaction transcripts of the controller: text files of commands with the controller's reactions.

`python -m tests.controller.transcripts --rewrite` runs the commands and records the controller's current reactions.
`tests/controller/test_transcripts.py` compares them with the records. README.md in this directory explains the
commands.
"""
