"""Events wait until what the one before led to is done; and a turn takes results, some messages, and the time
last."""

from __future__ import annotations

from collections import deque

import pytest

from flowspec.core.driving import Driver, turn


class Echo:
    """A core whose event says what its commands are, and a place where commands may bring about events."""

    def __init__(self, led_to: dict[str, list[str]], brings: dict[str, str]) -> None:
        self.done: list[str] = []
        self.led_to = led_to
        self.brings = brings
        self.driver: Driver[str, str] = Driver(lambda event: self.led_to.get(event, []), self.do)

    def do(self, command: str) -> None:
        self.done.append(command)
        if command == "fail":
            raise ValueError(command)
        if command in self.brings:
            self.driver.give(self.brings[command])


def test_what_commands_bring_about_waits_for_all_and_what_fails_loses_no_event() -> None:
    led_to = {"plan": ["dial a", "dial b"], "refused": ["hang up", "plan again"], "planned": ["open"]}
    echo = Echo(led_to, {"dial a": "refused", "plan again": "planned"})
    echo.driver.give("plan")
    assert echo.done == ["dial a", "dial b", "hang up", "plan again", "open"]
    echo = Echo(
        {"one": ["unsent", "fail", "never"], "lost": ["hang up"], "two": ["go on"]}, {"unsent": "lost"}
    )
    with pytest.raises(ValueError, match="fail"):
        echo.driver.give("one")
    assert echo.done == ["unsent", "fail"]
    echo.driver.give("two")
    assert echo.done == ["unsent", "fail", "hang up", "go on"]


@pytest.mark.parametrize(
    ("messages", "taken", "is_read"), [(0, 0, True), (2, 2, True), (3, 3, False), (5, 3, False)]
)
def test_a_turn_takes_all_results_and_so_many_messages_and_says_whether_these_were_all(
    messages: int, taken: int, is_read: bool
) -> None:
    done: list[str] = []
    results, inbox = deque(["result"] * 4), deque(["message"] * messages)

    def take(queue: deque[str]) -> bool:
        if not queue:
            return False
        done.append(queue.popleft())
        return True

    assert (
        turn(lambda: take(results), lambda: take(inbox), lambda read: done.append(f"time {read}"), 3)
        is is_read
    )
    assert done == ["result"] * 4 + ["message"] * taken + [f"time {is_read}"]
