"""What is kept of a run: a line of JSON for each answer or load, the same from every world, in a folder that
knows whose it is."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import to_builtins

from flowspec.bench.cases import PlainCase
from flowspec.bench.experiment import Experiment, Setup, Testbed
from flowspec.core.head.events import Drafted, Emit, HeadCommand, HeadEvent, SegmentTimed
from flowspec.errors import InputError
from flowspec.folders import why_unread
from flowspec.plan.tables import among
from flowspec.validation import Document, Misfit, fit
from flowspec.watch.trips import Trip, trip_of

EXACT, WRONG = "exact", "wrong"
"""How an answer agrees with plain decoding's: all tokens are equal, or not."""
RESULTS = "results.jsonl"
EXPERIMENT = "experiment.json"
COMMAND = "command"
"""In it: the command that made it."""

Agreement = Annotated[str, among((EXACT, WRONG))]
Key = tuple[str, str, str, float, int, int]


def agreement_of(case: PlainCase, tokens: Sequence[int], reason: str) -> str:
    return EXACT if case.is_answered_by(tuple(tokens), reason) else WRONG


# ------------------------------------------------------------------------------------------ records


class Record(Document, frozen=True, kw_only=True):
    """Figures of one answer; times in seconds of its world. `tau_s` and `trip_s` are what a slot and a trip
    cost in it.

    `chains` are the chains of models that were chosen, each as (tokens known, seconds, models, reason), none
    where nothing is chosen. `energy_j` counts all boards of the testbed. `arithmetic` is what was computed
    with (`core.cluster.agreement`), empty where nothing was.
    """

    experiment: str
    world: str
    testbed: str
    method: str
    prompt_id: str
    domain: str
    temperature: float
    seed: int
    repeat: int
    new_tokens: int
    finish_reason: str
    agreement: Agreement
    decode_s: float
    time_to_first_token_s: float
    tokens_per_s: float
    S: float
    rho: float
    acceptance: float
    stage_busy: list[float]
    dropped_rows: int
    rows: int
    network_bytes: int
    energy_j: float
    tau_s: float
    trip_s: float
    chains: list[Any]
    events: int
    digest: str
    arithmetic: str

    @property
    def key(self) -> Key:
        """What tells one answer of an experiment from all others."""
        return (self.testbed, self.method, self.prompt_id, self.temperature, self.seed, self.repeat)

    @property
    def whole_s(self) -> float:
        """From the question to the last token."""
        return self.time_to_first_token_s + self.decode_s


class LoadAnswer(Document, frozen=True, kw_only=True):
    """One answer of a load, in instants of its world's clock."""

    user: int
    prompt_id: str
    domain: str
    asked_s: float
    first_s: float
    last_s: float
    new_tokens: int
    agreement: Agreement

    @property
    def whole_s(self) -> float:
        """From the question to the last token."""
        return self.last_s - self.asked_s


class LoadRecord(Document, frozen=True, kw_only=True):
    """Figures of one load, or of one `step` of a schedule (from 1 on; 0: there is none), which lasted
    `seconds`: the `tokens` that came in that time, the `answers` that were asked for in it, and what the
    devices did meanwhile.

    `drafters` is how many models other than the target there are; `stage_busy` and `board_busy` are shares of
    the time of each stage, and of the head followed by the testbed's boards for drafters.
    """

    experiment: str
    world: str
    testbed: str
    method: str
    users: int
    step: int
    label: str
    temperature: float
    seed: int
    drafters: int
    seconds: float
    tokens: int
    answers: list[LoadAnswer]
    stage_busy: list[float]
    board_busy: list[float]
    network_bytes: int
    energy_j: float
    events: int
    digest: str

    @property
    def key(self) -> Key:
        """What tells one load of an experiment from all others."""
        return (self.testbed, self.method, f"step {self.step}", self.temperature, self.seed, self.users)


AnyRecord = Record | LoadRecord
R = TypeVar("R", Record, LoadRecord)


# ------------------------------------------------------------------------------------------ of an answer


