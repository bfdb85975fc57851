"""Who has which GPU: locks in memory, keyed by owner.

Nothing on the host is changed by a lock, so nothing can be left behind by a crash. After a
restart they are taken again from what the containers and records say, before any task starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from dstack_shim.errors import NoCapacity, ResourceError


@frozen
class Reservation:
    """What became of a :meth:`GpuLocks.reserve`."""

    held: tuple[str, ...]
    """Locked for the owner now; the only ones it owns."""

    unknown: tuple[str, ...]
    """The part of ``held`` this host does not have at the moment."""

    conflicts: Mapping[str, str]
    """Asked for, but another has it: GPU → its owner."""


class GpuLocks:
    """Locks on the GPUs of this host.

    ``inventory`` holds their ids (NVIDIA uuid, AMD render node, Tenstorrent or Intel index) in
    the order in which they are given out.
    """

    def __init__(self, inventory: Sequence[str]) -> None:
        self._inventory = tuple(dict.fromkeys(inventory))
        self._owner_of: dict[str, str] = {}
        self._doubtful: dict[str, None] = {}

    @property
    def idle(self) -> tuple[str, ...]:
        """GPUs of this host that nobody holds, as far as anybody can tell."""
        if self._doubtful:
            return ()
        return tuple(gpu for gpu in self._inventory if gpu not in self._owner_of)

    def acquire(self, owner: str, count: int) -> tuple[str, ...]:
        """Lock ``count`` idle GPUs for ``owner``: all of them or none; -1: all idle, even none.

        An owner that holds some already gets just those again.

        Raises ``NoCapacity``; ``ResourceError`` for a count below -1.
        """
        if count < -1:
            raise ResourceError(f"gpu: {count} is not a number of GPUs; expected -1 (all) or more")
        if held := self.held().get(owner):
            return held
        idle = self.idle
        if count > len(idle):
            raise NoCapacity(
                f"{count} GPU(s) requested, {len(idle)} of this host's {len(self._inventory)} idle"
            )
        granted = idle if count == -1 else idle[:count]
        self._owner_of.update(dict.fromkeys(granted, owner))
        return granted

    def reserve(self, owner: str, gpus: Sequence[str]) -> Reservation:
        """Lock again, after a restart, what ``owner`` had.

        A GPU this host no longer shows is held all the same: a detection that failed must not
        make a GPU in use look free. One that another owner holds stays with that owner.
        """
        wanted = tuple(dict.fromkeys(gpus))
        conflicts = {
            gpu: self._owner_of[gpu] for gpu in wanted if self._owner_of.get(gpu, owner) != owner
        }
        held = tuple(gpu for gpu in wanted if gpu not in conflicts)
        self._owner_of.update(dict.fromkeys(held, owner))
        unknown = tuple(gpu for gpu in held if gpu not in self._inventory)
        return Reservation(held, unknown, conflicts)

    @property
    def doubtful(self) -> tuple[str, ...]:
        """Owners of nobody knows which GPUs."""
        return tuple(self._doubtful)

    def doubt(self, owner: str) -> None:
        """Nobody can tell which GPUs ``owner`` has: until that is settled none counts as idle."""
        self._doubtful[owner] = None

    def settle(self, owner: str) -> None:
        """What ``owner`` has is known now, and reserved."""
        self._doubtful.pop(owner, None)

    def release(self, owner: str) -> None:
        """Unlock the owner's GPUs, and nobody else's."""
        self.settle(owner)
        self._owner_of = {gpu: by for gpu, by in self._owner_of.items() if by != owner}

    def held(self) -> Mapping[str, tuple[str, ...]]:
        """Owner → its GPUs, in the order of the inventory; those it lacks come last."""
        rank = {gpu: position for position, gpu in enumerate(self._inventory)}
        ordered = sorted(self._owner_of, key=lambda gpu: (rank.get(gpu, len(rank)), gpu))
        owners: dict[str, tuple[str, ...]] = {}
        for gpu in ordered:
            owner = self._owner_of[gpu]
            owners[owner] = (*owners.get(owner, ()), gpu)
        return owners
