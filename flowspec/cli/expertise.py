"""The table of what each model beside the target was worth so far, by what prompts are about."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from flowspec.cli.visible import visible
from flowspec.model.text import Tokenizer
from flowspec.runtime.session import Session

EXAMPLE_CHARS = 32
"""Of a prompt of the domain: its end."""


def expertise_table(session: Session, tokenizer: Tokenizer | None) -> Table | None:
    """What each drafter was worth by what prompts are about, the best in bold; None while nothing is
    known."""
    found = [domain for domain in session.expertise_report() if domain["answers"]]
    if not found:
        return None
    table = Table("prompts like", "answers", *session.drafters, box=None)
    for domain in found:
        text = (
            " ".join(map(str, domain["example"]))
            if tokenizer is None
            else " ".join(tokenizer.decode(domain["example"]).split())
        )
        worth = [
            f"[bold]{value:.2f}[/]" if name == domain["best"] else f"{value:.2f}"
            for name, value in domain["worth"].items()
        ]
        table.add_row(escape(visible(text[-EXAMPLE_CHARS:])), str(domain["answers"]), *worth)
    return table