@dataclass(slots=True)
class Trace:
    """What happened when in one answer; `watch` is given every event of the head with the commands it led
    to."""

    trips: list[Trip] = field(default_factory=list)
    passes: list[Drafted] = field(default_factory=list)
    commits: list[tuple[float, int]] = field(default_factory=list)

    def watch(self, event: HeadEvent, commands: Sequence[HeadCommand], now_s: float) -> None:
        if isinstance(event, Drafted):
            self.passes.append(event)
        for command in commands:
            if isinstance(command, SegmentTimed):
                self.trips.append(trip_of(command, now_s))
            elif isinstance(command, Emit):
                self.commits.append((now_s, len(command.tokens)))


class Slots(NamedTuple):
    """What a slot of the slowest stage cost in an answer, and a trip through empty stages."""

    tau_s: float
    trip_s: float


def slots_of(trips: Sequence[Trip]) -> Slots | None:
    """Means over the segments that were alive all the way; None without any."""
    full = [trip for trip in trips if trip.hops and all(hop.rows for hop in trip.hops)]
    if not full:
        return None
    by_stage = zip(*(trip.hops for trip in full), strict=True)
    stages = [sum(hop.compute_s + hop.own_s for hop in hops) / len(full) for hops in by_stage]
    return Slots(max(stages), sum(stages) + sum(trip.link_s for trip in full) / len(full))


def record_of(
    experiment: Experiment,
    testbed: str,
    setup: Setup,
    case: PlainCase,
    trace: Trace,
    report: Mapping[str, Any],
    *,
    tokens: Sequence[int],
    reason: str,
    asked_s: float,
    first_s: float,
    last_s: float,
    **more: Any,
) -> Record:
    """What is kept of an answer, whose `tokens` have no stop token and whose `report` is that of
    `core.head.statistics`; what slots cost in it is counted from its first token on. `more` are fields of the
    record that only its world knows."""
    trips = [trip for trip in trace.trips if first_s <= trip.sent_s <= last_s]
    tau_s, trip_s = slots_of(trips) or (0.0, 0.0)
    return Record(
        experiment=experiment.name,
        world=experiment.world,
        testbed=testbed,
        method=setup.name,
        prompt_id=case.prompt_id,
        domain=case.domain,
        temperature=case.sampling.temperature,
        seed=case.sampling.seed,
        new_tokens=len(tokens),
        finish_reason=reason,
        agreement=agreement_of(case, tokens, reason),
        decode_s=last_s - first_s,
        time_to_first_token_s=first_s - asked_s,
        tokens_per_s=(len(tokens) - 1) / (last_s - first_s) if last_s > first_s else 0.0,
        S=report["tokens_per_commit"],
        rho=report["share_in_flight"],
        acceptance=report["acceptance_length"],
        stage_busy=report["stage_busy"],
        dropped_rows=report["rows_dropped"],
        rows=report["rows_computed"],
        tau_s=tau_s,
        trip_s=trip_s,
        chains=list(report.get("chains", ())),
        **more,
    )


def energy_of(
    testbed: Testbed,
    whole_s: float,
    stages_busy_s: Sequence[float],
    drafters_busy_s: Mapping[int | None, float],
) -> float:
    """What all boards take in `whole_s`, of which they compute for so long: stages, the head (None), and
    drafters' boards by number."""
    stages = zip(testbed.devices, stages_busy_s, strict=True)
    places = {None: testbed.head} | {number: board.device for number, board in enumerate(testbed.boards)}
    drafters = [(device, drafters_busy_s.get(place, 0.0)) for place, device in places.items() if device]
    return sum(
        sum(device.energy_j(whole_s, busy_s) for device, busy_s in boards) for boards in (stages, drafters)
    )


# ------------------------------------------------------------------------------------------ the folder


def write_records(path: Path, records: Sequence[Any]) -> None:
    """Appends records, a line each; half a line that an interruption left is removed first.
    Several processes may do so at once. Raises `InputError` if it cannot be."""
    lines = "".join(json.dumps(to_builtins(record)) + "\n" for record in records)
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed, or its process has ended
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            if end and file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
            file.write(lines.encode())
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be written ({error.strerror})") from None


