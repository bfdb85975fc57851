"""Runs a command in a host of its own: what it does to mounts, network or processes dies with it.

    tests/lab/sandbox COMMAND [ARGUMENT…]

New mount, network, pid, uts and ipc namespaces; loopback is up, nothing else is reachable.
Private to the command: ``/run``, ``/mnt`` (with ``/mnt/disks``), ``/dev`` (the host's nodes, and
room for more), and copy-on-write ``/etc``, ``/opt``, ``/usr/local/bin`` and the user's home,
where ``.ssh``, ``.dstack``, ``.docker`` are not there at first. The checkout and ``/tmp`` stay
the host's. The first process reaps orphans at once; when the command ends, by whatever means,
the kernel ends all the rest. Exit code and signals are the command's.

Only the standard library, and no import of ours: it is run by whatever Python the host has.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import pwd
import secrets
import signal
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MARK = "DSTACK_LAB_SANDBOX"
"""Environment variable inside; its value is a name no other sandbox has."""

_TMPFS_NAME = "dstack-lab"
_ROOT = Path(__file__).resolve().parents[2]
_REFUSED = 125  # as env, timeout and docker say "could not even try"

_CLONE_NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # NS UTS IPC PID NET
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SI_KERNEL = 0x80

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
_COPY_ON_WRITE = ("/etc", "/opt", "/usr/local/bin")
_ABSENT_AT_HOME = (".ssh", ".dstack", ".docker", ".netrc")
_NOT_INSIDE = ("DOCKER_HOST", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR", "SSH_AUTH_SOCK")

_libc = ctypes.CDLL(None, use_errno=True)


def inside() -> bool:
    """Whether this process runs in a sandbox; the environment alone is not believed."""
    if not os.environ.get(MARK):
        return False
    with Path("/proc/self/mountinfo").open(encoding="utf-8") as mounts:
        return any(
            line.split()[4] == "/mnt" and f" - tmpfs {_TMPFS_NAME} " in line for line in mounts
        )


def main(command: Sequence[str]) -> int:
    if not command:
        return _refuse("usage: sandbox COMMAND [ARGUMENT…]")
    if inside():
        os.execvp(command[0], list(command))
    if os.geteuid() != 0:
        return _refuse("needs root: it makes namespaces and mounts")
    name = f"dstack-lab-{secrets.token_hex(4)}"
    try:
        _check(_libc.unshare(_CLONE_NEW), "unshare")
    except OSError as error:
        return _refuse(f"this machine gives no namespaces: {error.strerror}")
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    init = os.fork()
    if init == 0:
        os._exit(_first_process(name, list(command)))
    try:
        return _wait_for(init)
    finally:
        _remove_cgroups(name)


def _first_process(name: str, command: list[str]) -> int:
    """Make the place, run the command in it, reap whoever is orphaned."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    try:
        _make_place()
    except OSError as error:
        return _refuse(f"cannot be made here: {error}")
    os.environ[MARK] = name
    for variable in _NOT_INSIDE:
        os.environ.pop(variable, None)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os._exit(_refuse(f"{command[0]}: {error.strerror}"))
    return _wait_for(child)


def _wait_for(child: int) -> int:
    """The exit code of ``child``; signals are handed on to it, other children are reaped."""
    while True:
        told = signal.sigwaitinfo({*_FORWARDED, signal.SIGCHLD})
        if told.si_signo != signal.SIGCHLD:
            # A terminal tells its whole foreground group, the command included.
            if told.si_code != _SI_KERNEL:
                with suppress(ProcessLookupError):
                    os.kill(child, told.si_signo)
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


def _make_place() -> None:
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc")
    socket.sethostname("sandbox")
    _bring_up_loopback()
    _make_dev()
    _mount(_TMPFS_NAME, "/run", "tmpfs", options="mode=755")
    _mount(_TMPFS_NAME, "/mnt", "tmpfs", options="mode=755")
    Path("/mnt/disks").mkdir()
    layers = Path("/run/lab/layers")
    layers.mkdir(parents=True, mode=0o700)
    Path("/run/lock").mkdir(mode=0o1777)
    home = Path(pwd.getpwuid(0).pw_dir)
    kept = [(path, os.open(path, os.O_PATH)) for path in {_ROOT, Path.cwd()}]
    for lower in {*map(Path, _COPY_ON_WRITE), home, Path.home()}:
        if lower.is_dir() and lower != Path("/"):
            _make_copy_on_write(lower, layers, _ABSENT_AT_HOME if lower == home else ())
    for path, descriptor in sorted(kept):
        # Below a home, say: coverage data, caches and evidence are meant to stay.
        _mount(f"/proc/self/fd/{descriptor}", str(path), flags=_MS_BIND | _MS_REC)
        os.close(descriptor)
    os.chdir(Path.cwd())


def _make_copy_on_write(lower: Path, layers: Path, absent: Sequence[str]) -> None:
    layer = layers / str(lower).strip("/").replace("/", "-")
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    upper.chmod(stat.S_IMODE(lower.stat().st_mode))
    for name in absent:
        os.mknod(upper / name, stat.S_IFCHR, os.makedev(0, 0))  # an overlay's word for "gone"
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    _mount("overlay", str(lower), "overlay", options=options)


def _make_dev() -> None:
    """A /dev with the nodes of the host's, where tests may make others."""
    old = os.open("/dev", os.O_PATH)
    before = f"/proc/self/fd/{old}"
    _mount(_TMPFS_NAME, "/dev", "tmpfs", options="mode=755")
    for entry in os.scandir(before):
        new, found = f"/dev/{entry.name}", entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            Path(new).symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            Path(new).mkdir()
            if entry.name in ("pts", "shm", "mqueue", "hugepages", "net"):
                _mount(f"{before}/{entry.name}", new, flags=_MS_BIND | _MS_REC)
        elif stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            os.mknod(new, found.st_mode, found.st_rdev)
            Path(new).chmod(stat.S_IMODE(found.st_mode))  # mknod heeds the umask
    os.close(old)
    # An shm of its own, and loop devices the kernel has not been asked for yet.
    _mount(_TMPFS_NAME, "/dev/shm", "tmpfs", options="mode=1777")
    for number in range(64):
        with suppress(FileExistsError):
            os.mknod(f"/dev/loop{number}", stat.S_IFBLK | 0o600, os.makedev(7, number))


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _remove_cgroups(name: str) -> None:
    """The containers' groups, empty by now: the kernel keeps them until somebody removes them."""
    for parent in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")):
        for group, _, _ in os.walk(parent / name, topdown=False):
            with suppress(OSError):
                Path(group).rmdir()


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (text.encode() or None for text in (source, target, kind))
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), target)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def _refuse(why: str) -> int:
    sys.stderr.write(f"sandbox: {why}\n")
    return _REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
