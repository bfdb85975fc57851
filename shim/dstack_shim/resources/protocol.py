"""What the adapters ask of those who use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from dstack_shim_contracts.api import TaskConfig

T = TypeVar("T")


class Claim(Protocol):
    """What one owner asked for; a ``TaskRecord`` is one."""

    @property
    def id(self) -> str:
        """The owner."""
        ...

    @property
    def config(self) -> TaskConfig:
        """What it asked for."""
        ...


Others = Callable[[], Sequence[Claim]]
"""The claims of all other owners that are not released, as of now, oldest first. A function,
because it is asked under the lock of the thing in question: one submitted meanwhile counts."""


class Blocking(Protocol):
    """Runs a blocking call off the event loop and waits for it, whatever happens meanwhile.

    A caller that is cancelled waits too: an adapter's lock must not open while the call that
    it guards is still at work.
    """

    def __call__(self, call: Callable[..., T], /, *args: object) -> Awaitable[T]:
        """The result of ``call(*args)``."""
        ...


class Ending:
    """Owners whose release has begun in this process: their claims no longer count.

    Two owners of one volume that are released at the same time would otherwise each leave it
    to the other. A restart forgets this, harmlessly: then nobody's release is under way.
    """

    def __init__(self) -> None:
        self._owners: set[str] = set()

    def begin(self, owner: str) -> None:
        """The owner's claim counts no longer, whether or not its release succeeds."""
        self._owners.add(owner)

    def revoke(self, owner: str) -> None:
        """The owner is back: it was removed and its id submitted anew."""
        self._owners.discard(owner)

    def standing(self, owner: str, others: Others) -> list[Claim]:
        """The claims of others that count, seen from ``owner``."""
        claims = [claim for claim in others() if claim.id != owner]
        self._forget_all_but([owner, *(claim.id for claim in claims)])
        return [claim for claim in claims if claim.id not in self._owners]

    def _forget_all_but(self, owners: Iterable[str]) -> None:
        # Whoever is released completely is no longer among the others and needs no entry here.
        self._owners.intersection_update(owners)
