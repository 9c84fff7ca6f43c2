"""Real daemons that are disturbed in the middle of an answer: `python -m lab.checks.survive`.

Four stages answer one prompt, undisturbed and then once for each fault and moment; the tokens must be the
same every time.

- `kill`: `kill -9` of one stage's process; spare ones take part in the next run.
- `stop`: SIGSTOP, and SIGCONT when the answer is there: the process returns with its old state, and is
  fenced.
- `drafter`: `kill -9` of one of two drafters, which have daemons of their own; answers go on without it.
- `suspend`: SIGSTOP of the head itself for 20 seconds.

With each daemon in a network namespace (`launch/netns`; for root):

- `sever`: the link of one stage goes down and up again.
- `loss`: `kill -9` of one stage's daemon, which is started again after the answer.
- `return`: such a daemon is started again while answers go on without it: what taking it in costs.
- `slow`: all links carry 100 kbit/s in each direction. A note must name one, and nobody may be lost.
- `oneway`: what one stage sends to the next is lost; what the next sends to it arrives.
- `frames`: no frame of more than 1,000 bytes gets from one stage to the next, and nobody says so: a path MTU
  that is not what it seems. Small ones do, the other direction is whole, and all other links are.
- `mtu`: one stage sends no such frame to anybody.

In these three a note must name the link, and its far end must be lost, or the near end of `mtu`.

A run's pause is told by what it was spent on (`pauses.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from flowspec.bench.records import WRONG
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.runtime import timeouts
from flowspec.runtime.session import Limits, RecoveryOptions
from lab.checks.pauses import DRAFTER, LOST, PauseWatch, parts_of
from lab.checks.rigs import FAULTS, STAGES, Rig, agreement, rig_of
from lab.command import Parser, add_dtype, run_command, show

PROMPT = "Tell me a story about a lighthouse, and then explain how a lighthouse works."
SEED = 3
LASTS_S = 180.0
"""For how long answers are asked for until a fault has shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One disturbed answer, or several. `verdict` is that of `questions.agreement`, the worst of all answers.

    Seconds are those of `pauses.Parts`; `after_s` is from the fault to the first loss of a pipeline. `wrong`
    says what is wrong with how the fault ended, if anything is.
    """

    fault: str
    moment: int
    victim: str
    verdict: str
    answers: int
    recoveries: int
    noticed_s: float
    reached_s: float
    loaded_s: float
    ready_s: float
    token_s: float
    pause_s: float
    longest_s: float
    after_s: float
    notes: tuple[str, ...]
    wrong: str = ""


SECONDS = ("noticed", "reached", "loaded", "ready", "token", "pause", "longest")


def run_once(
    rig: Rig,
    fault: str,
    prompt: Sequence[int],
    sampling: Sampling,
    limits: Limits,
    moment: int,
    stage: int,
    judge: Callable[[list[int]], str],
) -> Run:
    """One answer with a fault after `moment` of its tokens; where the rig wants that, answers until the fault
    has shown."""
    notes: list[str] = []
    recovery_options = RecoveryOptions(on_note=notes.append, wait_s=timeouts.WAIT_FOR_DEVICES_S)
    victim = rig.target(stage).name
    verdicts: list[str] = []
    hit_s: float | None = None
    with (
        rig.cluster.session(
            rig.decoding, lambda text, share: None, recovery_options=recovery_options
        ) as session,
        PauseWatch(rig.logs) as watch,
    ):
        rig.prepare(session, stage)
        session.head.observe(watch.observe)

        def strike() -> float:
            begun_s = time.monotonic()
            rig.hit(session, stage)
            return time.monotonic() if fault == "suspend" else begun_s

        try:
            while not verdicts or (rig.until and not watch.is_over(rig.until, hit_s)):
                if hit_s is not None and time.monotonic() > hit_s + LASTS_S:
                    text = f"{fault} of {victim}: nothing came of it within {LASTS_S:.0f} s"
                    raise FlowSpecError(f"{text}; the notes: {'; '.join(notes) or 'none'}")
                found: list[int] = []
                answer = session.submit(prompt, sampling, limits, request=session.head.new_request())
                if hit_s is None and not moment:
                    hit_s = strike()
                for batch in answer:
                    watch.token(batch.at_s)
                    found += batch.tokens
                    if hit_s is None and len(found) >= moment:
                        hit_s = strike()
                assert hit_s is not None
                verdicts.append(judge(found))
                session.head.forget(answer.request)
        finally:
            rig.heal(session, stage)
    assert hit_s is not None, "an answer was asked for"
    parts = parts_of(watch.marks, hit_s)
    lost_s = watch.first(LOST, hit_s)
    gone_s = watch.first(DRAFTER, hit_s)
    seconds = {f"{name}_s": round(getattr(parts, f"{name}_s"), 3) for name in SECONDS}
    if not parts.pauses and gone_s is not None:
        seconds["noticed_s"] = round(gone_s - hit_s, 3)  # answers go on without a drafter: there is no pause
    return Run(
        fault=fault,
        moment=moment,
        victim=victim,
        verdict=WRONG if WRONG in verdicts else max(verdicts),
        answers=len(verdicts),
        recoveries=parts.pauses,
        after_s=round(lost_s - hit_s, 3) if lost_s is not None else 0.0,
        notes=tuple(notes),
        wrong=rig.check(stage, notes),
        **seconds,
    )


def survive(
    files: ModelFiles,
    dtype: str,
    faults: Sequence[str],
    moments: int,
    count: int,
    sampling: Sampling,
    tell: Callable[[Run], None],
) -> list[Run]:
    prompt = Tokenizer(files).encode_dialogue(
        [{"role": "user", "content": PROMPT}], system=None, is_raw=False
    )
    limits = Limits(new_tokens_max=count, stop_ids=frozenset())
    expected = StepByStep.load(files, dtype).generate(tuple(prompt), sampling, count, frozenset())

    def judge(found: list[int]) -> str:
        return agreement(expected, found, frozenset())

    runs = []
    for fault in faults:
        with rig_of(files, dtype, fault, moments) as rig:
            with rig.cluster.session(rig.decoding, lambda text, share: None) as session:
                undisturbed = session.ask(prompt, sampling, limits)[1].new_tokens
            if judge(undisturbed) == WRONG:
                raise FlowSpecError("the undisturbed answer is wrong; try flowspec verify")
            for index in range(moments):
                moment, stage = count * index // moments, index % STAGES
                runs.append(run_once(rig, fault, prompt, sampling, limits, moment, stage, judge))
                tell(runs[-1])
    return runs


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: of each fault how its answers were, and means and the most of those that lost
    anything."""
    rows: list[list[Any]] = []
    for fault in dict.fromkeys(run.fault for run in runs):
        every = [run for run in runs if run.fault == fault]
        own = [run for run in every if run.recoveries or run.noticed_s] or every
        right = sum(run.verdict != WRONG and not run.wrong for run in every)
        cells = [f"{mean(getattr(run, f'{name}_s') for run in own):.2f}" for name in SECONDS]
        most = [f"{max(getattr(run, f'{name}_s') for run in own):.2f}" for name in SECONDS[-2:]]
        rows.append([fault, f"{right} of {len(every)}", sum(run.recoveries for run in every), *cells, *most])
    return ["fault", "right", "losses", *SECONDS, *(f"most {name}" for name in SECONDS[-2:])], rows


