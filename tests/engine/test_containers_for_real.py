"""The containers of tasks on a real engine: what it was told, and what the job finds inside."""

from __future__ import annotations

import os
import stat
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import docker
import pytest
from dstack_shim_contracts.api import GpuDevice, InstanceMount, TaskConfig, VolumeMount

from dstack_shim.engine.container import (
    ContainerSettings,
    container_spec,
    gpus_from_details,
    gpus_from_labels,
    lacks_display,
    without_display,
)
from dstack_shim.engine.docker import DockerEngine
from dstack_shim.engine.protocol import ContainerDetails, ContainerSpec, Mount
from dstack_shim.engine.runner_command import RunnerFlags
from dstack_shim.errors import EngineError, StartFailed
from tests.eventually import eventually, eventually_async
from tests.lab.engine import PrivateEngine
from tests.lab.images import RUNS_ON, Images, write_runner
from tests.lab.worlds import job_spec, listed

VERSION = "0.22.5"


@pytest.fixture
async def engine(private_engine: PrivateEngine) -> AsyncIterator[DockerEngine]:
    engine = DockerEngine(private_engine.environ)
    yield engine
    await engine.close()


class Host:
    """Makes containers of tasks the way the shim does, in a home of its own."""

    def __init__(self, home: Path, engine: DockerEngine, images: Images) -> None:
        self.runner_dir = home / "runner"
        self.runner_dir.mkdir()
        self.settings = ContainerSettings(
            home=str(home),
            runner_path=str(write_runner(home / "dstack-runner", VERSION)),
        )
        self.engine = engine
        self.images = images

    def spec(
        self, job: str = RUNS_ON, gpus: tuple[str, ...] = (), version: str = VERSION, **task: Any
    ) -> ContainerSpec:
        config = TaskConfig(
            **{"id": "t1", "name": "job", "image_name": self.images.job(job), **task}
        )
        return container_spec(
            config,
            self.settings,
            runner_version=version,
            runner_dir=str(self.runner_dir),
            gpus=gpus,
        )

    def set(self, **settings: Any) -> None:
        self.settings = attrs.evolve(self.settings, **settings)

    async def start(self, spec: ContainerSpec) -> str:
        container_id = await self.engine.create(spec)
        await self.engine.start(container_id)
        return container_id

    async def run(self, spec: ContainerSpec) -> tuple[int, str]:
        """Exit code and output of a job that ends by itself."""
        container_id = await self.start(spec)

        async def ended() -> ContainerDetails | None:
            details = await self.engine.inspect(container_id)
            return details if details.container.state.finished else None

        details = await eventually_async(ended, within=20)
        assert details is not None
        return details.exit_code, await self.engine.last_lines(container_id, 50)


@pytest.fixture
def host(tmp_path: Path, engine: DockerEngine, images: Images) -> Host:
    return Host(tmp_path, engine, images)


@pytest.mark.parametrize("code", [0, 7])
async def test_the_jobs_exit_code_is_the_containers(host: Host, code: int) -> None:
    assert await host.run(host.spec(f"echo hello; exit {code}")) == (code, "hello")


async def test_the_runner_gets_its_arguments_unchanged_whatever_is_in_the_keys(
    host: Host,
) -> None:
    keys = (
        "ssh-ed25519 AAAA it's",
        '"$(id)" `id` \\',
        "line\nbreak",
        "😀",
        "",
        "--flag",
        "; exit 9",
    )
    host.set(runner_flags=RunnerFlags(1111, 2222, log_level="5", ssh_log_level="error"))
    assert await host.run(host.spec("exit 0", container_ssh_keys=keys)) == (0, "")
    arguments = (host.runner_dir / "argv").read_text(encoding="utf-8").split("\0")[:-1]
    assert arguments == [
        *("--log-level", "5", "start", "--temp-dir", "/tmp/runner"),
        *("--http-port", "1111", "--ssh-port", "2222", "--http-address", "localhost"),
        *(word for key in keys for word in ("--ssh-authorized-key", key)),
        *("--ssh-log-level", "error"),
    ]


