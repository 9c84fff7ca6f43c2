"""A line of the log that comes again and again is said once, later how often it came; numbers for people."""

from __future__ import annotations

import io
import logging

from flowspec.repeats import ABOUT, EVERY_S, LINES_MAX, RepeatHandler, Repeats
from flowspec.rounding import duration, rounded


def test_a_line_is_said_once_and_counted_until_another_comes() -> None:
    repeats = Repeats()
    assert repeats.take("no room", 0.0) == []
    assert [repeats.take("no room", 0.1 * number) for number in range(1, 4)] == [None] * 3
    assert repeats.take("a head came", 1.0) == ["no room (3 times more)"]
    assert repeats.take("no room", 2.0) is None, "what was told a moment ago"
    assert repeats.take("bye", 3.0) == ["no room (once more)"]
    assert repeats.rest(3.0) == []


def test_lines_that_take_turns_are_said_once_each() -> None:
    repeats = Repeats()
    found = [repeats.take(("one", "two")[number % 2], 0.01 * number) for number in range(1000)]
    assert found == [[], [], *[None] * 998]
    assert repeats.rest(11.0) == ["one (499 times more)", "two (499 times more)"]


def test_a_line_that_goes_on_is_told_of_when_it_is_due_and_after_a_while_again() -> None:
    repeats = Repeats()
    repeats.take("no room", 0.0)
    assert repeats.due_s == float("inf"), "it came once"
    for number in range(1, int(2 * EVERY_S)):
        repeats.take("no room", 0.5 * number)
    assert repeats.due_s == EVERY_S
    assert repeats.rest(EVERY_S - 0.1, is_due=True) == []
    assert repeats.rest(EVERY_S, is_due=True) == [f"no room ({int(2 * EVERY_S) - 1} times more)"]
    assert repeats.due_s == float("inf")
    repeats = Repeats()
    repeats.take("no room", 0.0)
    assert repeats.take("no room", EVERY_S - 0.1) is None
    assert repeats.take("no room", EVERY_S + 0.1) == ["no room (once more)"]


def test_texts_about_the_same_or_with_the_same_first_line_are_one() -> None:
    repeats = Repeats()
    assert repeats.take("failed\nwhen=1.5", 0.0) == []
    assert repeats.take("failed\nwhen=1.6", 0.1) is None
    repeats = Repeats()
    assert repeats.take("refused key 1\nwith a trace", 0.0, "peer") == []
    assert repeats.take("refused key 2", 0.1, "peer") is None
    assert repeats.take("refused key 3", 0.2, "another") == ["refused key 1 (once more)"]


def test_so_many_lines_are_remembered() -> None:
    repeats = Repeats()
    for number in range(LINES_MAX + 1):
        assert repeats.take(f"line {number}", 0.0) == []
    assert repeats.take("line 0", 0.0) == [], "it was forgotten"
    assert repeats.take(f"line {LINES_MAX}", 0.0) is None


def test_a_log_counts_warnings_and_says_every_other_line() -> None:
    said, now_s = io.StringIO(), [0.0]
    stream = logging.StreamHandler(said)
    stream.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    handler = RepeatHandler(stream, lambda: now_s[0])
    assert handler.formatter is stream.formatter, "logging.basicConfig would set another one"
    log = logging.Logger("of its own", logging.INFO)
    log.addHandler(handler)
    for number in range(3):
        log.info("ready")
        log.warning("refused %s", number, extra={ABOUT: "refused"})
    log.error("another")
    log.error("another")
    now_s[0] = EVERY_S + 1
    handler.tell_due()
    log.error("the last")
    log.error("the last")
    handler.close()
    assert said.getvalue().splitlines() == [
        *("INFO ready", "WARNING refused 0", "INFO ready", "INFO ready"),
        *("WARNING refused 0 (2 times more)", "ERROR another", "WARNING another (once more)"),
        *("ERROR the last", "WARNING the last (once more)"),
    ]


def test_three_digits_that_count_and_no_exponent() -> None:
    values = (0, 0.0123456, 0.00000123, 2.0, 42.17, 99.96, 1594.2, -3.14159, 1234567.8, float("inf"))
    shown = "0 0.0123 0.000001 2 42.2 100 1594 -3.14 1234568 inf"
    assert " ".join(map(rounded, values)) == shown


def test_durations_are_in_the_unit_that_is_read_most_easily() -> None:
    assert [*map(duration, (0.0924, 1.594, 0.0001, 1594))] == ["92.4 ms", "1.59 s", "0.1 ms", "1594 s"]
