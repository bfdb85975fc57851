"""A command runner that runs nothing: it answers from a table and remembers what was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dstack_shim.errors import CommandMissing
from dstack_shim.host.commands import MAX_OUTPUT, Finished

Answer = Finished | BaseException


class FakeCommands:
    """Answers each program by its name; a list is answered item by item, the last for ever."""

    def __init__(self, answers: Mapping[str, Answer | Sequence[Answer]]) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.timeouts: list[float] = []
        self._answers = {
            program: [answer] if isinstance(answer, (Finished, BaseException)) else list(answer)
            for program, answer in answers.items()
        }

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Finished:
        self.asked.append(tuple(argv))
        self.timeouts.append(timeout)
        answers = self._answers.get(argv[0])
        if not answers:
            raise CommandMissing(f"{argv[0]} cannot be run: No such file or directory")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer
