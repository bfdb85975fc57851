"""What happens in a world, drawn from a seed: a list of events that can be read and shortened."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
from dstack_shim_contracts.api import InstanceMount, TaskConfig, VolumeInfo, VolumeMount

from tests.lab.fake_engine import Program, RemoteImage
from tests.simulation.faults import POSSIBLE
from tests.simulation.host import GPUS

REASONS = (
    "terminated_by_user",
    "terminated_by_server",
    "max_duration_exceeded",
    "aborted_by_user",
)
GRACES = (0, 5, 3600)
SECRET = "not-to-be-seen"
USERS = ("alice", "bob")


@attrs.frozen
class Event:
    """One thing that happens, ``after`` seconds after the one before it."""

    after: float
    kind: str
    task: int = 0
    words: tuple[str, ...] = ()
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        about = f" t{self.task}" if self.kind in _ABOUT_A_TASK else ""
        words = "".join(f" {word or '(none)'}" for word in self.words)
        numbers = "".join(f" {number:g}" for number in self.numbers)
        return f"+{self.after:<8.3f} {self.kind}{about}{words}{numbers}"


@attrs.frozen
class Schedule:
    """All that is drawn from a seed; ``events`` may be fewer than were drawn."""

    seed: int
    configs: tuple[TaskConfig, ...]
    programs: tuple[Program, ...]
    remote: frozenset[int]
    paces: tuple[float, ...]
    events: tuple[Event, ...]
    interval: float
    tells_events: bool
    """Whether the engine tells what happens."""
    as_bytes: bool
    """Whether records go through their bytes."""

    def only(self, kept: Sequence[int]) -> Schedule:
        """The same with some of its events."""
        return attrs.evolve(self, events=tuple(self.events[number] for number in kept))

    def image(self, task: int) -> RemoteImage:
        """What a registry has for the task, if its image is not here."""
        return RemoteImage(
            self.programs[task], layers=(1000, 2000), pace=self.paces[task], error_midway=""
        )


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    dice = random.Random(f"schedule {seed}")
    tasks = dice.randint(2, 7)
    configs = tuple(_config(number, dice) for number in range(tasks))
    events = []
    for number in range(dice.randint(35, 75)):
        # The first few are submits, or nothing would be there for anything to happen to.
        is_first = number < tasks - 1
        kind = "submit" if is_first else dice.choices(_KINDS, cum_weights=_CUMULATED)[0]
        task = number if is_first else dice.randrange(tasks)
        words, numbers = _DRAWN.get(kind, _nothing)(dice)
        events.append(Event(_pause(dice), kind, task, words, numbers))
    return Schedule(
        seed=seed,
        configs=configs,
        programs=tuple(_program(number, dice) for number in range(tasks)),
        remote=frozenset(number for number in range(tasks) if dice.random() < 0.35),
        paces=tuple(dice.choice((0.0, 0.1, 5.0, 60.0)) for _ in range(tasks)),
        events=tuple(events),
        interval=dice.choice((2.0, 10.0, 30.0, 100.0)),
        tells_events=dice.random() < 0.6,
        as_bytes=seed % 64 == 0,
    )


def _pause(dice: random.Random) -> float:
    roll = dice.random()
    if roll < 0.3:
        return 0.0
    if roll < 0.6:
        return round(dice.random() * 0.05, 3)
    if roll < 0.92:
        return round(dice.random() * 4, 3)
    return round(dice.random() * 90, 3)


def _config(number: int, dice: random.Random) -> TaskConfig:
    volumes = dice.sample(("data", "models", "home"), dice.choice((0, 0, 1, 1, 2)))
    return TaskConfig(
        id=f"t{number}",
        name=f"job{number}",
        registry_username=dice.choice(("", "user")),
        registry_password=dice.choice(("", SECRET)),
        image_name=f"image{number}",
        gpu=dice.choice((0, 0, 0, 1, 1, 2, len(GPUS), -1)),
        network_mode=dice.choice(("host", "host", "bridge")),
        volumes=tuple(VolumeInfo(name=name) for name in volumes),
        volume_mounts=tuple(VolumeMount(name=name, path=f"/{name}") for name in volumes),
        instance_mounts=(
            (InstanceMount(instance_path="/cache", path="/cache"),) if dice.random() < 0.3 else ()
        ),
        host_ssh_user=dice.choice(USERS),
        host_ssh_keys=tuple(dice.sample(("key-a", "key-b", "key-c"), dice.choice((0, 1, 2)))),
    ).with_defaults()


def _program(number: int, dice: random.Random) -> Program:
    kind = dice.choice(("runs on", "runs on", "ends", "ends", "fails", "at once", "never starts"))
    after = {"runs on": None, "at once": 0.0, "never starts": None}.get(
        kind, dice.choice((0.5, 8.0, 45.0, 300.0))
    )
    return Program(
        lines=tuple(f"line {line} of {number}" for line in range(dice.choice((0, 2, 7)))),
        after=after,
        code=dice.choice((1, 7, 11)) if kind == "fails" else 0,
        on_term=dice.choice((None, 0, 143)),
        start_error="no such device" if kind == "never starts" else "",
    )


Drawn = tuple[tuple[str, ...], tuple[float, ...]]


def _nothing(dice: random.Random) -> Drawn:
    return (), ()


def _words(*choices: Sequence[str]) -> Callable[[random.Random], Drawn]:
    def drawn(dice: random.Random) -> Drawn:
        return tuple(dice.choice(choice) for choice in choices), ()

    return drawn


def _terminate(dice: random.Random) -> Drawn:
    return (dice.choice((*REASONS, "")),), (float(dice.choice(GRACES)),)


def _exit(dice: random.Random) -> Drawn:
    return (), (float(dice.choice((0, 0, 1, 7, 137))),)


def _outage(dice: random.Random) -> Drawn:
    kind = dice.choice(("killed", "killed, containers too", "hanging"))
    return (kind,), (dice.choice((2.0, 12.0, 40.0, 600.0)),)


def _fault(dice: random.Random) -> Drawn:
    return dice.choice(POSSIBLE), (float(dice.choice((1, 1, 2, 4))),)


def _stream(dice: random.Random) -> Drawn:
    return (dice.choice(("ends", "late", "lost", "lost", "twice")),), (dice.choice((1, 3)),)


def _restart(dice: random.Random) -> Drawn:
    return (), (dice.choice((0.1, 3.0, 3.0, 65.0)),)


def _stop(dice: random.Random) -> Drawn:
    return (), (dice.choice((0.1, 3.0)), dice.choice((5.0, 0.5)))


_WEIGHTS = {
    "submit": 14,
    "terminate": 14,
    "remove": 10,
    "exit": 7,
    "delete container": 2,
    "pause": 2,
    "outage": 3,
    "fault": 26,
    "event stream": 4,
    "kill": 5,
    "stop": 4,
    "reboot": 1.5,
    "power cut": 1.5,
    "hand over": 2,
    "damage": 1,
    "stranger's name": 1,
    "wait": 5,
}
_KINDS = tuple(_WEIGHTS)
_CUMULATED = tuple(accumulate(_WEIGHTS.values()))
_DRAWN: dict[str, Callable[[random.Random], Drawn]] = {
    "terminate": _terminate,
    "exit": _exit,
    "outage": _outage,
    "fault": _fault,
    "event stream": _stream,
    "kill": _restart,
    "stop": _stop,
    "reboot": _words(("TERM heard", "TERM not heard")),
    "hand over": _words(("kill", "stop"), ("rewrites all", "rewrites some", "rewrites none")),
}
_ABOUT_A_TASK = frozenset(
    {
        "submit",
        "terminate",
        "remove",
        "exit",
        "delete container",
        "pause",
        "damage",
        "stranger's name",
    }
)