def told(run: Run) -> str:
    parts = ", ".join(f"{name} {getattr(run, f'{name}_s'):.2f}" for name in SECONDS)
    wrong = f"; WRONG: {run.wrong}" if run.wrong else ""
    what = f"{run.fault} of {run.victim} after {run.moment} tokens"
    return f"{what}: {run.verdict}, {run.recoveries} losses; seconds: {parts}{wrong}"


def command(args: argparse.Namespace) -> int:
    faults = args.faults.split(",")
    if not set(faults) <= set(FAULTS):
        raise InputError(f"--faults: expected some of {', '.join(FAULTS)}, got {args.faults}")

    def tell(run: Run) -> None:
        print(json.dumps(asdict(run)) if args.json else told(run), flush=True)

    sampling = Sampling(temperature=args.temperature, seed=SEED)
    runs = survive(ModelFiles(args.model), args.dtype, faults, args.moments, args.tokens, sampling, tell)
    if not args.json:
        show("seconds by part, means of the runs that lost something", *table(runs))
    return 1 if any(run.verdict == WRONG or run.wrong for run in runs) else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.checks.survive", __doc__)
    faults = f"of {', '.join(FAULTS)}, with commas (default: %(default)s)"
    parser.add_argument("--faults", default="kill,stop", help=faults)
    parser.whole("--moments", 10, "moments of the answer, each a run")
    parser.whole("--tokens", 200, "length of the answer")
    parser.add_argument("--model", "-m", default=BUNDLED, help="model (default: the bundled one)")
    add_dtype(parser)
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="of the answer (default: %(default)s)"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
