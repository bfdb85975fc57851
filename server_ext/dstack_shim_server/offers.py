"""
Which shim the instance being checked shall have, and from where: dstack's answers or the operator's.

What counts is the choice in the record. Before that was read once, an operator's choice means that
nothing is installed: another server may know better.
"""

import functools

import attrs

from dstack_shim_server import choice, decisions
from dstack_shim_server.choice import Choice, Offer
from dstack_shim_server.observation import installed_version
from dstack_shim_server.record.recorder import Recorder
from dstack_shim_server.settings import Mode
from dstack_shim_server.sightings import COMPONENTS, Sightings, Watch


@attrs.frozen
class Offers:
    """Answers for dstack's instance check; shared by all threads."""

    watch: Watch
    recorder: Recorder | None

    def version(self, stock: str | None) -> str | None:
        """Return the version the instance shall have; None: nothing is to be installed."""
        sightings = self.watch.current()
        if sightings is None:
            return stock
        wanted = self._version(sightings, stock)
        sightings.wanted = wanted or ""
        return wanted

    def address(self, stock: str, arch: object, version: object) -> str:
        """Return where the file of that version is."""
        sightings = self.watch.current()
        offer = self._offer(sightings) if sightings is not None else None
        if sightings is None or offer is None or not offer.url:
            return stock
        named = plain_arch(arch)
        sightings.sha256 = offer.digest_for(named)
        return offer.address(str(version), named)

    def _version(self, sightings: Sightings, stock: str | None) -> str | None:
        offer = self._offer(sightings)
        if offer is None:
            return None
        if not offer.version:
            return stock
        document = sightings.document(COMPONENTS, self.watch.clock())
        installed = installed_version(decisions.shim_component(document))
        if choice.is_downgrade(installed, offer.version) and not self._chosen().allow_downgrade:
            return None
        return offer.version

    def _offer(self, sightings: Sightings) -> Offer | None:
        """Return the offer for the instance; None: which one is not known yet."""
        recorder = self.recorder
        if recorder is None or recorder.settings.mode is not Mode.ENFORCE:
            return Offer()
        if not recorder.snapshot.choice:
            return None if recorder.settings.choice else Offer()
        chosen = self._chosen()
        fleet = recorder.fleet(sightings.subject.fleet_id if sightings.subject else "")
        if fleet is None:
            return None if chosen.fleets else chosen.everywhere
        return chosen.offer(fleet.project, fleet.name)

    def _chosen(self) -> Choice:
        return _read(self.recorder.snapshot.choice) if self.recorder else Choice()


# Each check asks; it changes when a server is started.
_read = functools.lru_cache(maxsize=4)(choice.read_document)


def plain_arch(arch: object) -> str:
    """Name an architecture as download URLs do; what is not known is taken for amd64, as dstack does."""
    word = str(getattr(arch, "value", arch) or "").lower()
    return "arm64" if word.startswith(("arm", "aarch")) else "amd64"