async def test_an_image_without_sshd_and_a_way_to_get_it_ends_with_11(host: Host) -> None:
    image = host.images.plain("no-sshd:1", has_sshd=False, environment={"LAB_JOB": "exit 0"})
    code, output = await host.run(host.spec(image_name=image))
    assert code == 11
    assert output == "Lab Linux 1: not supported, it has no sshd and no apt-get, yum or apk"


async def test_an_image_without_a_shell_cannot_start(host: Host, client: docker.APIClient) -> None:
    nothing = b"\0" * 10240  # a tar archive's end
    client.import_image_from_data(nothing, repository="empty", tag="1")
    container_id = await host.engine.create(host.spec(image_name="empty:1"))
    with pytest.raises(StartFailed, match=r"unable to find user root|/bin/sh"):
        await host.engine.start(container_id)


async def test_the_engine_is_told_the_limits(host: Host, client: docker.APIClient) -> None:
    container_id = await host.start(
        host.spec(cpu=0.5, memory=64 << 20, shm_size=32 << 20, privileged=True)
    )
    told = client.inspect_container(container_id)["HostConfig"]
    assert told["NanoCpus"] == 500_000_000
    assert told["Memory"] == 64 << 20
    assert told["ShmSize"] == 32 << 20
    assert told["Tmpfs"] == {"/dev/shm": f"exec,size={32 << 20}"}
    assert told["Privileged"] is True


async def test_shared_memory_can_be_executed_from(host: Host) -> None:
    job = (
        "cp /bin/busybox /dev/shm/true; /dev/shm/true; "
        "df -k /dev/shm | tail -n 1 | awk '{print $2}'; exit 0"
    )
    assert await host.run(host.spec(job, shm_size=32 << 20)) == (0, str(32 << 10))


