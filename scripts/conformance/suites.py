"""Which test files a suite holds, and which of them a shard of it.

JAX's tests are read from a source checkout at the tag of the installed version, for the wheel leaves them out; what
other projects have is in `projects`.
"""

from __future__ import annotations

import enum
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from .projects import PROJECTS, Sources, SuiteError, TestFile, check_version, project_files, version_of

CORE = (
    "array_test",
    "multi_device_test",
    "jax_jit_test",
    "aot_test",
    "layout_test",
    "memories_test",
    "transfer_guard_test",
    "xla_metadata_test",
    "random_test",
)
FULL = (
    "pmap_test",
    "pjit_test",
    "shard_map_test",
    "api_test",
    "lax_test",
    "lax_control_flow_test",
    "colocated_python_test",
)

# JAX's files of which no test passes on stock JAX here, by why its tests skip themselves.
NOTHING_ON_STOCK = {
    "they need a GPU": (
        "cudnn_fusion_test",
        "distributed_test",
        "fused_attention_stablehlo_multigpu_test",
        "fused_attention_stablehlo_test",
        "gpu_memory_flags_test",
        "magma_linalg_test",
        "mock_gpu_test",
        "mock_gpu_topology_test",
        "multiprocess_gpu_test",
        "pallas/mgpu_attention_test",
        "pallas/mgpu_collective_matmul_test",
        "pallas/mgpu_examples_test",
        "pallas/mgpu_matmul_test",
        "pallas/mgpu_ragged_dot_test",
        "pallas/triton_gpu_info_test",
        "pallas/triton_pallas_test",
        "pgle_test",
        "scaled_matmul_stablehlo_test",
    ),
    "they need a TPU": (
        "lax_scipy_spectral_dac_test",
        "pallas/export_back_compat_pallas_test",
        "pallas/pallas_error_handling_test",
        "pallas/pallas_lowering_determinism_test",
        "pallas/tpu_all_gather_test",
        "pallas/tpu_fusible_matmul_test",
        "pallas/tpu_fusible_matmul_with_stateful_fusions_test",
        "pallas/tpu_gmm_test",
        "pallas/tpu_ops_test",
        "pallas/tpu_pallas_async_test",
        "pallas/tpu_pallas_distributed_test",
        "pallas/tpu_pallas_memory_space_test",
        "pallas/tpu_pallas_mpmd_test",
        "pallas/tpu_pallas_random_test",
        "pallas/tpu_pallas_state_test",
        "pallas/tpu_ragged_paged_attention_test",
        "pallas/tpu_side_effects_test",
        "pallas/tpu_sparsecore_pallas_distributed_test",
        "pallas/tpu_splash_attention_kernel_test",
        "pallas/tpu_splash_attention_kernel_sharded_test",
        "pallas/tpu_trace_value_test",
        "unary_ops_accuracy_test",
    ),
    "XLA has no ragged all-to-all on CPUs": ("ragged_collective_test",),
    "they do not run under pytest": (
        "absl_cpp_logging_test",
        "distributed_initialize_test",
        "pallas/tpu_pallas_call_print_test",
        "scaled_dot_test",
    ),
    "they need JAX's own builds": (
        "hypothesis_test_util_test",
        "local_wheel_smoke_test",
        "pallas/tpu_sparsecore_pallas_debug_check_test",
    ),
    "they need 64-bit types from the start": ("cholesky_update_test",),
    "they need PyTorch, which scripts/conformance-requirements.txt leaves out": (
        "pallas/mgpu_torch_test",
        "pytorch_interoperability_test",
    ),
    "JAX has switched them off": ("debug_info_test", "mosaic_test"),
}

# The file of a checkout of JAX with its version, and the pattern of the version.
_VERSION = "jax/version.py", r'^_version = "([^"]+)"'

# Wall seconds of each file on stock JAX, measured here: they balance the shards, and need not be exact.
SECONDS = Path(__file__).with_name("seconds.json")


