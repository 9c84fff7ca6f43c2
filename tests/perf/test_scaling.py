"""Scaling in virtual time: exact answers for any number of devices and users, more users give more, and what
simulating that costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flowspec.bench.config import Setup
from flowspec.bench.drafter_for_each import DrafterForEach
from flowspec.bench.simulated import run_many
from flowspec.bench.synthetic import Synthetic, synthetic_cases
from flowspec.core.protocol.messages import Commit, Release, Sampling, Segment, SegmentPart
from flowspec.plan.timing import LinkSpec
from flowspec.sim.record import SimulatedAnswer
from tests.perf.scaling import columns, main, measure
from tests.perf.scaling_run import Point, Scaling, WrongAnswer, memory_of

LINK = LinkSpec(bandwidth_mbps=1000, delay_s=0.0005)
ASKED = Scaling(
    shape="llama-3-70b", device="jetson-agx-orin", precision="int4", link=LINK, acceptance=0.635, tokens=24
)
AR, OURS = Setup(name="ar", method="ar"), Setup(name="continuous", method="continuous")


@pytest.fixture(scope="module")
def points() -> dict[tuple[str, int, int], Point]:
    found = measure(ASKED, list(columns((2, 4), (1, 3), (4,), (OURS, AR))), lambda _: None)
    return {(point.method, point.devices, point.users): point for point in found}


def test_one_user_is_tried_everywhere_and_several_where_asked_for() -> None:
    found = [
        (devices, setup.name, users) for devices, setup, users in columns((1, 2), (1, 8), (2, 16), (OURS, AR))
    ]
    assert found == [
        (1, "continuous", (1,)),
        (1, "ar", (1,)),
        (2, "continuous", (1, 8)),
        (2, "ar", (1, 8)),
        (16, "continuous", (1, 8)),
        (16, "ar", (1, 8)),
    ]


def test_more_users_give_more_together_and_guessing_gives_one_user_more(
    points: dict[tuple[str, int, int], Point],
) -> None:
    for method in ("continuous", "ar"):
        one, three = points[method, 4, 1], points[method, 4, 3]
        assert three.tokens_per_s > 1.5 * one.tokens_per_s
        assert three.user_tokens_per_s < 1.2 * one.user_tokens_per_s
        assert (one.tokens, three.tokens) == (24, 3 * 24)
    assert points["ar", 4, 3].tokens_per_s == pytest.approx(3 * points["ar", 4, 1].tokens_per_s, rel=0.05), (
        "three share the slots of four stages"
    )
    for devices in (2, 4):
        assert points["continuous", devices, 1].tokens_per_s > 2 * points["ar", devices, 1].tokens_per_s


def test_one_user_gains_nothing_from_devices_without_guesses(
    points: dict[tuple[str, int, int], Point],
) -> None:
    two, four = points["ar", 2, 1], points["ar", 4, 1]
    assert four.tokens_per_s == pytest.approx(1 / four.trip_s, rel=0.01)
    assert two.tau_s == pytest.approx(2 * four.tau_s, rel=0.05)
    assert 0.95 * two.tokens_per_s < four.tokens_per_s < two.tokens_per_s, "only the links are more"
    assert (four.S, four.rho, four.drafter_busy) == (1, 0, 0)


def test_the_cost_of_the_simulation_is_counted(points: dict[tuple[str, int, int], Point]) -> None:
    for point in points.values():
        assert point.events_per_token == pytest.approx(point.events / point.tokens)
        assert point.event_us * point.events == pytest.approx(1e6 * point.wall_s)
    assert points["ar", 4, 1].events > 1.5 * points["ar", 2, 1].events


def test_several_users_of_many_devices_get_shorter_answers() -> None:
    asked = replace(ASKED, tokens=96)
    assert [asked.tokens_of(devices, 1) for devices in (2, 64)] == [96, 96]
    assert [asked.tokens_of(devices, 2) for devices in (2, 8, 16, 64)] == [96, 64, 32, 24]
    assert replace(ASKED, tokens=8).tokens_of(64, 2) == 8


def test_equal_runs_are_equal() -> None:
    first, second = (ASKED.run(ASKED.testbed(3), OURS, 2) for _ in range(2))
    first, second = [replace(each, event_us=0, event_cpu_us=0, wall_s=0) for each in (first, second)]
    assert first == second


def test_a_wrong_answer_is_an_error_that_names_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(*args: object) -> object:
        world = run_many(*args)  # type: ignore[arg-type]
        answer: SimulatedAnswer = world.answers[1][0]
        answer.tokens[3] += 1
        return world

    monkeypatch.setattr("tests.perf.scaling_run.run_many", lying)
    with pytest.raises(WrongAnswer, match=r"ar on 2 x jetson-agx-orin, user 2 of 2"):
        ASKED.run(ASKED.testbed(2), AR, 2)


def test_memory_falls_with_devices_and_grows_with_users_and_precision() -> None:
    def memory(asked: Scaling, devices: int, users: int) -> float:
        return memory_of(asked.testbed(devices), users).total_bytes / 1e9

    assert 35 < memory(ASKED, 1, 1) < 40, "70 billion weights of four bits, and a conversation"
    assert memory(ASKED, 8, 1) < memory(ASKED, 8, 32) < memory(ASKED, 1, 1)
    whole = replace(ASKED, precision="float16")
    assert memory(whole, 1, 1) > 3.5 * memory(ASKED, 1, 1)
    assert not whole.run(whole.testbed(2), AR, 1).fits
    assert whole.run(whole.testbed(4), AR, 1).fits


def test_each_request_is_drafted_for_by_its_own_drafter() -> None:
    cases = synthetic_cases(3, [Sampling()], 8)
    makers = [Synthetic(0.6, 128).begin(case) for case in cases]
    together = DrafterForEach([made for make in makers if (made := make()) is not None])
    alone = [made for make in makers if (made := make()) is not None]

    def part(request: int) -> SegmentPart:
        prompt = cases[request].prompt
        count = len(prompt)
        return SegmentPart(
            commit=Commit(request=request, epoch=0, base=count, path=()),
            opening=None,
            ids=tuple(range(count)),
            parents=tuple(range(-1, count - 1)),
            tokens=prompt,
            positions=tuple(range(count)),
            committed=(True,) * (count - 1) + (False,),
        )

    found = together.draft(Segment(segment=0, parts=(part(2), part(0))), 4)
    assert [proposal.request for proposal in found] == [2, 0]
    for proposal in found:
        assert (proposal,) == alone[proposal.request].draft(
            Segment(segment=0, parts=(part(proposal.request),)), 4
        )
    together.release(Release(request=2))
    assert together.context == 128


def test_the_command_says_in_which_world(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--devices", "1,2", "--users", "1,2", "--at", "2", "--tokens", "8", "--precision", "float16"]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "SIMULATED: llama-3-70b in float16" in shown
    assert "* more than the 64 GB of a device" in shown
    assert "wall-clock" in shown
    assert main([*flags, "--json", "--methods", "ar"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"] == "simulated"
    assert [(point["devices"], point["users"], point["fits"]) for point in found["points"]] == [
        (1, 1, False),
        (2, 1, False),
        (2, 2, False),
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--devices", "81"], "81 devices but only 80 layers"),
        (["--shape", "llama-4"], "shape: expected one of"),
        (["--acceptance", "1"], "--acceptance: expected a share"),
        (["--tokens", "1"], "--tokens: a rate needs"),
        (["--users", "257"], "--users: expected at most 256"),
        (["--methods", "greedy"], "--methods: expected names among"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) != 0
    assert told in capsys.readouterr().err