async def test_shared_memory_of_the_hosts_ipc_keeps_its_size(host: Host) -> None:
    os.mknod("/dev/kfd", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    Path("/dev/dri").mkdir(exist_ok=True)
    os.mknod("/dev/dri/renderD128", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    host.set(gpu_vendor="amd")
    job = "df -k /dev/shm | tail -n 1 | awk '{print $2}'; ls /dev/kfd /dev/dri; exit 0"
    spec = host.spec(job, ("/dev/dri/renderD128",), shm_size=32 << 20)
    assert await host.run(spec) == (0, f"{32 << 10}\n/dev/kfd\n\n/dev/dri:\nrenderD128")


async def test_the_user_and_the_variables_are_those_asked_for(host: Host) -> None:
    host.set(pass_env={"http_proxy": "http://p:1/", "EMPTY": ""}, pjrt_device="TPU")
    host.runner_dir.chmod(0o777)
    job = "id -un; echo $http_proxy ${EMPTY-unset} $PJRT_DEVICE ${https_proxy-unset}; exit 0"
    output = "worker\nhttp://p:1/ TPU unset"
    assert await host.run(host.spec(job, container_user="worker")) == (0, output)


async def test_volumes_and_instance_directories_are_where_the_task_wants_them(
    host: Host, tmp_path: Path
) -> None:
    volume = Path("/mnt/disks/dstack-volumes/data")
    volume.mkdir(parents=True, exist_ok=True)  # a mount point stays
    (volume / "file").write_text("of the volume\n")
    (tmp_path / "dir with space:colon").mkdir()
    job = "cat /data/file; echo written > /inst/out; exit 0"
    spec = host.spec(
        job,
        volume_mounts=(VolumeMount("data", "/data"),),
        instance_mounts=(InstanceMount(f"{tmp_path}/dir with space:colon", "/inst"),),
    )
    assert await host.run(spec) == (0, "of the volume")
    assert (tmp_path / "dir with space:colon" / "out").read_text() == "written\n"
    listed_mounts = (await host.engine.list_task_containers())[0].mounts
    assert Mount(str(volume), "/data", "bind") in listed_mounts


async def test_a_missing_directory_fails_the_creation_and_is_not_made(
    host: Host, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    spec = host.spec(instance_mounts=(InstanceMount(str(missing), "/x"),))
    with pytest.raises(EngineError, match="bind source path does not exist"):
        await host.engine.create(spec)
    assert not missing.exists()


async def test_on_the_bridge_the_runner_is_reached_through_the_mapped_port(host: Host) -> None:
    container_id = await host.start(host.spec(f"serve; {RUNS_ON}", network_mode="bridge"))
    container = await listed(host.engine, container_id)
    assert container is not None
    ports = {mapping.container: mapping.host for mapping in container.ports}
    assert sorted(ports) == [10022, 10999]

    def answers() -> bytes | None:
        try:
            url = f"http://127.0.0.1:{ports[10999]}/api/healthcheck"
            with urllib.request.urlopen(url, timeout=2) as answer:
                content: bytes = answer.read()
                return content
        except OSError:
            return None

    assert b'"dstack-runner"' in (eventually(answers) or b"")


async def test_on_the_hosts_network_the_runner_listens_on_loopback(host: Host) -> None:
    job = "serve; netstat -ltn | grep :10999 | awk '{print $4}'; exit 0"
    assert await host.run(host.spec(job)) == (0, "127.0.0.1:10999")


async def test_infiniband_is_a_directory_of_devices(host: Host, client: docker.APIClient) -> None:
    Path("/dev/infiniband").mkdir()
    os.mknod("/dev/infiniband/uverbs0", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    host.set(has_infiniband=True)
    spec = host.spec("ls /dev/infiniband; exit 0")
    assert await host.run(spec) == (0, "uverbs0")
    (container,) = await host.engine.list_task_containers()
    told = client.inspect_container(container.id)["HostConfig"]
    assert told["Ulimits"] == [{"Name": "memlock", "Hard": -1, "Soft": -1}]


async def test_nvidia_gpus_are_asked_for_by_id_and_read_back(
    host: Host, client: docker.APIClient
) -> None:
    host.set(gpu_vendor="nvidia")
    container_id = await host.start(host.spec(gpus=("GPU-a", "GPU-b")))
    (request,) = client.inspect_container(container_id)["HostConfig"]["DeviceRequests"]
    assert request["DeviceIDs"] == ["GPU-a", "GPU-b"]
    assert request["Capabilities"] == [
        ["gpu", "utility", "compute", "graphics", "video", "display", "compat32"]
    ]
    details = await host.engine.inspect(container_id)
    assert gpus_from_details(details) == ("GPU-a", "GPU-b")
    assert gpus_from_labels(details.container.labels) == ("GPU-a", "GPU-b")


async def test_nvidia_without_a_display_part_starts_without_it(
    host: Host, private_engine: PrivateEngine
) -> None:
    host.set(gpu_vendor="nvidia")
    private_engine.say_no_modeset()
    try:
        spec = host.spec("exit 4", ("GPU-a",))
        container_id = await host.engine.create(spec)
        with pytest.raises(StartFailed) as caught:
            await host.engine.start(container_id)
        assert lacks_display(spec, str(caught.value))
        await host.engine.remove(container_id)
        assert await host.run(without_display(spec)) == (4, "")
    finally:
        private_engine.say_no_modeset(False)


async def test_nvidia_gpus_on_a_host_without_its_hook_fail_the_start(images: Images) -> None:
    private = PrivateEngine(shares_network=True, has_nvidia=False)
    private.start()
    engine = DockerEngine(private.environ)
    spec = attrs.evolve(
        job_spec(Images(private.client()).job("exit 0")),
        device_requests=container_spec(
            TaskConfig(id="t", name="n", image_name="i"),
            ContainerSettings(home="/h", runner_path="/r", gpu_vendor="nvidia"),
            runner_version=VERSION,
            runner_dir="/d",
            gpus=("GPU-a",),
        ).device_requests,
    )
    container_id = await engine.create(spec)
    with pytest.raises(StartFailed, match="could not select device driver"):
        await engine.start(container_id)
    await engine.close()
    private.close()


async def test_tenstorrent_boards_and_their_hugepages(host: Host) -> None:
    Path("/dev/tenstorrent").mkdir()
    Path("/dev/hugepages-1G").mkdir()
    for index in ("0", "1", "2"):
        os.mknod(f"/dev/tenstorrent/{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    host.set(gpu_vendor="tenstorrent", has_hugepages=True)
    spec = host.spec("ls /dev/tenstorrent; ls -d /dev/hugepages-1G; exit 0", ("0", "2"))
    assert await host.run(spec) == (0, "0\n2\n/dev/hugepages-1G")
    (container,) = await host.engine.list_task_containers()
    assert gpus_from_details(await host.engine.inspect(container.id)) == ("0", "2")


async def test_gaudi_runs_under_its_runtime(host: Host, client: docker.APIClient) -> None:
    host.set(gpu_vendor="intel")
    spec = host.spec("echo $HABANA_VISIBLE_DEVICES; exit 0", ("0", "3"))
    assert await host.run(spec) == (0, "0,3")
    (container,) = await host.engine.list_task_containers()
    told = client.inspect_container(container.id)["HostConfig"]
    assert (told["Runtime"], told["IpcMode"], told["CapAdd"]) == ("habana", "host", ["SYS_NICE"])
    assert gpus_from_details(await host.engine.inspect(container.id)) == ("0", "3")


async def test_devices_given_by_the_task_are_under_the_name_it_wants(host: Host) -> None:
    os.mknod("/dev/odd0", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    host.set(gpu_vendor="nvidia")
    spec = host.spec(
        "ls /dev/gpu0; exit 0", ("GPU-a",), gpu_devices=(GpuDevice("/dev/odd0", "/dev/gpu0"),)
    )
    assert await host.run(spec) == (0, "/dev/gpu0")
    (container,) = await host.engine.list_task_containers()
    assert gpus_from_labels(container.labels) == ("GPU-a",)


async def test_anonymous_volumes_go_with_their_container(
    host: Host, client: docker.APIClient
) -> None:
    image = host.images.plain(
        "with-volume:1", changes=("VOLUME /scratch",), environment={"LAB_JOB": RUNS_ON}
    )
    container_id = await host.start(host.spec(image_name=image))
    assert len(client.volumes()["Volumes"]) == 1
    await host.engine.remove(container_id)
    assert not client.volumes()["Volumes"]


async def test_a_job_killed_for_its_memory_says_so(host: Host) -> None:
    job = "tail /dev/zero; exit $?"
    container_id = await host.start(host.spec(job, memory=16 << 20))

    async def ended() -> ContainerDetails | None:
        details = await host.engine.inspect(container_id)
        return details if details.container.state.finished else None

    details = await eventually_async(ended, within=30)
    assert details is not None
    assert details.oom_killed
    assert details.exit_code == 137


async def test_the_configuration_of_the_roots_client_changes_nothing(
    host: Host, client: docker.APIClient, private_engine: PrivateEngine
) -> None:
    """The SDK would add proxies and credentials it finds there to containers and pulls."""
    configuration = Path.home() / ".docker" / "config.json"
    configuration.parent.mkdir(exist_ok=True)
    configuration.write_text(
        '{"proxies": {"default": {"httpProxy": "http://root:pw@proxy"}},'
        ' "HttpHeaders": {"X-Root": "pw"}, "auths": {"h": {"auth": "cm9vdDpwdw=="}}}'
    )
    try:
        fresh = DockerEngine(private_engine.environ)
        container_id = await fresh.create(host.spec())
        environment = client.inspect_container(container_id)["Config"]["Env"]
        assert not [variable for variable in environment if "proxy" in variable.lower()]
        await fresh.close()
    finally:
        configuration.unlink()
