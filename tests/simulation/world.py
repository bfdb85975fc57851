"""A world: one host with an engine, a disk and what tasks take; one shim after another.

Everything is drawn from the schedule's seed. Whatever happens, what is answered, what is on disk
and what the API tells is held against the stories as it goes along (see ``watch.py``).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from dstack_shim.resources.protocol import Claim
from dstack_shim.tasks.outcomes import Boot
from tests.lab.fake_engine import FakeContainer
from tests.simulation.disk import Disk
from tests.simulation.engine import SimEngine
from tests.simulation.faults import Faults
from tests.simulation.host import Host
from tests.simulation.log import SimLog
from tests.simulation.loop import START, LoopClock, VirtualLoop, nobody, outside
from tests.simulation.schedule import Schedule
from tests.simulation.shim import Shim
from tests.simulation.stories import Stories, Story
from tests.simulation.watch import Watch

PAUSES = (0.1, 3.0, 3.0, 10.0)
"""Seconds a supervisor waits before it starts the next shim, if no event says otherwise."""


class World:
    """One run of a schedule."""

    def __init__(self, schedule: Schedule, *, tells: bool = False) -> None:
        self.schedule = schedule
        self.dice = random.Random(f"world {schedule.seed}")
        self.loop = VirtualLoop()
        self.clock = LoopClock(self.loop)
        self.violations: list[str] = []
        self.trace: list[str] = []
        self.happened: Counter[str] = Counter()
        self.faults = Faults()
        self.disk = Disk()
        self.host = Host()
        self.stories = Stories(self.disk, self.violate)
        self.watch = Watch(self)
        self.engine = SimEngine(self.loop, self.dice, self.watch)
        self.engine.strike = self._strike_engine
        self.engine.kill_shim = self._kill_current
        self.engine.tells_events = schedule.tells_events
        self.boot = Boot("boot 1", START - 1000)
        self.shim: Shim | None = None
        self.is_away = False
        """No shim is started: the power is off, or another shim has the host."""
        self.power_is_off = False
        self.unburied: list[Shim] = []
        self.generations = 0
        self.pause: float | None = None
        self.waiting: list[Callable[[Shim], None]] = []
        """Requests that found nobody."""
        self.damaged: list[Story] = []
        """Tasks whose record something has written over."""
        self.tells = tells
        for number, config in enumerate(schedule.configs):
            image = f"{config.image_name}:latest"
            if number in schedule.remote:
                self.engine.registry[image] = schedule.image(number)
            else:
                self.engine.images[image] = schedule.programs[number]

    # Telling.

    def tell(self, line: str) -> None:
        """Add to the trace, if somebody wants one."""
        if self.tells:
            self.trace.append(f"{self.loop.time():12.3f} {line}")

    def violate(self, text: str) -> None:
        """Something that must never be."""
        self.violations.append(text)
        self.tell(f"VIOLATION {text}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let something go on in the world, whatever becomes of any shim."""
        return outside(self.loop, work)

    # The shim's life.

    def start(self) -> None:
        """The supervisor starts a shim."""
        self.generations += 1
        self.watch.generation_begins()
        log = SimLog(self.tell if self.tells else None, self._broken)
        self.shim = Shim(
            self, as_bytes=self.schedule.as_bytes, interval=self.schedule.interval, log=log
        )
        self.tell(f"shim {self.generations} begins")
        self.shim.begin()

    def kill(self, shim: Shim) -> None:
        """It ends here and now; the supervisor starts another."""
        if shim.dead:
            return
        self.tell(f"shim {self.generations} dies")
        shim.die()
        shim.is_serving = False
        self.engine.shim_died(shim)
        self.stories.excuse_unstarted("the shim went away")
        self.unburied.append(shim)
        self.loop.call_soon(self.bury, context=nobody())
        if shim is self.shim:
            self.shim = None
            self._supervise()

    def bury(self) -> None:
        """Clean up after whoever has died."""
        while self.unburied:
            self.unburied.pop().bury()

    def back(self) -> None:
        """The supervisor is there again."""
        self.is_away = False
        self._supervise()

    def _supervise(self) -> None:
        pause, self.pause = self.pause, None
        if not self.is_away:
            self.spawn(self._start_after(self.dice.choice(PAUSES) if pause is None else pause))

    async def _start_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.shim is None and not self.is_away:
            self.start()

    def _kill_current(self) -> None:
        if self.shim is not None:
            self.kill(self.shim)

    def _broken(self, line: str) -> None:
        self.violate(f"the core has a fault: {line}")

    def is_serving(self, shim: Shim) -> None:
        """Told when a shim answers requests."""
        self.tell(f"shim {self.generations} serves")
        self.watch.observe(shim)
        waiting, self.waiting = self.waiting, []
        for ask in waiting:
            ask(shim)

    # The host's life.

    def cut_power(self) -> None:
        """All that is not flushed may be gone; whatever runs has ended when it comes back."""
        if self.power_is_off:
            return
        self.tell("POWER CUT")
        self.happened["power is cut"] += 1
        self._halt()
        self.disk.cut_power(self.dice)
        # What the engine writes for a container that it finds dead is not what the job said.
        ended = self.engine.freeze(255 if self.dice.random() < 0.7 else 0, "power")
        self.spawn(self._come_back(ended))

    def reboot(self, *, is_heard: bool) -> None:
        """An orderly reboot: containers get TERM, and end by it or by KILL."""
        if self.power_is_off:
            return
        self.tell("REBOOT")
        self._halt()
        self.engine.end_all(0 if is_heard else 137, "reboot")
        self.spawn(self._come_back([]))

    def _halt(self) -> None:
        self.is_away = self.power_is_off = True
        self.watch.host_halts()
        self._kill_current()
        self.engine.abort_requests()
        self.engine.go_down()

    async def _come_back(self, ended: list[FakeContainer]) -> None:
        await asyncio.sleep(self.dice.choice((12.0, 40.0)))
        self.host.reboot()
        self.boot = Boot(f"boot of {self.loop.time():.3f}", self.clock.now())
        await asyncio.sleep(0.9)  # the engine finds what ended with the power
        for container in ended:
            container.finished_at = self.clock.now()
        self.engine.come_up(kill_containers=False)
        self.tell(f"{self.boot.id} begins")
        self.power_is_off = False
        self.back()

    # What strikes; see tests.simulation.shim.Surroundings.

    def _strike_engine(self, call: str) -> str:
        mode = self.faults.strike(call)
        if mode:
            self.struck(self.shim, call, mode)
        return mode

    def struck(self, shim: Shim | None, call: str, mode: str) -> None:
        """Told when a fault strikes a call."""
        self.tell(f"FAULT {call}: {mode}")
        if call == "last_lines":
            self.stories.output_may_be_lost = True
        if shim is not None:
            self.watch.excuse_starting(shim, f"{call}: {mode}")

    def may_take(self, claim: Claim) -> None:
        """Told before something is taken for the claim."""
        self.watch.may_take(claim)

    def may_give(self, claim: Claim) -> None:
        """Told before something of the claim is given back."""
        self.watch.may_give(claim)
