"""Options of a cluster as a user specifies them, and the resulting variables and settings."""

from atoll.cluster.settings import ClusterSettings, Dispatch, OnOff, SuspendLower

CLUSTER_OPTIONS = ["--islands", "1x1x2", "--platform", "cuda", "--device-memory", "1KiB", "--dispatch", "sequential"]
CLUSTER_OPTIONS += ["--topology", "2x1", "--policy", "first-come", "--engine", "local"]
CLUSTER_OPTIONS += ["--bulk-tls", "off", "--lease", "5", "--wait", "90", "--ray-address", "head:6379"]
CLUSTER_OPTIONS += ["--ray-resources", "CPU=2", "--ray-labels", "zone=a", "--ray-strategy", "PACK"]
CLUSTER_OPTIONS += ["--spill", "8KiB", "--suspend-lower", "disk", "--suspend-directory", "/aside", "--suspended", "60"]
CLUSTER_OPTIONS += ["--python-read", "/data", "--python-read", "/sets", "--python-write", "/out"]
CLUSTER_OPTIONS += ["--python-network", "off", "--insecure-sandbox"]

CLUSTER_VARIABLES = {
    "ATOLL_ISLANDS": "1x1x2",
    "ATOLL_PLATFORM": "cuda",
    "ATOLL_DEVICE_MEMORY": "1024",
    "ATOLL_DISPATCH": "sequential",
    "ATOLL_POLICY": "first-come",
    "ATOLL_TOPOLOGY": "2x1",
    "ATOLL_ENGINE": "local",
    "ATOLL_BULK_TLS": "off",
    "ATOLL_LEASE": "5.0",
    "ATOLL_WAIT": "90.0",
    "ATOLL_RAY_ADDRESS": "head:6379",
    "ATOLL_RAY_RESOURCES": "CPU=2",
    "ATOLL_RAY_LABELS": "zone=a",
    "ATOLL_RAY_STRATEGY": "PACK",
    "ATOLL_SPILL": "8192",
    "ATOLL_SUSPEND_LOWER": "disk",
    "ATOLL_SUSPEND_DIR": "/aside",
    "ATOLL_SUSPENDED": "60.0",
    "ATOLL_PYTHON_READ": "/data:/sets",
    "ATOLL_PYTHON_WRITE": "/out",
    "ATOLL_PYTHON_NETWORK": "off",
    "ATOLL_INSECURE_SANDBOX": "1",
}

CLUSTER_SETTINGS = ClusterSettings(
    "1x1x2",
    "cuda",
    1024,
    Dispatch.SEQUENTIAL,
    "first-come",
    mesh="2x1",
    lease_seconds=5.0,
    wait_seconds=90.0,
    bulk_tls=OnOff.OFF,
    ray_address="head:6379",
    ray_resources="CPU=2",
    ray_labels="zone=a",
    ray_strategy="PACK",
    spill=8192,
    suspend_lower=SuspendLower.DISK,
    suspend_directory="/aside",
    suspended_seconds=60.0,
    python_read=("/data", "/sets"),
    python_write=("/out",),
    python_network=OnOff.OFF,
    insecure_sandbox=True,
)
