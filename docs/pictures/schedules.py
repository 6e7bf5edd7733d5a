"""Draws tables of schedules above the real steps that ran by them: `python docs/pictures/schedules.py`.

The layers sleep (`benchmarks.paper.sleeping`): so four devices are four, on any machine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import astuple
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PICTURE = HERE / "schedules.png"
NAMES = ("gpipe", "1f1b", "zb-h1")
_MICROBATCHES = 6


def main() -> None:
    os.environ["JAX_PLATFORMS"], os.environ["ATOLL_ISLANDS"] = "atoll", "4x1x1"
    sys.path.insert(0, str(ROOT))
    import matplotlib.pyplot as plt

    import atoll
    from atoll.pipelines.entries import Times
    from benchmarks.paper import sleeping

    sleeping.tell_workers()
    plt.switch_backend("agg")
    figure, axes = plt.subplots(2 * len(NAMES), figsize=(11, 3.4 * len(NAMES)), layout="constrained")
    for name, (above, below) in zip(NAMES, zip(axes[::2], axes[1::2], strict=True), strict=True):
        pipeline = sleeping.Pipeline(name, _MICROBATCHES)
        pipeline.run(3)  # compiles, and lets the scheduler see how long gangs take
        pipeline.wait()
        with atoll.trace() as spans:
            pipeline.run(1)
            pipeline.wait()
        pipeline.table.plot(Times(*[1e3 * each for each in astuple(pipeline.times)]), above)
        pipeline.table.plot_run(spans, below)
    figure.savefig(PICTURE, dpi=80)


if __name__ == "__main__":
    main()
