"""A chat's journals: one file for each dialogue, kept in the user's state folder unless the user would
rather not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowspec.cli import resume
from flowspec.errors import InputError
from flowspec.runtime.answer import Answer
from flowspec.runtime.journal.file import Journal, new_path, newest
from flowspec.runtime.journal.lines import JournalContent, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import Session


@dataclass(slots=True)
class ChatJournal:
    """Keeps the dialogue; a file is made with its first question. Where none can be, that is told once, and
    the chat goes on."""

    tell: Callable[[str], None]
    setting: Callable[[Session], Setting]
    """What a new one begins with."""
    is_kept: bool = True
    journal: Journal | None = None

    def take_up(self, path: Path | None, *, good_part: bool) -> JournalContent:
        """Opens an earlier dialogue, the last one if none is named, to go on with it. Raises `InputError`."""
        place = path or newest(resume.journal_folder())
        self.journal, content = Journal.open(place, self.tell, good_part=good_part)
        return content

    def ask(self, session: Session, question: Question, *, user: str, system: str) -> None:
        """A question is about to be asked."""
        if self.journal is None and self.is_kept:
            self.journal = self._begin(session)
        if self.journal is not None:
            self.journal.ask(resume.entry_of(question, user=user, system=system))

    def tokens(self, tokens: Sequence[int]) -> None:
        if self.journal is not None:
            self.journal.tokens(tokens)

    def end(self, answer: Answer) -> None:
        if self.journal is not None:
            self.journal.end(answer.finish_reason, answer.text)

    def close(self) -> None:
        """The dialogue is over; another question begins another one."""
        if self.journal is not None:
            self.journal.close()
        self.journal = None

    def _begin(self, session: Session) -> Journal | None:
        try:
            path = new_path(resume.journal_folder())
            return Journal.start(path, self.setting(session), self.tell)
        except (OSError, InputError) as error:
            self.is_kept = False
            self.tell(f"the dialogue is not kept: {error}")
            return None
