"""The SSH keys of tasks on the host: per user, our lines are the union of all tasks' keys.

Taking and giving back are one operation, a reconciliation with the claims that stand. Which
keys are ours is written in the file itself, by the marker on the line.
"""

from __future__ import annotations

import asyncio
import pwd
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import WeakValueDictionary

from dstack_shim.cancelling import to_its_end
from dstack_shim.errors import ResourceError
from dstack_shim.log import EventLog
from dstack_shim.resources import authorized_keys
from dstack_shim.resources.authorized_keys import Account
from dstack_shim.resources.protocol import Blocking, Claim, Ending, Others
from dstack_shim.resources.ssh_keys import BadKey, Merged, PublicKey, marked, merge, parse_key

Lookup = Callable[[str], pwd.struct_passwd]


class HostKeys:
    """Keys in ``~/.ssh/authorized_keys`` of the host's users."""

    name = "host_keys"

    def __init__(
        self, blocking: Blocking, log: EventLog, *, lookup: Lookup = pwd.getpwnam
    ) -> None:
        self._blocking = blocking
        self._log = log
        self._lookup = lookup
        self._ending = Ending()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def acquire(self, record: Claim, others: Others) -> None:
        """Let the record's keys in; a bad key is skipped and logged.

        Raises ``ResourceError``: no such user, or the file cannot be written.
        """
        if not record.config.host_ssh_keys:
            return
        self._ending.revoke(record.id)
        self._log_bad_keys(record)
        async with self._lock(record):
            account = await self._account(record)
            if account is None:
                raise ResourceError(f"host_ssh_user: {_user(record)!r} is no user of this host")
            claims = [*self._standing(record, others), record]
            # To its end: each key that was added is logged.
            await to_its_end(self._reconcile(record.id, account, claims))

    async def release(self, record: Claim, others: Others) -> None:
        """Remove the record's keys, except those that another claim needs.

        Raises ``ResourceError``: the file cannot be read or written.
        """
        self._ending.begin(record.id)
        if not record.config.host_ssh_keys:
            return
        async with self._lock(record):
            account = await self._account(record)
            if account is None:  # and so nobody who could log in by them
                self._log.warning("host_keys.no_user", task=record.id, user=_user(record))
                return
            await self._reconcile(record.id, account, self._standing(record, others))

    async def confirmed(self, record: Claim) -> tuple[str, ...]:
        """Those of the record's keys that stand on our lines already.

        For a record that the job itself could write: none of its keys may be let in on its
        word alone, nor may one that is there be taken for nobody's.

        Raises ``ResourceError``: the file cannot be read.
        """
        present = (await self.census([_user(record)])).get(_user(record), ())
        return tuple(
            text
            for text in record.config.host_ssh_keys
            if any(key.fingerprint in present for key in _keys([text]))
        )

    async def census(self, users: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """User → fingerprints on our lines, for those of ``users`` who have any.

        Raises ``ResourceError``: a file cannot be read.
        """
        found: dict[str, tuple[str, ...]] = {}
        for user in users:
            account = await self._find(user)
            if account is not None:
                content = await self._blocking(authorized_keys.read, account)
                found[user] = marked(content)
        return {user: fingerprints for user, fingerprints in found.items() if fingerprints}

    async def _reconcile(self, owner: str, account: Account, claims: Sequence[Claim]) -> None:
        wanted = [key for claim in claims for key in _keys(claim.config.host_ssh_keys)]

        def change(old: bytes) -> Merged:
            return merge(old, wanted)

        merged = await self._blocking(authorized_keys.update, account, change)
        # Removing ours may remove the only copy: a server adds no key that is there already.
        for event, fingerprints in (("added", merged.added), ("removed", merged.removed)):
            for fingerprint in fingerprints:
                self._log.info(
                    f"host_keys.{event}", task=owner, user=account.name, key=fingerprint
                )

    def _standing(self, record: Claim, others: Others) -> list[Claim]:
        claims = self._ending.standing(record.id, others)
        return [claim for claim in claims if _user(claim) == _user(record)]

    async def _account(self, record: Claim) -> Account | None:
        return await self._find(_user(record))

    async def _find(self, user: str) -> Account | None:
        try:
            entry = await self._blocking(self._lookup, user)
        except (KeyError, ValueError):  # not there, or cannot be a name (NUL, half a character)
            return None
        except OSError as error:
            raise ResourceError(f"host_ssh_user: {user!r} cannot be looked up: {error}") from error
        return Account(user, entry.pw_uid, entry.pw_gid, entry.pw_dir)

    def _lock(self, record: Claim) -> asyncio.Lock:
        return self._locks.setdefault(_user(record), asyncio.Lock())

    def _log_bad_keys(self, record: Claim) -> None:
        for position, text in enumerate(record.config.host_ssh_keys):
            try:
                parse_key(text)
            except BadKey as error:
                self._log.warning(
                    "host_keys.skipped", task=record.id, position=position, error=error
                )


def _user(claim: Claim) -> str:
    return claim.config.host_ssh_user


def _keys(texts: Iterable[str]) -> list[PublicKey]:
    keys = []
    for text in texts:
        try:
            keys.append(parse_key(text))
        except BadKey:
            continue  # logged when its task took its keys
    return keys
