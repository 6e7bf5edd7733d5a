"""Interaction transcripts of the controller: text files with commands, and the controller's reaction to each of them.

`python -m tests.controller.transcripts --rewrite` runs the commands and writes what the controller does now below them.
`tests/controller/test_transcripts.py` compares. README.md in this directory explains the commands.
"""
