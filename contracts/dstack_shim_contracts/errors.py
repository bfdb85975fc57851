"""Every exception of the contracts.

::

    ContractError
    ├── BodyError                 a JSON body breaks a rule of its shape
    ├── RecordError               a ``task.json`` cannot be used
    │   ├── DamagedRecord         it is not a record: cut, mixed up, wrong types
    │   ├── UnreadableRecord      it is a record for a newer reader
    │   └── RecordTooLarge        it would be too large to be read back
    └── ClientError               a call to a shim gave no result
        ├── ShimUnreachable       no answer at all, or half of one
        ├── ShimResponseError     the shim answered with an error status
        │   └── ShutdownRefused   409: something is in the way of a shutdown
        └── UnexpectedAnswer      the shim answered 200 with something else

Messages never contain the offending value: it may be a secret.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the models raise what is defined here
    from dstack_shim_contracts.api import ShutdownRefusal


class ContractError(Exception):
    """Base of everything raised by this package."""


class BodyError(ContractError):
    """A JSON body breaks a rule of its shape; an API answers 400 with this text.

    ``field`` is the JSON path of the offender (``volumes[0].name``), or ``body`` for the
    document as a whole. ``expected`` completes "expected …".
    """

    def __init__(self, field: str, expected: str) -> None:
        """Name the field and what was expected of it."""
        super().__init__(field, expected)
        self.field = field
        self.expected = expected

    def __str__(self) -> str:
        return f"{self.field}: expected {self.expected}"


class RecordError(ContractError):
    """A record of a task cannot be used."""


class DamagedRecord(RecordError):
    """The bytes are no record of a task: set the file aside and go on without it."""

    def __init__(self, why: str) -> None:
        """Say what is wrong with the bytes."""
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class UnreadableRecord(RecordError):
    """A sound record that asks for a newer reader: leave the file as it is."""

    def __init__(self, version: int, min_reader: int) -> None:
        """Say which version the record has and which reader it asks for."""
        super().__init__(version, min_reader)
        self.version = version
        self.min_reader = min_reader

    def __str__(self) -> str:
        return f"record of version {self.version} needs a reader of version {self.min_reader} or newer"


class RecordTooLarge(RecordError):
    """A record would be larger than what is read back: shorten what it holds."""

    def __init__(self, size: int, limit: int) -> None:
        """Give size and limit in bytes."""
        super().__init__(size, limit)
        self.size = size
        self.limit = limit

    def __str__(self) -> str:
        return f"record of {self.size} bytes is over the limit of {self.limit}"


class ClientError(ContractError):
    """A call to a shim gave no result."""


class ShimUnreachable(ClientError):
    """No answer, or not all of it: refused, timed out, closed half way."""


class ShimResponseError(ClientError):
    """The shim answered with an error status; ``message`` is its text."""

    def __init__(self, status: int, message: str) -> None:
        """Keep the HTTP status and the text of the answer."""
        super().__init__(status, message)
        self.status = status
        self.message = message

    def __str__(self) -> str:
        return f"shim answered {self.status}: {self.message}"


class ShutdownRefused(ShimResponseError):
    """The shim goes on: a shutdown that asked for it is refused; ``refusal`` lists why."""

    def __init__(self, refusal: "ShutdownRefusal") -> None:
        """Keep what is in the way."""
        super().__init__(409, ", ".join(item.why for item in refusal.in_the_way))
        self.refusal = refusal


class UnexpectedAnswer(ClientError):
    """The shim answered 200 with a body that breaks the contract."""
