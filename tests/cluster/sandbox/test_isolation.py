"""Tests that a sandboxed process can only see and do what it is granted.

Each test forks a process from one that has imported the sandbox, but neither JAX nor the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.sandbox import landlock, system_calls
from atoll.cluster.sandbox.isolation import user_of
from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces, why_not_confined

pytestmark = pytest.mark.slow

IMPORTS = """
import os, socket, subprocess, sys
from pathlib import Path
import msgspec
from atoll.cluster.sandbox.grants import Sandbox, View
from atoll.cluster.sandbox.isolation import isolate
from atoll.cluster.sandbox.mechanisms import Mechanisms
"""

PRELUDE = f"""{IMPORTS}
base = Path(sys.argv[1])
own = base / "cluster" / "session-1" / "host-0"
sandbox, mechanisms = msgspec.json.decode(sys.argv[2], type=tuple[Sandbox, Mechanisms])
got = isolate(sandbox, mechanisms)

def attempt(action, *arguments):
    try:
        return repr(action(*arguments))
    except (OSError, subprocess.CalledProcessError) as error:
        return type(error).__name__
"""

# Forks a process for each line of its input, and prints the status with which the process has ended.
FORKS = """
import traceback
for line in sys.stdin.buffer:
    code, argv, stdout, stderr = msgspec.json.decode(line)
    if (child := os.fork()) == 0:
        status = 1
        try:
            for number, path in enumerate(("/dev/null", stdout, stderr)):
                opened = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
                os.dup2(opened, number)
                os.close(opened)
            sys.argv = argv
            exec(compile(code, "<sandboxed>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

PROBE = """
import msgspec
from atoll.cluster.sandbox.isolation import probe
print(msgspec.json.encode(probe()).decode())
"""

# JAX has started threads in this process, so that Python and JAX warn of forks.
PROBE_BESIDE_THREADS = "import jax; jax.devices()" + PROBE

WAYS = ["as-it-is", "user-namespace", "landlock"]


@pytest.fixture(scope="session")
def found() -> Mechanisms:
    """Return the mechanisms of this system."""
    probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=True)
    return msgspec.json.decode(probed.stdout, type=Mechanisms)


def test_a_process_with_threads_finds_the_same_mechanisms_without_a_warning(found: Mechanisms) -> None:
    command = [sys.executable, "-W", "always", "-c", PROBE_BESIDE_THREADS]
    probed = subprocess.run(command, capture_output=True, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert msgspec.json.decode(probed.stdout, type=Mechanisms) == found
    assert b"os.fork" not in probed.stderr


Start = Callable[[str, list[str], Path, Path], int]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Return a function that runs code with arguments and files for its outputs, and returns its status."""
    command = [sys.executable, "-P", "-c", IMPORTS + FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forks:
        requests, statuses = forks.stdin, forks.stdout
        assert requests is not None
        assert statuses is not None

        def run(code: str, arguments: list[str], stdout: Path, stderr: Path) -> int:
            requests.write(msgspec.json.encode((code, ["-c", *arguments], str(stdout), str(stderr))) + b"\n")
            requests.flush()
            return int(statuses.readline())

        yield run
        requests.close()


class Sandboxed:
    """Runs code in a sandbox, next to files that it must not see."""

    def __init__(self, base: Path, mechanisms: Mechanisms, start: Start) -> None:
        self.base = base
        self.mechanisms = mechanisms
        self._start = start
        self.own = base / "cluster" / "session-1" / "host-0"
        self.own.mkdir(parents=True)
        self.outside = {}
        for name in ("cluster/secret", "cluster/session-2/scratch", "journal/snapshot", "home/token", "cache/program"):
            path = base / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"secret of {name}")
            self.outside[name] = path
        (self.own.parent / "shared").write_text("of the session")

    def run(self, code: str, check: bool = True, **changes: object) -> str:
        described = {
            "view": "granted",
            "scratch": str(self.own),
            "scratch_bytes": 1 << 24,
            "shared": str(self.own.parent),
            "hidden": [str(self.base / "cluster")],
            "network": True,
            "memory_bytes": 1 << 30,
            "identity": 7,
        } | changes
        arguments = msgspec.json.encode((described, self.mechanisms)).decode()
        with tempfile.TemporaryDirectory() as directory:
            outputs = [Path(directory, name) for name in ("stdout", "stderr")]
            for each in outputs:
                each.touch()
            status = self._start(PRELUDE + code, [str(self.base), arguments], *outputs)
            stdout, stderr = (each.read_text() for each in outputs)
        if check and status:
            print(stderr)
            raise subprocess.CalledProcessError(status, code)
        return (stdout + ("" if check else stderr)).strip()


@pytest.fixture(params=WAYS)
def sandboxed(request: pytest.FixtureRequest, found: Mechanisms, tmp_path: Path, start: Start) -> Sandboxed:
    """Return a sandbox of each kind: with the best mechanism, with a user namespace, and with Landlock only."""
    match request.param:
        case "user-namespace":
            mechanisms = msgspec.structs.replace(found, namespaces=Namespaces.BY_USER, own_user=False, landlock=0)
        case "landlock":
            mechanisms = msgspec.structs.replace(found, namespaces=Namespaces.NONE, own_user=False)
        case _:
            mechanisms = found
    if request.param != "landlock" and found.namespaces is Namespaces.NONE:
        pytest.skip(f"no namespaces: {found.missing}")
    if request.param == "landlock" and not found.landlock:
        pytest.skip(f"no Landlock: {found.missing}")
    return Sandboxed(tmp_path, mechanisms, start)


@pytest.fixture
def confined(found: Mechanisms, tmp_path: Path, start: Start) -> Sandboxed:
    """Return a sandbox with namespaces."""
    if found.namespaces is Namespaces.NONE:
        pytest.skip(f"no namespaces: {found.missing}")
    return Sandboxed(tmp_path, found, start)


def test_as_root_the_sandbox_has_all_mechanisms(found: Mechanisms) -> None:
    if os.geteuid() != 0:
        pytest.skip("not root")
    assert found.namespaces is Namespaces.BY_ROOT, found.missing
    assert found.own_user, found.missing
    assert found.seccomp is system_calls.has_filters()
    assert found.landlock == landlock.version()


def test_a_system_that_refuses_namespaces_is_found_out() -> None:
    code = """
from atoll.cluster.sandbox.kernel import no_new_privileges
from atoll.cluster.sandbox.system_calls import refuse_system_calls
no_new_privileges()
refuse_system_calls(tenant=True)
"""
    probed = subprocess.run([sys.executable, "-c", code + PROBE], capture_output=True, text=True)
    assert probed.returncode == 0, probed.stderr
    mechanisms = msgspec.json.decode(probed.stdout, type=Mechanisms)
    assert mechanisms.namespaces is Namespaces.NONE
    assert "Operation not permitted" in mechanisms.missing["namespaces"]
    assert why_not_confined(mechanisms) == "" or not landlock.version()
    reason = why_not_confined(msgspec.structs.replace(mechanisms, landlock=0))
    assert "Operation not permitted" in reason
    assert "--insecure-sandbox" in reason


def test_without_root_nothing_is_missing_of_namespaces_that_a_user_can_make() -> None:
    if os.geteuid() != 0:
        pytest.skip("not root")
    code = """
import os
from atoll.cluster.sandbox import isolation, kernel
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
kernel.set_dumpable()  # a change of the user has reset it
"""
    probed = subprocess.run([sys.executable, "-c", code + PROBE], capture_output=True, text=True)
    assert probed.returncode == 0, probed.stderr
    mechanisms = msgspec.json.decode(probed.stdout, type=Mechanisms)
    if mechanisms.namespaces is Namespaces.NONE:
        pytest.skip(f"no user namespaces: {mechanisms.missing}")
    assert mechanisms.namespaces is Namespaces.BY_USER
    assert "namespaces" not in mechanisms.missing
    assert mechanisms.missing["user"] == "Atoll does not run as root"


# ---- files


def test_no_file_outside_of_the_grants_can_be_read(sandboxed: Sandboxed) -> None:
    code = f"""
for path in {[str(each) for each in sandboxed.outside.values()]!r}:
    print(attempt(Path(path).read_text))
"""
    answers = sandboxed.run(code).split("\n")
    assert len(answers) == len(sandboxed.outside)
    assert set(answers) <= {"FileNotFoundError", "PermissionError"}


def test_directories_of_the_machine_show_no_more_than_the_interpreter_needs(confined: Sandboxed) -> None:
    (confined.base / "beside").mkdir()
    code = "print(sorted(os.listdir(base)), sorted(os.listdir(base / 'cluster')), os.listdir(own))"
    assert confined.run(code) == "['cluster'] ['session-1'] []"
    assert "boot" not in confined.run("print(os.listdir('/'))")
    assert "shadow" not in confined.run("print(os.listdir('/etc'))")


def test_the_home_directory_is_not_there(confined: Sandboxed) -> None:
    home = Path.home()
    seen = confined.run(f"print(sorted(os.listdir({str(home)!r})) if os.path.isdir({str(home)!r}) else [])")
    prefixes = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix)]
    expected = {each.relative_to(home).parts[0] for each in prefixes if each.is_relative_to(home)}
    assert set(eval(seen)) <= expected


def test_links_and_dots_lead_nowhere_else(sandboxed: Sandboxed) -> None:
    secret = sandboxed.outside["journal/snapshot"]
    code = f"""
(own / "link").symlink_to({str(secret)!r})
print(attempt((own / "link").read_text))
print(attempt(Path(own, *[".."] * 20, {str(secret)[1:]!r}).read_text))
print(attempt(Path("/proc/1/root" + {str(secret)!r}).read_text))
print(attempt(Path("/proc/self/cwd/../../../../../../.." + {str(secret)!r}).read_text))
print(attempt(os.link, {str(secret)!r}, own / "hard"))
print(attempt(os.rename, {str(secret)!r}, own / "moved"))
"""
    assert set(sandboxed.run(code).split("\n")) <= {"FileNotFoundError", "PermissionError", "OSError"}
    assert secret.read_text().startswith("secret")


def test_a_link_in_a_granted_directory_leads_out_of_no_grant(sandboxed: Sandboxed) -> None:
    granted = sandboxed.base / "granted"
    granted.mkdir()
    (granted / "out").symlink_to(sandboxed.outside["home/token"])
    code = "print(attempt((base / 'granted' / 'out').read_text))"
    assert sandboxed.run(code, write=[str(granted)]) in ("FileNotFoundError", "PermissionError")


def test_a_grant_that_is_a_link_is_refused(confined: Sandboxed) -> None:
    (confined.base / "granted").symlink_to(confined.base / "journal")
    output = confined.run("print('runs')", check=False, read=[str(confined.base / "granted")])
    assert "without symbolic links" in output
    assert "runs" not in output.split("\n")


def test_a_granted_directory_is_read_and_not_written(sandboxed: Sandboxed) -> None:
    data = sandboxed.base / "data"
    data.mkdir(mode=0o700)
    (data / "file").write_text("data")
    code = """
print((base / "data" / "file").read_text())
print(attempt((base / "data" / "file").write_text, "changed"), attempt((base / "data" / "new").write_text, "x"))
"""
    assert sandboxed.run(code, read=[str(data)]) in (
        "data\nOSError OSError",
        "data\nPermissionError PermissionError",
    )
    assert [each.name for each in data.iterdir()] == ["file"]
    assert (data / "file").read_text() == "data"


def test_what_is_written_to_a_granted_directory_belongs_to_its_owner(sandboxed: Sandboxed) -> None:
    data = sandboxed.base / "data"
    data.mkdir(mode=0o700)
    (data / "old").write_text("old")
    code = """
(base / "data" / "old").write_text("changed")
(base / "data" / "sub").mkdir()
(base / "data" / "sub" / "new").write_text("new")
os.rename(base / "data" / "sub" / "new", base / "data" / "renamed")
"""
    sandboxed.run(code, write=[str(data)])
    assert (data / "old").read_text() == "changed"
    assert (data / "renamed").read_text() == "new"
    assert (data / "renamed").stat().st_uid == data.stat().st_uid


def test_a_writable_directory_inside_of_a_readable_one(sandboxed: Sandboxed) -> None:
    (sandboxed.base / "data" / "out").mkdir(parents=True)
    code = (
        "print(attempt((base / 'data' / 'x').write_text, 'x'), attempt((base / 'data' / 'out' / 'x').write_text, 'x'))"
    )
    data = str(sandboxed.base / "data")
    assert sandboxed.run(code, read=[data], write=[f"{data}/out"]) in ("OSError 1", "PermissionError 1")


def test_a_granted_directory_that_does_not_exist_is_left_out(confined: Sandboxed) -> None:
    assert confined.run("print(os.path.exists(base / 'none'))", read=[str(confined.base / "none")]) == "False"


def test_what_is_hidden_is_hidden_inside_of_a_grant(confined: Sandboxed) -> None:
    code = "print(sorted(os.listdir(base / 'cluster')), (base / 'home' / 'token').read_text())"
    assert confined.run(code, read=[str(confined.base)]) == "['session-1'] secret of home/token"


def test_its_scratch_directory_is_its_own_and_bounded(confined: Sandboxed) -> None:
    code = """
(own / "note").write_text("mine")
Path("/tmp/note").write_text("mine"), Path("/dev/shm/note").write_text("mine")
print(attempt((own / "large").write_bytes, bytes(1 << 25)))
"""
    assert confined.run(code) == "OSError"
    assert list(confined.own.iterdir()) == []
    assert not Path("/tmp/note").exists()
    assert not Path("/dev/shm/note").exists()


def test_without_a_scratch_directory_it_can_write_nowhere(confined: Sandboxed) -> None:
    code = """
for root, names, _ in os.walk("/"):
    if root.startswith("/proc"):
        names.clear()
    # The system's answer to `access` takes a tenth of the time of an attempt.
    elif os.access(root, os.W_OK) and attempt(open, root + "/new", "w").startswith("<"):
        print("wrote to", root)
"""
    assert confined.run(code, scratch="", shared="") == ""


def test_the_interpreter_and_the_system_are_read_only(confined: Sandboxed) -> None:
    code = """
for place in ("/", "/usr", "/etc", sys.prefix, sys.base_prefix, os.path.dirname(msgspec.__file__), "/proc/sys/kernel"):
    print(attempt(open, f"{place}/new", "w"))
print(attempt(Path("/proc/sys/kernel/core_pattern").write_text, "|/tmp/evil"))
print(attempt(Path("/proc/sysrq-trigger").write_text, "h"))
"""
    assert set(confined.run(code).split("\n")) <= {"OSError", "PermissionError", "FileNotFoundError"}


def test_the_interpreter_works(sandboxed: Sandboxed) -> None:
    code = """
import numpy, ssl, sqlite3, pwd, threading
program = [sys.executable, "-c", "import numpy; print(numpy.ones(2).sum())"]
print(subprocess.run(program, capture_output=True, text=True))
"""
    assert "2.0" in sandboxed.run(code)


# ---- other capabilities


def test_it_has_no_privileges_and_gains_none(sandboxed: Sandboxed) -> None:
    code = """
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(lines[name].strip() for name in ("CapEff", "CapPrm", "NoNewPrivs")))
"""
    assert sandboxed.run(code) == "0000000000000000 0000000000000000 1"


def test_as_root_it_is_another_user(confined: Sandboxed, found: Mechanisms) -> None:
    if not found.own_user:
        pytest.skip(found.missing["user"])
    assert confined.run("print(os.getresuid(), os.getresgid(), os.getgroups())") == (
        f"{(user_of(7),) * 3} {(user_of(7),) * 3} []"
    )
    assert confined.run("print(attempt(os.setuid, 0), attempt(os.chown, own, 0, 0))") == (
        "PermissionError PermissionError"
    )


def test_it_can_name_no_process_but_its_own(confined: Sandboxed) -> None:
    code = "print([name for name in os.listdir('/proc') if name.isdigit()], os.getpid())"
    assert confined.run(code) == "['1'] 1"


ACTIONS = (
    "libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "libc.umount2(b'/proc', 2)",
    "libc.unshare(0x10000000)",
    "libc.unshare(0x00020000)",
    "libc.ptrace(16, os.getppid() or 1, 0, 0)",
    "libc.setns(os.open('/proc/self/ns/user', os.O_RDONLY), 0)",
    "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)",  # clone with a new user namespace, on x86_64
    "libc.syscall(425, 1, 0)",  # io_uring_setup
    "libc.syscall(250, 0, -3, 0)",  # keyctl
    "libc.syscall(321, 0, 0, 0)",  # bpf
    "libc.syscall(304, 0, 0, 0)",  # open_by_handle_at
    "libc.syscall(428, -100, b'/', 1)",  # open_tree
    "libc.socket(38, 5, 0)",  # AF_ALG
    "libc.socket(40, 1, 0)",  # AF_VSOCK
    "libc.chroot(b'/usr')",
)


def test_the_kernel_refuses_what_would_lead_out(confined: Sandboxed, found: Mechanisms) -> None:
    if not found.seccomp:
        pytest.skip(found.missing["seccomp"])
    # The numbers of system calls are those of x86_64.
    actions = [each for each in ACTIONS if "syscall(" not in each or os.uname().machine == "x86_64"]
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
"""
    # Each action runs in a child, so that one that is not refused does not change the others.
    for action in actions:
        code += f"""
if (child := os.fork()) == 0:
    print({action!r}, {action}, errno.errorcode.get(ctypes.get_errno()), sep="\\t", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    answers = [line.split("\t") for line in confined.run(code).splitlines()]
    assert [action for action, *_ in answers] == actions
    refused = [["-1", name] for name in ("EPERM", "ENOSYS", "EAFNOSUPPORT")]
    assert [action for action, *answer in answers if answer not in refused] == []


def test_a_tenant_cannot_raise_its_priority(sandboxed: Sandboxed, found: Mechanisms) -> None:
    if not found.seccomp:
        pytest.skip(found.missing["seccomp"])
    code = """
print(attempt(lambda: subprocess.run(["true"], check=True, start_new_session=True)))
print(attempt(lambda: os.nice(-1)))
print(attempt(lambda: Path("/proc/self/autogroup").write_text("0")))
"""
    new_session, niceness, autogroup = sandboxed.run(code).splitlines()
    assert (new_session, niceness) == ("PermissionError", "PermissionError")
    assert autogroup in ("PermissionError", "OSError", "FileNotFoundError")


def test_the_python_of_the_only_user_may_start_sessions(confined: Sandboxed) -> None:
    code = """print(subprocess.run(["true"], check=True, start_new_session=True).returncode)"""
    assert confined.run(code, view="user") == "0"


def test_programs_of_root_give_it_nothing(confined: Sandboxed) -> None:
    code = """
print(subprocess.run(["su", "-c", "id"], stdin=subprocess.DEVNULL, capture_output=True).returncode != 0)
"""
    assert confined.run(code) == "True"


def test_its_memory_is_bounded(sandboxed: Sandboxed) -> None:
    code = """
try:
    bytearray(2 << 30)
except MemoryError:
    print("refused")
"""
    assert sandboxed.run(code) == "refused"


def test_its_processes_are_bounded(confined: Sandboxed) -> None:
    code = """
import signal
children = []
try:
    for _ in range(200):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        children.append(child)
except BlockingIOError:
    print("refused at", len(children) < 64)
for child in children:
    os.kill(child, signal.SIGKILL)
"""
    assert confined.run(code, processes=64) == "refused at True"


def test_it_has_the_descriptors_that_were_kept_and_no_others(sandboxed: Sandboxed) -> None:
    code = """
import fcntl
print([each for each in range(1000) if attempt(fcntl.fcntl, each, fcntl.F_GETFD) != "OSError"])
"""
    reading, writing = os.pipe()
    secret = os.open(sandboxed.outside["home/token"], os.O_RDONLY)
    try:
        arguments = msgspec.json.encode(
            ({"view": "granted", "scratch": str(sandboxed.own), "network": True}, sandboxed.mechanisms)
        ).decode()
        prelude = PRELUDE.replace("isolate(sandbox, mechanisms)", f"isolate(sandbox, mechanisms, [{writing}])")
        ended = subprocess.run(
            [sys.executable, "-P", "-c", prelude + code, str(sandboxed.base), arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=(writing, secret),
        )
    finally:
        for each in (reading, writing, secret):
            os.close(each)
    assert ended.stdout.strip() == f"[0, 1, 2, {writing}]", ended.stderr


def test_without_a_network_it_has_its_loopback_alone(confined: Sandboxed) -> None:
    code = """
here = socket.create_server(("127.0.0.1", 0))
socket.create_connection(here.getsockname(), 5)
print([name for _, name in socket.if_nameindex()], attempt(socket.create_connection, ("192.0.2.1", 9), 1))
"""
    assert confined.run(code, network=False) == "['lo'] OSError"


def test_no_socket_outside_of_its_grants_can_be_reached(confined: Sandboxed) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as abstract:
        path = str(confined.base / "cluster" / "controller.sock")
        name = f"\0{confined.base}"
        for each, where in ((server, path), (abstract, name)):
            each.bind(where)
            each.listen()
        code = f"""
for where in ({path!r}, {name!r}):
    print(attempt(socket.socket(socket.AF_UNIX).connect, where))
"""
        answers = confined.run(code).split("\n")
    assert answers[0] == "FileNotFoundError"
    if confined.mechanisms.landlock >= 6:
        assert answers[1] == "PermissionError"


def test_it_ends_as_its_code_ends(sandboxed: Sandboxed) -> None:
    with pytest.raises(subprocess.CalledProcessError) as ended:
        sandboxed.run("os._exit(7)")
    assert ended.value.returncode == 7


# ---- what the user sees


def test_the_view_of_the_user_has_his_files_and_not_those_of_the_cluster(confined: Sandboxed) -> None:
    code = """
print(sorted(os.listdir(base / "cluster")), sorted(os.listdir(own.parent)), os.listdir(own))
print((base / "home" / "token").read_text(), os.getuid())
(base / "home" / "new").write_text("new")
"""
    assert confined.run(code, view="user") == (
        f"['session-1'] ['host-0', 'shared'] []\nsecret of home/token {os.getuid()}"
    )
    assert (confined.base / "home" / "new").stat().st_uid == os.getuid()
