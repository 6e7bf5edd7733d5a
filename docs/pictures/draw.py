"""Draws the pictures of this site: `python docs/pictures/draw.py` writes them beside this file.

The pictures are data here, so that a test can check that every file they name exists.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from docs.pictures import rewards, waits_history
from docs.pictures.rewards import RewardChart
from docs.pictures.waits_history import Chart

HERE = Path(__file__).resolve().parent
_LINE = 17
_FONT = 'font-family="Helvetica, Arial, sans-serif"'


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and lines of text below it; lines that end in .py are set as code."""

    x: int
    y: int
    width: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = "#eef3fb"

    @property
    def height(self) -> int:
        return 16 + _LINE * (1 + len(self.lines))

    def svg(self) -> str:
        text = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" fill="{self.fill}" '
            'stroke="#41618f"/>',
            f'<text x="{self.x + 10}" y="{self.y + 20}" font-size="14" font-weight="bold" {_FONT}>'
            f"{escape(self.title)}</text>",
        ]
        for i, line in enumerate(self.lines):
            font = 'font-family="monospace"' if line.endswith(".py") else _FONT
            text.append(
                f'<text x="{self.x + 10}" y="{self.y + 20 + _LINE * (i + 1)}" font-size="12" fill="#333" {font}>'
                f"{escape(line)}</text>"
            )
        return "\n".join(text)


