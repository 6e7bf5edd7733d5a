"""The table on screen: the contestants side by side, and whether the targets were reached."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.harness.provenance import describe_commit
from benchmarks.harness.record import BenchmarkRecord, MetricRecord, RunRecord, ratio_to
from benchmarks.harness.statistics import Ratio, number, with_quartiles


def render(run: RunRecord) -> RenderableType:
    table = Table(title=f"{run.name}: medians of {run.rounds} rounds (quartiles)")
    table.add_column("benchmark", min_width=24)
    for title in ("first", "second", "ratio"):
        table.add_column(title, justify="right")
    table.add_column("target")
    table.add_column("reached")
    for benchmark in run.benchmarks:
        table.add_section()
        first, second, *others = (*benchmark.contestants, *("",) * (2 - len(benchmark.contestants)))
        names = [Text(name, style="italic") for name in (first, second)]
        table.add_row(Text(f"{benchmark.key}  {benchmark.title}", style="bold"), *names)
        for metric in benchmark.metrics:
            cells = [_cell(benchmark, metric, backend) for backend in (first, second)]
            title = f"   {metric.title}, {metric.unit}"
            table.add_row(title, *cells, _ratio(metric.ratio), metric.target or "", _reached(metric))
        for other in others:  # peers beside those that are judged against
            table.add_row("", "", Text(other, style="italic"))
            for metric in benchmark.metrics:
                table.add_row(
                    "", "", _cell(benchmark, metric, other), _ratio(ratio_to(metric, benchmark.contestants[0], other))
                )
    failures = [
        Text(f"{benchmark.key}, {name} failed: {error}", style="red")
        for benchmark in run.benchmarks
        for name, error in benchmark.failures.items()
    ]
    return Group(table, describe_machine(run), *failures)


def _cell(benchmark: BenchmarkRecord, metric: MetricRecord, backend: str) -> RenderableType:
    if backend in benchmark.failures:
        return Text("failed", style="red")
    summary = metric.summaries.get(backend)
    if summary is None:
        return "-"
    return with_quartiles(summary)


def _ratio(ratio: Ratio | None) -> str:
    return f"{number(ratio.of_medians)} ({number(ratio.low)}-{number(ratio.high)})" if ratio else "-"


def _reached(metric: MetricRecord) -> RenderableType:
    if metric.target is None:
        return ""
    if metric.reached is None:
        return Text("not measured", style="dim")
    verdict = Text("yes", style="green") if metric.reached else Text("no", style="bold red")
    return verdict if metric.sure else verdict.append(", unsure", "yellow")


def quiet(run: RunRecord) -> str:
    """How much others did before the run."""
    if run.busy_cpus is None:
        return f"load {run.load_before:.2f} before the run"
    return f"{run.busy_cpus:.2f} CPUs busy before the run"


def describe_machine(run: RunRecord) -> RenderableType:
    machine = run.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.memory / 2**30:.1f} GiB, {machine.kernel}",
        f"Python {machine.python}, {packages}",
        f"{run.started}, {describe_commit(machine.commit)}, {run.seconds:.0f} s, {quiet(run)}",
    ]
    text = Text("\n".join(lines))
    if run.busy:
        text.append("\nthe machine was busy: the numbers do not count", style="yellow")
    return text
