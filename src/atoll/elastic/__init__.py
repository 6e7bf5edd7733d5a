"""Trainings that continue when islands fail, and grow again when the islands have restarted (paper, sections 4.1 and
4.3).

`run` is the loop; `data_parallel` makes a training of two functions, `pipeline` one of a loss function; `Training` is
what any other has to be.
"""

from atoll.elastic.data_parallel import data_parallel as data_parallel
from atoll.elastic.elastic_stages import pipeline as pipeline
from atoll.elastic.run import Change as Change
from atoll.elastic.run import Run as Run
from atoll.elastic.run import run as run
from atoll.elastic.training import Make as Make
from atoll.elastic.training import Training as Training