@dataclass(frozen=True)
class Arrow:
    """From point to point, with words beside its middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    words: str = ""
    both: bool = False

    def svg(self) -> str:
        (x1, y1), (x2, y2) = self.start, self.end
        marks = 'marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if self.both else "")
        line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555" stroke-width="1.4" {marks}/>'
        if not self.words:
            return line
        x, y = (x1 + x2) // 2 + 6, (y1 + y2) // 2 - 5
        return line + f'\n<text x="{x}" y="{y}" font-size="12" fill="#555" {_FONT}>{escape(self.words)}</text>'


Picture = tuple[int, int, tuple[Box | Arrow | Chart | RewardChart, ...]]

GREEN, ORANGE, GREY = "#eaf6ec", "#fdf1e0", "#f4f4f4"

PROCESSES: Picture = (
    860,
    420,
    (
        Box(
            20,
            20,
            240,
            "your Python process",
            ("JAX and jaxlib's IFRT proxy client", "client/plugin.py"),
        ),
        Box(
            20,
            160,
            240,
            "proxy: one per client",
            ("ifrt/proxy_main.py", "IFRT requests to programs, launches"),
            GREEN,
        ),
        Box(
            20, 300, 240, "engine: one per cluster", ("engines/engine_main.py", "starts, watches, restarts hosts"), GREY
        ),
        Box(380, 160, 210, "controller: one per cluster", ("controller_process (shell)", "controller/core.py"), ORANGE),
        Box(640, 60, 200, "worker: one per host", ("worker/worker_main.py", "compiles, stores, runs plans"), GREEN),
        Box(
            640,
            240,
            200,
            "worker: one per host",
            ("worker/worker_main.py", "its devices: one XLA mesh", "with the island's other hosts"),
            GREEN,
        ),
        Arrow((140, 87), (140, 160), "gRPC; large arrays in shared memory", both=True),
        Arrow((260, 190), (380, 190), "control", both=True),
        Arrow((590, 175), (640, 110), "control", both=True),
        Arrow((590, 205), (640, 260), "control", both=True),
        Arrow((260, 170), (640, 75), "bulk data", both=True),
        Arrow((740, 127), (740, 240), "bulk data", both=True),
        Arrow((260, 320), (400, 227), "control", both=True),
        Arrow((260, 345), (640, 300), "starts, watches"),
    ),
)

# For the users of a cluster: no files.
OVERVIEW: Picture = (
    860,
    330,
    (
        Box(20, 20, 230, "your script", ("one Python process: JAX",)),
        Box(20, 130, 230, "a colleague's script", ("one Python process: JAX",)),
        Box(20, 240, 230, "a notebook", ("one Python process: JAX",)),
        Box(
            330,
            105,
            190,
            "controller",
            ("one order for all work", "places of arrays", "shares, quotas, failures"),
            ORANGE,
        ),
        Box(640, 20, 200, "island 0: one XLA mesh", ("host 0: 4 devices", "host 1: 4 devices"), GREEN),
        Box(640, 125, 200, "island 1: one XLA mesh", ("host 2: 4 devices", "host 3: 4 devices"), GREEN),
        Box(640, 235, 200, "island 2: one XLA mesh", ("host 4: 8 devices",), GREEN),
        Arrow((250, 50), (330, 120), both=True),
        Arrow((250, 150), (330, 145), both=True),
        Arrow((250, 260), (330, 170), both=True),
        Arrow((520, 120), (640, 60), "launches", both=True),
        Arrow((520, 145), (640, 155), both=True),
        Arrow((520, 170), (640, 250), both=True),
        Arrow((740, 88), (740, 125), "arrays", both=True),
        Arrow((740, 193), (740, 235), "arrays", both=True),
        Arrow((250, 30), (640, 30), "arrays", both=True),
    ),
)

LAUNCH: Picture = (
    900,
    800,
    (
        Box(
            20,
            20,
            400,
            "1  request",
            (
                "jaxlib's client sends Execute and numbers the results",
                "ifrt/ifrt_service.py",
                "ifrt/requests/executable_requests.py",
            ),
            GREEN,
        ),
        Box(20, 135, 400, "2  launch", ("one message: program, handles, feeds", "session/cluster_session.py"), GREEN),
        Box(
            20,
            235,
            400,
            "3  check",
            ("arguments, memory, failed islands", "launch/launcher.py", "launch/launch_checks.py"),
            ORANGE,
        ),
        Box(
            20,
            350,
            400,
            "4  put in line",
            ("each node of the program is enqueued, one line an island", "launch/scheduler.py"),
            ORANGE,
        ),
        Box(
            20,
            450,
            400,
            "5  policy: which ready node is committed next",
            ("chosen by name in the settings", "launch/policies/__init__.py"),
            ORANGE,
        ),
        Box(20, 550, 400, "6  reserve memory, in order", ("launch/reservations.py",), ORANGE),
        Box(
            20,
            635,
            400,
            "7  dispatch",
            ("one message per host: Run, later Dispatch", "launch/gang_starts.py"),
            ORANGE,
        ),
        Box(
            480,
            635,
            400,
            "8  run the plan",
            ("segment by segment; blocked while bytes are missing", "worker/plan_executor.py", "worker/step_runner.py"),
            GREEN,
        ),
        Box(480, 520, 400, "9  completion", ("reported many in one message", "worker/completions.py"), GREEN),
        Box(480, 420, 400, "10  results are ready, waits are answered", ("state/buffer_directory.py",), ORANGE),
        Box(
            480,
            285,
            400,
            "11  a shard is freed",
            (
                "decided once released and no gang needs it:",
                "state/buffer_directory.py",
                "sent: launch/buffer_releases.py",
                "done on the host: worker/store.py",
            ),
            ORANGE,
        ),
        Box(
            480,
            135,
            400,
            "if an island fails",
            (
                "decided: controller/islands/island_recovery.py",
                "states: cluster/lifecycle.py",
                "restarted: engines/island_processes.py",
                "which launches fail: launch/failures.py",
            ),
            GREY,
        ),
        Arrow((220, 103), (220, 135)),
        Arrow((220, 202), (220, 235)),
        Arrow((220, 319), (220, 350)),
        Arrow((220, 417), (220, 450)),
        Arrow((220, 517), (220, 550)),
        Arrow((220, 600), (220, 635)),
        Arrow((420, 665), (480, 665)),
        Arrow((680, 635), (680, 587)),
        Arrow((680, 520), (680, 470)),
        Arrow((680, 420), (680, 384)),
    ),
)


def packages_picture() -> Picture:
    """Draw the packages by layer, from the table in tests/test_layers.py."""
    from tests.test_layers import LAYERS

    words = {
        "elastic": "trainings that continue after islands fail",
        "tunix": "weight sync of Tunix",
        "pipelines": "models divided between meshes: schedules, steps",
        "ffi": "kernels of the script",
        "programs": "functions that become one launch",
        "arrays": "publish and subscribe",
        "pins": "pins of versions",
        "named_arrays": "versions of arrays",
        "client": "plug-in, connect, slices",
        "data": "input on the hosts",
        "tensorflow": "TensorFlow on JAX",
        "testing": "API of virtual time",
        "operate": "the command `atoll`",
        "virtual": "clusters in virtual time",
        "engines": "start, watch and end hosts",
        "manifests": "Kubernetes and Slurm",
        "web": "web page, metrics over HTTP",
        "controller_process": "the process around the controller",
        "ifrt": "jaxlib's protocol: the front end",
        "controller": "all decisions of a cluster",
        "executables": "programs that jaxlib's client sends",
        "migration": "sessions that move",
        "session": "parts of all front ends",
        "worker": "one per host: plans, stores, devices",
        "devices": "XLA's and null devices",
        "telemetry": "report, traces, metrics",
        "host_services": "Python, profiles",
        "journal": "events on disk",
        "launch": "the life of a launch",
        "peers": "connections of peers",
        "transfers": "the data plane",
        "state": "sessions, buffers, gangs, tenants",
        "protocol": "messages",
        "ir": "programs, passes, plans",
        "security": "certificates, tokens, permissions",
        "leadership": "external leases",
        "cluster": "settings, meshes, slices, island states, processes",
        "grpc": "HTTP/2, gRPC",
        "wire": "framing, connections, TLS",
        "atomic_files": "files",
        "decodable": "types that any thread may decode",
        "errors": "exceptions",
        "missing": "what does not exist",
        "quantities": "units",
        "retries": "backoff",
        "_version": "version",
    }
    boxes: list[Box | Arrow | Chart | RewardChart] = []
    y = 20
    for layer in reversed(LAYERS):
        width = (860 - 20 * (len(layer) - 1)) // len(layer)
        for i, package in enumerate(layer):
            boxes.append(
                Box(20 + i * (width + 20), y, width, package, (words[package],), GREEN if i % 2 else "#eef3fb")
            )
        y += 75
    return 900, y, tuple(boxes)


def svg(picture: Picture) -> str:
    width, height, parts = picture
    arrows = [part.svg() for part in parts if isinstance(part, Arrow)]
    boxes = [part.svg() for part in parts if not isinstance(part, Arrow)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
            *boxes,
            *arrows,
            "</svg>\n",
        ]
    )


def pictures() -> dict[str, Picture]:
    return {
        "overview.svg": OVERVIEW,
        "processes.svg": PROCESSES,
        "launch.svg": LAUNCH,
        "packages.svg": packages_picture(),
        "waits-history.svg": waits_history.picture(),
        "rewards.svg": rewards.picture(),
    }


if __name__ == "__main__":
    for name, picture in pictures().items():
        (HERE / name).write_text(svg(picture))
