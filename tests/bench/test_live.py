"""Experiments in real time on local processes: emulated boards, and a cluster as it is; interrupted, resumed,
and found wrong."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from flowspec.bench import live
from flowspec.bench.cases import PlainCase
from flowspec.bench.experiment import CLUSTER, EMULATED, SYNTHETIC, Experiment, Setup
from flowspec.bench.live import places, run_live
from flowspec.bench.records import EXACT, RESULTS, WRONG, Record, agreement_of, read_records
from flowspec.bench.simulated import sampling_curve, stage_curves
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, InputError
from flowspec.model.files import ModelFiles
from flowspec.runtime.session import open_cluster
from flowspec.runtime.transport import TIMER_EARLY_S
from lab.plain_model import PlainModel
from tests.bench.benches import SMALL, Steps, boards, synthetic
from tests.bench.cases import made
from tests.checkpoints import make_variant

NEW_TOKENS = 4
ATTEMPTS = 4
# So that a busy machine still keeps up.
TESTBED = boards(name="two boards", drafter_shape=SMALL, slowdown=3.0)
BOARD, LINK = TESTBED.head, TESTBED.link
AR, CONTINUOUS = (
    Setup(name="ar", method="ar"),
    Setup(name="small", method="continuous", options={"segment_nodes": 4}, coupled=False),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_variant(tmp_path_factory.mktemp("model"), "llama-grouped")


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[PlainCase]:
    """One at each temperature; prompts that repeat themselves, so that n-grams guess something."""
    reference, found = PlainModel(ModelFiles(str(folder)), "float32"), []
    for number, temperature in enumerate((0.0, 1.0)):
        prompt, sampling = tuple(range(5 + number, 17)) * 3, Sampling(temperature=temperature, seed=number)
        answer = reference.generate(prompt, sampling, NEW_TOKENS, frozenset())
        case = made(f"case {number}", answer, prompt=prompt, sampling=sampling)
        found.append(replace(case, new_tokens_max=NEW_TOKENS, stop_ids=frozenset()))
    return found


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Experiment:
    return Experiment(
        name="a test",
        world=EMULATED,
        testbeds=(TESTBED,),
        setups=(AR, CONTINUOUS),
        model=str(folder),
        drafters=("ngram",),
        context=300,
    )


@pytest.fixture
def shared(tiny: Experiment, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No cluster for each run, and heads that learn little before it: both take seconds."""
    ((_, own, _),) = places(tiny)
    with open_cluster(own) as opened:
        monkeypatch.setattr(live, "WARM_UP_TOKENS", 4)
        monkeypatch.setattr(live, "open_cluster", lambda options, decoding: contextlib.nullcontext(opened))
        yield


def patient(test: Callable[..., None]) -> Callable[..., None]:
    """A machine that others keep too busy to emulate says so in a line; then the test begins again."""

    @functools.wraps(test)
    def again(tmp_path: Path, **given: Any) -> None:
        for attempt in range(ATTEMPTS):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            try:
                return test(tmp_path=folder, **given)
            except ClusterError as error:
                if "cannot keep up with what it emulates" not in str(error) or attempt == ATTEMPTS - 1:
                    raise

    return again


