"""What is said of an answer when it has ended: its rate, and the statistics that a chat shows when asked."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from flowspec.cli import answer_report
from flowspec.cli.answer_report import figures, statistics_lines
from flowspec.core.head.hop_sums import reported
from flowspec.core.head.statistics import Statistics
from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS, Hop
from flowspec.runtime.answer import Answer
from flowspec.runtime.token_stream import Timing
from tests.cli.running import Run


def answer(reason: str, ended_s: float, *at_s: float, resumed: int = 0) -> Answer:
    timing = Timing(new_tokens=[1] * resumed, resumed=resumed)
    for each in at_s:
        timing.add((1,), each)
    timing.ended_s = ended_s
    return Answer(
        text="",
        token_ids=tuple(timing.new_tokens),
        finish_reason=reason,
        prompt_tokens=1,
        resumed_tokens=resumed,
        timing=timing,
        statistics={},
    )


FULL = ", stopped: the context of 4 tokens is full"
RATE = "3 tokens, 2.0 tokens/s, first after 1.00 s"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (answer("stop", 3.0, 1.0, 1.5, 2.0), RATE),
        (answer("cancelled", 2.1, 1.0, 1.5, 2.0), f"{RATE}, stopped"),
        (answer("cancelled", 42.0, 1.0, 1.5, 2.0), f"{RATE}, stopped after 40 s without a token"),
        (answer("cancelled", 40.0), "0 tokens, stopped after 40 s without a token"),
        (answer("stop", 1.0), "0 tokens: the model ended the answer at once"),
        (answer("cancelled", 0.1, resumed=5), "5 tokens (5 taken over), stopped"),
        (answer("stop", 1.0, 1.0), "1 token, first after 1.00 s"),
        (answer("length", 2.0, 1.0, 1.5, 2.0), f"{RATE}{FULL}; --context takes up to 9"),
    ],
)
def test_a_wait_that_ctrl_c_ended_is_told_beside_the_rate(found: Answer, expected: str) -> None:
    assert figures(found, Mock(**{"head.plan.context": 4, "spec.context_max": 9})) == expected


def report(stages: int, scale: int) -> dict[str, Any]:
    """An answer of `4 * scale` tokens in `2 * scale` segments that took `scale` tenths of a second."""
    found = Statistics(stage_count=stages, submitted_s=1000.0)
    found.nodes_drafted, found.dropped_alive = 100 * scale, 30 * scale
    found.draft_passes, found.draft_rows, found.draft_s = 3 * scale, 40 * scale, scale / 20
    rows = {"rows": 32, "dead_in_queue": 8, "dead_between_layers": 4, "dead_late": 2}
    hop = Hop(received_s=0, queued_s=0.01, compute_s=0.03, own_s=0.001, **rows)  # type: ignore[arg-type]
    for _ in range(2 * scale):
        found.sent(64, 10)
        found.landed((hop,) * stages, 1.0, 2.0)
    for number in range(scale):
        found.emitted(4, 1000.5 + number / 10)
    found.tokens_in_flight = 4 * scale - 1
    return {**found.report(), "head_s": scale / 100}


@pytest.mark.parametrize(("stages", "scale"), [(1, 1), (64, 5000)])
def test_no_line_is_wider_than_a_terminal(stages: int, scale: int) -> None:
    lines = statistics_lines(report(stages, scale))
    assert max(map(len, lines)) <= answer_report.WIDTH
    assert " ".join(lines).count("%") == stages + 1, "one for each stage, and rho"


def test_every_figure_is_said() -> None:
    found = report(2, 50)
    text = " ".join(" ".join(statistics_lines(found)).split())
    for figure in (
        *("100 after the prompt, of which 49 gave", "4.00 at a time", "window 10.0", "1.96 per segment"),
        *("5000 drafted, 6400 sent, 1500 given up alive", "6400 run by the stages", "2800 dropped dead"),
        *("100% were in flight (rho)", "computing 6.00", "head 0.50", "150 passes, 2000 rows, 2.50 s"),
        *(f"{told} {found[reported(name)]:.2f}" for name, told in HOP_SECONDS.items()),
        *(f"{found[reported(name)]} {told}" for name, told in HOP_ROWS.items()),
    ):
        assert figure in text
    assert "waited" not in text
    assert any("2.25 s" in line for line in statistics_lines({**found, "waited_s": 2.25}))
    (line,) = statistics_lines({**Statistics(stage_count=2).report(), "head_s": 0.0})
    assert "no segments" in line


@pytest.mark.usefixtures("shared")
def test_a_chat_shows_them_for_its_last_answer(run: Run) -> None:
    lines = "/stats all\n/stats\nWhat is 2 + 3?\n/stats\n/stats all\n/stats some\n/quit\n"
    shown = run("chat", "--local=2", "--temperature=0", "--no-journal", stdin=lines).out
    before, after = shown.split("tokens/s, first after", 1)
    assert before.count("Nothing was answered yet; ") == 2
    first, last = after.split("/stats all tells more.\n")
    assert len(first.splitlines()[2:]) == 2, "figures, an empty line, and then two"
    assert "expected /stats or /stats all, got some" in last
    heads = {line.split()[0] for line in last.splitlines() if line[:11].strip() and line[9:11] == "  "}
    (legend,) = (line for line in last.splitlines() if line.startswith("memory:"))
    assert legend.endswith("without computing"), "a pipe gets it in one line, with no blank behind"
    assert heads >= {"prompt", "answer", "segments", "tokens", "stages", "drafter", "seconds"}


def test_of_prompts_of_earlier_runs_no_text_is_shown() -> None:
    class Learnt:
        drafters = ("draft",)

        def expertise_report(self) -> list[dict[str, Any]]:
            plain = {"answers": 3, "best": "draft", "worth": {"draft": 0.8}}
            return [{**plain, "example": example} for example in ([], [5, 6])]

    table = answer_report.expertise_table(Learnt(), None)  # type: ignore[arg-type]
    assert table is not None
    assert list(table.columns[0].cells) == ["(in earlier runs)", "5 6"]
