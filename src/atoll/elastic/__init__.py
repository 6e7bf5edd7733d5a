"""Trainings that continue when islands fail and grow again when islands restart (paper, sections 4.1 and 4.3).

`run` is the loop over steps. `data_parallel` makes a training from two functions, and `pipeline` makes one from a loss
function. Any other training implements the protocol `Training`.
"""

from atoll.elastic.compile_ahead import CompilesAhead as CompilesAhead
from atoll.elastic.data_parallel import data_parallel as data_parallel
from atoll.elastic.elastic_stages import pipeline as pipeline
from atoll.elastic.run import Change as Change
from atoll.elastic.run import Make as Make
from atoll.elastic.run import Run as Run
from atoll.elastic.run import Training as Training
from atoll.elastic.run import run as run
