"""The events of a schedule, one function each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from dstack_shim.engine.protocol import ContainerSpec, ContainerState
from dstack_shim.records import RecordKind
from tests.simulation.dstack_own import DstackShim
from tests.simulation.requests import Requests
from tests.simulation.schedule import Event
from tests.simulation.shim import Shim
from tests.simulation.stories import dir_of

if TYPE_CHECKING:
    from tests.lab.fake_engine import FakeContainer
    from tests.simulation.world import World


class Happenings:
    """Makes events happen in a world. What takes time goes on while the next one happens."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._requests = Requests(world)
        self._kinds: dict[str, Callable[[Event], None]] = {
            "submit": lambda event: self._requests.submit(event.task),
            "terminate": self._terminate,
            "remove": lambda event: self._requests.remove(event.task),
            "exit": self._exit,
            "delete container": self._delete,
            "pause": self._pause,
            "outage": self._outage,
            "fault": self._fault,
            "event stream": self._stream,
            "kill": self._kill,
            "stop": self._stop,
            "reboot": self._reboot,
            "power cut": self._power_cut,
            "hand over": self._hand_over,
            "damage": self._damage,
            "stranger's name": self._stranger,
            "wait": lambda event: None,
        }

    def happen(self, event: Event) -> None:
        """Let one event happen."""
        if self._world.tells:
            self._world.tell(f"EVENT {str(event).partition(' ')[2].strip()}")
        self._world.happened[event.kind] += 1
        self._kinds[event.kind](event)

    def _terminate(self, event: Event) -> None:
        self._requests.terminate(event.task, event.words[0], int(event.numbers[0]))

    # Containers.

    def _container(self, task: int) -> FakeContainer | None:
        name = dir_of(task)
        containers = self._world.engine.containers.values()
        return next((box for box in containers if box.spec.name == name), None)

    def _exit(self, event: Event) -> None:
        container = self._container(event.task)
        if container is not None:
            code = int(event.numbers[0])
            self._world.engine.exit(container.id, code, oom_killed=code == 137)

    def _delete(self, event: Event) -> None:
        container = self._container(event.task)
        if container is None:
            return
        self._world.engine.exits_by = "hand"
        self._world.engine.delete(container.id)
        self._world.engine.exits_by = "itself"
        story = self._world.stories.of_container(container)
        if story is not None:
            story.excuses.add("its container was removed by hand")

    def _pause(self, event: Event) -> None:
        container = self._container(event.task)
        if container is None:
            return
        if container.state is ContainerState.RUNNING:
            self._world.engine.pause(container.id)
        elif container.state is ContainerState.PAUSED:
            self._world.engine.resume(container.id)

    def _stranger(self, event: Event) -> None:
        """A container of nobody bears the name that the task's would get."""
        if self._container(event.task) is not None:
            return
        self._world.engine.place(ContainerSpec(name=dir_of(event.task), image="stranger"))
        self._world.watch.strangers.add(f"t{event.task}")
        story = self._world.stories.get(f"t{event.task}")
        if story is not None:
            story.excuses.add("a stranger has its name")

    # The engine.

    def _outage(self, event: Event) -> None:
        world = self._world
        if world.engine.is_down or world.is_away:
            return
        kind, seconds = event.words[0], event.numbers[0]
        world.stories.excuse_unstarted("the engine was down")
        until = world.loop.time() + seconds
        world.engine.go_down(hang_until=until if kind == "hanging" else None)
        world.spawn(self._out(kind, seconds, world.engine.outages))

    async def _out(self, kind: str, seconds: float, outage: int) -> None:
        world = self._world
        await asyncio.sleep(seconds)
        if outage == world.engine.outages and world.engine.is_down:
            world.tell("engine is back")
            world.engine.come_up(kill_containers=kind == "killed, containers too")

    def _fault(self, event: Event) -> None:
        call, mode = event.words
        self._world.faults.arm(call, mode, int(event.numbers[0]))

    def _stream(self, event: Event) -> None:
        """The engine's events break off, or something becomes of the next few."""
        if event.words[0] == "ends":
            self._world.engine.end_streams()
        else:
            self._world.engine.spoilt_events += event.words * int(event.numbers[0])

    # The shim.

    def _kill(self, event: Event) -> None:
        if self._world.shim is not None:
            self._world.pause = event.numbers[0]
            self._world.kill(self._world.shim)

    def _stop(self, event: Event) -> None:
        shim = self._world.shim
        if shim is not None and shim.is_serving:
            self._world.pause = event.numbers[0]
            shim.stop(event.numbers[1])

    # The host.

    def _reboot(self, event: Event) -> None:
        if not self._world.is_away:
            self._world.reboot(is_heard=event.words[0] == "TERM heard")

    def _power_cut(self, event: Event) -> None:
        if not self._world.is_away:
            self._world.cut_power()

    def _damage(self, event: Event) -> None:
        """Something has written over a record."""
        dir = dir_of(event.task)
        content = self._world.disk.visible.get(dir)
        if content is None or content.kind is not RecordKind.GOOD:
            return
        story = self._world.stories.get(f"t{event.task}")
        if story is not None:
            story.is_damaged = story.is_loose = True
            story.excuses.add("its record was damaged")
            self._world.damaged.append(story)
        damaged = attrs.evolve(content, kind=RecordKind.DAMAGED, record=None)
        self._world.disk.put(dir, damaged)
        self._world.disk.flush(dir)

    def _hand_over(self, event: Event) -> None:
        shim = self._world.shim
        if shim is None or not shim.is_serving or self._world.engine.is_down:
            return
        self._world.is_away = True
        self._world.spawn(self._handed_over(shim, *event.words))

    async def _handed_over(self, shim: Shim, how: str, rewrites: str) -> None:
        world, boot = self._world, self._world.boot
        if how == "stop" and not shim.dead:
            stopped = shim.stop(5.0)
            await asyncio.wait((stopped,), timeout=6.0)
        world.kill(shim)
        if world.boot is boot and not world.power_is_off:
            await DstackShim(world, rewrites).live()
        if world.boot is boot and not world.power_is_off:
            world.back()