def read_records(path: Path, kind: type[R]) -> list[R]:
    """All whole records of a file (none if it is not there); raises `InputError` for another kind of file."""
    if not path.exists():
        return []
    try:
        lines = path.read_text("utf-8").splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return fit(records, list[kind])  # type: ignore[valid-type]
    except Misfit as misfit:
        what, reason = "results of this version of FlowSpec", str(misfit)
    except (OSError, ValueError, RecursionError) as error:
        what, reason = "results of an earlier run, but they cannot be read", why_unread(error)
    raise InputError(f"{path}: expected {what} ({reason}); remove it, or give another --out")


def open_folder(experiment: Experiment, out: Path, command: str = "") -> None:
    """Makes the folder, or finds that what it holds is of this experiment, which may come back with more
    methods than it had; raises `InputError` if it is of another. `command` is kept with a new one, for
    those who want to go on with it."""
    new, known = json.loads(json.dumps(to_builtins(experiment, enc_hook=str))), None
    path = out / EXPERIMENT
    try:
        out.mkdir(parents=True, exist_ok=True)
        if (out / RESULTS).exists():
            known = _read_experiment(path)
            before = known.pop(COMMAND, "")
            if difference := next(_experiment_differences(known, new), None):
                how = f"go on with those by: {before}" if before else "give the same flags as then"
                raise InputError(
                    f"--out: {out} holds results of another experiment ({difference}); {how}; or begin anew: "
                    "give another --out, or remove the folder"
                )
        if known != new:
            path.write_text(json.dumps({COMMAND: command, **new}, indent=1), "utf-8")
    except OSError as error:
        got = f"{out} ({error.strerror})"
        raise InputError(f"--out: expected a folder that can be written, got {got}") from None


@contextlib.contextmanager
def hold_folder(out: Path) -> Iterator[None]:
    """Keeps a folder that is open for one run; raises `InputError` while another has it."""
    with (out / EXPERIMENT).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"--out: another run is in {out}; wait for it, or give another --out") from None
        yield


def _read_experiment(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text("utf-8"))
        if isinstance(known, dict) and isinstance(known.get("setups"), list):
            return known
    except (OSError, ValueError, RecursionError):
        pass
    raise InputError(
        f"{path}: expected what an earlier run wrote, got something else; remove the folder, or give another "
        "--out"
    )


def _experiment_differences(known: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What of a known experiment is not so in the new one; more methods are none."""
    for key in ("name", "world", "model"):  # another one of these explains all other differences
        yield from _differences(known.get(key), new.get(key), key)
    old_setups, new_setups = (
        {f"{setup['name']} {setup['testbeds'] or ''}": setup for setup in each["setups"]}
        for each in (known, new)
    )
    if not old_setups.keys() <= new_setups.keys():
        names = [dict.fromkeys(each["name"] for each in some.values()) for some in (old_setups, new_setups)]
        yield "methods: expected " + ", got ".join(map(", ".join, names))
    common = {name: setup for name, setup in new_setups.items() if name in old_setups}
    yield from _differences(known | {"setups": old_setups}, new | {"setups": common})


def _differences(known: Any, new: Any, where: str = "") -> Iterator[str]:
    if isinstance(known, dict) and isinstance(new, dict):
        for key in dict.fromkeys((*known, *new)):
            yield from _differences(known.get(key), new.get(key), f"{where} {key}".strip())
    elif isinstance(known, list) and isinstance(new, list) and len(known) == len(new):
        for number, pair in enumerate(zip(known, new, strict=True), 1):
            yield from _differences(*pair, f"{where} {number}")
    elif known != new:
        yield f"{where}: expected {_format(known)}, got {_format(new)}"


def _format(value: Any) -> str:
    """A value, whole; of what has names, and many figures, its names."""
    if value is None:
        return "nothing"
    named = value if isinstance(value, list) else [value]
    if named and all(isinstance(each, dict) and "name" in each for each in named):
        return ", ".join(each["name"] for each in named)
    return json.dumps(value)
