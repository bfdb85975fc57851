"""The host a shim runs on: disks of a cloud, users, GPUs and tools that exist only in the sandbox.

host = Host(folder, engine)
host.disk("data")                          # /dev/disk/by-id/google-data, blank
alice = host.user("alice")                 # her home directory
host.gpus("GPU-1", "GPU-2")                # nvidia-smi and device nodes say so
host.tool("blkid", "exit 8")               # first on the shim's PATH
shim = host.start_shim()
assert host.census(shim).take() == []
"""

from __future__ import annotations

import base64
import os
import pwd
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dstack_shim_contracts.api import VolumeInfo

from tests.lab.census import VOLUMES, Census, asker, mounted_volumes
from tests.lab.engine import PrivateEngine
from tests.lab.images import write_runner
from tests.lab.shim import PORT, ShimProcess, executable

MIB = 1 << 20
BY_ID = Path("/dev/disk/by-id")
RUNNER = Path("/usr/local/bin/dstack-runner")
_FIRST_UID = 3000


class Host:
    """One host; what a test made on it goes with :meth:`close`."""

    def __init__(self, folder: Path, engine: PrivateEngine) -> None:
        self.engine = engine
        self.tools = folder / "tools"
        self.shims: list[ShimProcess] = []
        self._folder = folder
        self._users: dict[str, Path] = {}
        self._nodes: list[Path] = []
        self._devices: list[int] = []
        self.tools.mkdir()
        write_runner(RUNNER)

    def close(self) -> None:
        """Stop the shims, unmount, and take the devices away."""
        for shim in self.shims:
            shim.close()
        for point in reversed(mounted_volumes()):
            subprocess.run(["umount", "--lazy", VOLUMES + point], check=False, timeout=60)
        for node in self._nodes:
            node.unlink(missing_ok=True)
        for device in self._devices:
            os.close(device)

    # The shim.

    def shim(
        self,
        *flags: str,
        home: str = "home",
        environ: Mapping[str, str] | None = None,
        port: int = PORT,
        has_own_mounts: bool = False,
    ) -> ShimProcess:
        """A shim that is not started, on a home below the folder.

        What one with mounts of its own mounts, nobody else sees, its engine neither.
        """
        path = self._folder / home
        path.mkdir(exist_ok=True)
        tools = {"PATH": f"{self.tools}:{os.environ['PATH']}:/usr/sbin:/sbin"}
        shim = ShimProcess(
            path,
            {**self.engine.environ, **tools, **(environ or {})},
            *flags,
            command=["unshare", "--mount", *executable()] if has_own_mounts else (),
            port=port,
        )
        self.shims.append(shim)
        return shim

    def start_shim(self, *flags: str, environ: Mapping[str, str] | None = None) -> ShimProcess:
        """A shim that answers."""
        shim = self.shim(*flags, environ=environ)
        shim.start()
        return shim

    def census(self, shim: ShimProcess) -> Census:
        """One that knows the key files of all users here."""
        files = {name: home / ".ssh" / "authorized_keys" for name, home in self._users.items()}
        return Census(shim.home, self.engine.client(), asker(shim.port), key_files=files)

    # Tools and GPUs.

    def tool(self, name: str, script: str) -> None:
        """A shell script in place of a tool of the system."""
        file = self.tools / name
        partial = file.with_name(f".{name}")
        partial.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        partial.chmod(0o755)
        partial.rename(file)

    def gpus(self, *uuids: str) -> None:
        """NVIDIA cards, for shims started from now on."""
        if not Path("/dev/nvidiactl").exists():
            self.device("/dev/nvidiactl")
        rows = "".join(f"echo 'NVIDIA L4, 23034, {uuid}, 570.86.15'\n" for uuid in uuids)
        self.tool("nvidia-smi", rows)

    def device(self, path: str) -> Path:
        """A device node that behaves as ``/dev/null``."""
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        self._nodes.append(Path(path))
        return Path(path)

    # Disks.

    def disk(
        self, name: str, *, size: int = 16 * MIB, file_system: bool = False, attached: bool = True
    ) -> Path:
        """A disk as GCP attaches it under that name; the path of its image file."""
        image = self._folder / f"{name}.img"
        with image.open("wb") as file:
            file.truncate(size)
        if file_system:
            run("mkfs.ext4", "-q", "-F", str(image))
        if attached:
            self.attach(name)
        return image

    def attach(self, name: str) -> None:
        """Make the disk's device and the link to it appear."""
        image = self._folder / f"{name}.img"
        device = run("losetup", "--find", "--show", str(image))
        for partition in Path("/sys/class/block", Path(device).name).glob("*/partition"):
            # Of somebody who was killed: the kernel keeps it for whoever gets the device next.
            run("delpart", device, partition.read_text(encoding="ascii").strip())
        self._devices.append(os.open(device, os.O_RDONLY))
        # Of an open device this only marks it: the kernel lets go of it with its last user, also
        # if that is killed.
        run("losetup", "--detach", device)
        BY_ID.mkdir(parents=True, exist_ok=True)
        link = BY_ID / f"google-{name}"
        link.symlink_to(device)
        self._nodes.append(link)

    # Users.

    def user(self, name: str, home: Path | None = None) -> Path:
        """The home directory of a user of that name, empty at first."""
        home = home or self._folder / f"home-of-{name}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        uid = _FIRST_UID + sum(name.encode())
        lines = Path("/etc/passwd").read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith(f"{name}:")]
        lines.append(f"{name}:x:{uid}:{uid}::{home}:/bin/sh")
        Path("/etc/passwd").write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.chown(home, uid, uid)
        self._users[name] = home
        return home

    def keys_of(self, name: str) -> bytes:
        """What the user's ``authorized_keys`` holds; empty without one."""
        with suppress(FileNotFoundError):
            return (self._users[name] / ".ssh" / "authorized_keys").read_bytes()
        return b""

    def write_keys(self, name: str, content: bytes) -> Path:
        """Make the user's ``authorized_keys``, the user's own."""
        entry = pwd.getpwnam(name)
        directory = self._users[name] / ".ssh"
        directory.mkdir(mode=0o700, exist_ok=True)
        file = directory / "authorized_keys"
        file.write_bytes(content)
        file.chmod(0o600)
        for path in (directory, file):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        return file


def volume(name: str, disk: str = "", *, init_fs: bool = False) -> VolumeInfo:
    """The volume on the disk ``disk``, which is called like the volume if it is not named."""
    return VolumeInfo("gcp", name, f"id-of-{name}", init_fs=init_fs, device_name=disk or name)


def public_key(number: int, comment: str = "") -> str:
    """An ed25519 public key that nobody has the private part of."""
    parts = (b"ssh-ed25519", number.to_bytes(32, "big"))
    blob = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return f"ssh-ed25519 {base64.b64encode(blob).decode()} {comment}".rstrip()


def run(*argv: str) -> str:
    """Run a tool of the system and return what it printed; its failure is the test's own."""
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


@contextmanager
def load(processes: int) -> Iterator[None]:
    """So many processes that want the machine for themselves."""
    burners = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(processes)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