class Suite(enum.StrEnum):
    CORE = "core"
    FULL = "full"  # the long files, those of `core` not among them
    MORE = "more"  # every other file of JAX's
    OPTAX = "optax"
    CHEX = "chex"
    EQUINOX = "equinox"
    FLAX = "flax"
    ORBAX = "orbax"
    PATHWAYSUTILS = "pathwaysutils"
    ALL = "all"


def files_of(suite: Suite, sources: Sources) -> list[TestFile]:
    """The files of a suite, in the order to run them.

    Raises `SuiteError` if a checkout is missing or at another version than what is installed.
    """
    if suite is Suite.ALL:
        return [file for each in Suite if each is not Suite.ALL for file in files_of(each, sources)]
    if suite in PROJECTS:
        return project_files(suite, sources)
    names: Sequence[str] = {Suite.CORE: CORE, Suite.FULL: FULL}.get(suite) or more(sources)
    return [jax_file(name, sources) for name in names]


def left_out() -> list[str]:
    return [name for names in NOTHING_ON_STOCK.values() for name in names]


def more(sources: Sources) -> list[str]:
    """JAX's files that no other suite holds, but those of which no test passes on stock."""
    tests = matching_checkout(sources) / "tests"
    paths = sorted({*tests.glob("*_test.py"), *tests.glob("pallas/*_test.py")})
    names = [str(path.relative_to(tests).with_suffix("")) for path in paths]
    return [name for name in names if name not in {*CORE, *FULL, *left_out()}]


def named_file(name: str, sources: Sources) -> TestFile:
    """The file that a user calls `array_test`, `array_test.py` or `optax/alias_test`."""
    name = name.removesuffix(".py")
    project = name.partition("/")[0]
    if project not in PROJECTS:
        return jax_file(name, sources)
    files = project_files(project, sources)
    for file in files:
        if file.name == name:
            return file
    raise SuiteError(f"{project} has no test file {name}; it has {', '.join(file.name for file in files)}")


def jax_file(name: str, sources: Sources) -> TestFile:
    root = matching_checkout(sources)
    path = root / "tests" / f"{name}.py"
    if not path.is_file():
        raise SuiteError(f"the JAX checkout has no tests/{name}.py")
    origin = f"jax {checkout_version(sources)}"
    left_out = ("jax", root / "jax")
    return TestFile(name, path, root, root / "pyproject.toml", origin, foreign=root, left_out=left_out)


def matching_checkout(sources: Sources) -> Path:
    root = sources.checkout("jax")
    if not sources.other_version:
        try:
            check_version(root, *_VERSION, "jax")
        except SuiteError as error:
            raise SuiteError(f"{error}, or accept it with --other-version") from error
    return root


def checkout_version(sources: Sources) -> str:
    """The version of JAX's checkout. Raises `SuiteError`."""
    return version_of(sources.checkout("jax"), *_VERSION, "jax")


# ---- shards


def measured(path: Path = SECONDS) -> dict[str, float]:
    """Seconds by file name."""
    seconds: dict[str, float] = json.loads(path.read_text())
    return seconds


def record(seconds: dict[str, float], path: Path = SECONDS) -> None:
    """Adds what was measured."""
    known = measured(path) | seconds
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def shard(files: Sequence[TestFile], part: str, seconds: dict[str, float]) -> list[TestFile]:
    """Part `i/n` of the files, whose parts take about as long; a file that was not measured takes what most take.

    The same files and seconds give the same parts everywhere. Raises `SuiteError`.
    """
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SuiteError(f"a shard is one of several, such as 1/4, not {part!r}")
    usual = statistics.median(seconds.values()) if seconds else 1.0
    loads = [0.0] * int(count)
    mine = set()
    for file in sorted(files, key=lambda file: (-seconds.get(file.name, usual), file.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += seconds.get(file.name, usual)
        if lightest == int(number) - 1:
            mine.add(file.name)
    return [file for file in files if file.name in mine]