@pytest.mark.usefixtures("shared")
@patient
def test_emulated_boards_answer_exactly_in_their_time_and_only_what_is_missing(
    tiny: Experiment, cases: list[PlainCase], tmp_path: Path
) -> None:
    step = Steps()
    found, traces = run_live(tiny, cases, [], tmp_path, step)
    assert [(one.method, one.prompt_id) for one in found] == [
        (name, f"case {at}") for name in ("ar", "small") for at in (0, 1)
    ]
    assert read_records(tmp_path / RESULTS, Record) == found
    assert (step.told[0], step.answers) == (("two boards, ar: warming up", 0), 4)
    pass_s = sum(curve.seconds(1) for curve in stage_curves(TESTBED)) + sampling_curve(TESTBED).seconds(1)
    trip_s = pass_s + 3 * (LINK.delay_s - TIMER_EARLY_S)
    for record, case in zip(found, cases * 2, strict=True):
        assert (record.world, record.testbed, record.repeat) == ("emulated", "two boards", 0)
        assert (record.new_tokens, record.finish_reason, record.agreement) == (NEW_TOKENS, "length", EXACT)
        assert (record.temperature, record.seed) == (case.sampling.temperature, case.sampling.seed)
        assert record.tokens_per_s == (NEW_TOKENS - 1) / record.decode_s
        assert record.time_to_first_token_s >= trip_s
        assert record.trip_s > record.tau_s >= TESTBED.slowdown * 0.01
        rows = len(case.prompt) + NEW_TOKENS - 1
        assert record.network_bytes > rows * 2 * TESTBED.shape.hidden, "they go from stage to stage"
        whole_s = record.time_to_first_token_s + record.decode_s
        assert 3 * BOARD.idle_w * whole_s < record.energy_j < 3 * BOARD.busy_w * whole_s
        if record.method == "ar":
            assert record.decode_s >= (NEW_TOKENS - 1) * trip_s
            assert (record.S, record.rho, record.rows, record.dropped_rows) == (1, 0, 2 * rows, 0)
    digests = [one.digest for one in found]
    assert digests[:2] == digests[2:]
    assert len(set(digests)) == 2
    assert list(traces) == ["ar", "small"]
    for trace in traces.values():
        assert sum(tokens for _, tokens in trace.commits) == NEW_TOKENS
        assert len({trip.segment for trip in trace.trips}) == len(trace.trips)
    assert len(traces["ar"].trips) == len(traces["ar"].commits) == NEW_TOKENS
    assert not traces["ar"].passes
    assert traces["small"].passes

    right = cases[0].answer
    changed = [replace(cases[0], answer=(*right[:-1], right[-1] ^ 1)), cases[1]]
    twice, step = structs.replace(tiny, repeat=2), Steps()
    again, _ = run_live(twice, changed, [found[0], *found[2:]], tmp_path, step)
    assert sorted(one.key for one in again) == sorted(
        (*one.key[:-1], repeat) for one in found for repeat in (0, 1)
    )
    assert [text for text, _ in step.told if text.endswith("warming up")] == [
        f"two boards, {name}: warming up" for name in ("ar", "small", "ar")
    ], "methods take turns"
    assert read_records(tmp_path / RESULTS, Record)[4:] == again[3:]
    for one in again[3:]:
        assert one.agreement == (WRONG if one.prompt_id == "case 0" else EXACT)
    assert run_live(tiny, cases, again, tmp_path, Steps()) == (again, {})
    for tokens, reason in ((right[:-1], "length"), (right, "stop"), ((), "length")):
        assert agreement_of(cases[0], tokens, reason) == WRONG


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("is_lost", [False, True], ids=["interrupted", "a device lost"])
def test_a_cluster_as_it_is_keeps_what_is_done(
    tiny: Experiment, cases: list[PlainCase], tmp_path: Path, is_lost: bool
) -> None:
    tiny, before = structs.replace(tiny, world=CLUSTER, testbeds=(), local=2), children()

    def end(text: str, answers: int) -> None:
        if not answers:
            return
        if not is_lost:
            raise KeyboardInterrupt
        ours = [each for each in psutil.Process().children(recursive=True) if each.pid not in before]
        os.kill(max(each.pid for each in ours if not each.children()), signal.SIGKILL)  # a daemon

    with pytest.raises(ClusterError if is_lost else KeyboardInterrupt) as caught:
        run_live(tiny, cases, [], tmp_path, end)
    assert children() <= before, "no process is left"
    done = read_records(tmp_path / RESULTS, Record)
    assert len(done) == 1
    if is_lost:
        (line,) = str(caught.value).splitlines()
        assert "was lost" in line
        return
    found, traces = run_live(tiny, cases, done, tmp_path, Steps())
    assert read_records(tmp_path / RESULTS, Record) == found
    assert len(found) == 4
    assert {(one.world, one.testbed, one.agreement, one.energy_j) for one in found} == {
        ("cluster", "2 local processes", EXACT, 0.0)
    }
    assert list(traces) == ["ar", "small"]


def test_what_real_time_does_not_have_is_refused_in_one_line(tmp_path: Path) -> None:
    tiny = synthetic(model="a/model", drafters=("ngram",), world=EMULATED, setups=(AR,))
    published = Setup(name="as published", method="chunk-pp", published=True)
    for changed, text in (
        (structs.replace(tiny, setups=(AR, published)), "method 'as published'"),
        (structs.replace(tiny, model=SYNTHETIC), "expected a real model"),
        (structs.replace(tiny, drafters=("random",)), "--drafter:"),
        (structs.replace(tiny, world=CLUSTER, testbeds=(TESTBED, TESTBED)), "expected at most one testbed"),
    ):
        with pytest.raises(InputError, match=text) as caught:
            run_live(changed, [], [], tmp_path, Steps())
        assert "\n" not in str(caught.value)
