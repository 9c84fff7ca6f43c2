"""What the machinery itself costs: the head's thinking with a large tree, and memory over a long answer.

`head`: only `HeadCore.handle` is timed, of `continuous` with a drafter that keeps at least 256 living nodes
on average in the tree, in a simulated pipeline whose layers and drafts take no real time. By kind of event,
and per segment: all that the head thought since the segment before. `memory`: a real local cluster of two
processes answers with 4,000 tokens; the resident sets of the head and of each daemon are read every 250, and
compared with what their caches of keys and values hold by then.

    python -m tests.perf.overhead [--part head|memory] [--tokens 4000] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowspec.bench.checkpoints import make_checkpoint
from flowspec.bench.console import progress, show
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Emit,
    HeadCommand,
    HeadEvent,
    SendToFirstStage,
    Submit,
)
from flowspec.core.head.head import HeadCore
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Sampling
from flowspec.plan.memory import mib
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, Session, open_session
from flowspec.runtime.token_stream import Timing, timed
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.experiment import Experiment
from flowspec.sim.language import HashLanguage
from flowspec.sim.world import Handled
from tests.command import Parser, run_command
from tests.perf.hop import quantile
from tests.perf.memory import status_bytes
from tests.plain import plain_answer

LIVING_MIN = 256
VALUE_MIN = 0.00005
"""So low that so many nodes are worth drafting."""
PROMPT = tuple(range(3, 23))
CONTEXT = 1024
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
SEGMENT = "each segment"
EVERY = 250
"""Tokens between two looks at the memory."""
KV_BLOCK = 256
"""Slots by which a cache grows; see `model.attention`."""
SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


class TimedHead(HeadCore):
    """Notes how long each event takes, and how many living nodes the trees have then."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.spent_s: dict[str, list[float]] = defaultdict(list)
        self.living: list[int] = []
        self._since_segment_s = 0.0

    def handle(self, event: HeadEvent, now_s: float) -> list[HeadCommand]:
        started_s = time.perf_counter()
        commands = super().handle(event, now_s)
        spent_s = time.perf_counter() - started_s
        self.spent_s[type(event).__name__].append(spent_s)
        self._since_segment_s += spent_s
        if any(isinstance(command, SendToFirstStage) for command in commands):
            self.spent_s[SEGMENT].append(self._since_segment_s)
            self._since_segment_s = 0.0
        self.living += [request.tree.alive_count for request in self.requests() if request.is_decoding]
        return commands


def measure_head(tokens: int) -> TimedHead:
    """A head that has given one answer of so many tokens, with its times."""
    language = HashLanguage(64, seed=5)
    stage = DeviceSpec(curve=Curve(base_s=1.0, row_s=1 / 64, extra_row_s=0.001))
    link = LinkSpec(delay_s=0.02)
    experiment = Experiment(
        devices=(stage,) * 4, control=link, data=link, context=CONTEXT, drafting=Curve(base_s=0.16)
    )
    drafter = FakeDrafter(language, 0.7, seed=1)
    method = Continuous(segment_nodes=64, batch=12, width=12, value_min=VALUE_MIN)
    world = experiment.build(language, (drafter,), checks=False)
    head = TimedHead(
        context=CONTEXT, stage_count=4, method=method, drafters=(DrafterTraits(context=drafter.context),)
    )
    world.head = head
    world.at(
        0.0,
        Submit(request=0, prompt=PROMPT, new_tokens_max=tokens, sampling=Sampling(), stop_ids=frozenset()),
    )
    with progress("the head", tokens) as step:

        def look(handled: Handled) -> None:
            for _ in (token for each in handled.commands if isinstance(each, Emit) for token in each.tokens):
                step("the head")

        world.on_event = look
        world.run()
    expected, _ = plain_answer(language, PROMPT, Sampling(), new_tokens_max=tokens, context=CONTEXT)
    assert world.answers[0][0].tokens == expected, "the timed head gave another answer"
    living = sum(head.living) / len(head.living)
    assert living >= LIVING_MIN, f"{living:.0f} living nodes on average, expected at least {LIVING_MIN}"
    return head


def report_head(head: TimedHead) -> dict[str, Any]:
    return {
        "world": "simulated",
        "living_nodes_mean": round(sum(head.living) / len(head.living), 1),
        "milliseconds": {
            kind: {
                "count": len(spent_s),
                **{name: round(1000 * quantile(spent_s, share), 3) for name, share in SHARES.items()},
            }
            for kind, spent_s in sorted(head.spent_s.items())
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """After so many tokens: resident sets of the head and of each daemon, and what the daemon's caches
    hold."""

    tokens: int
    head_bytes: int
    stage_bytes: tuple[int, ...]
    kv_bytes: tuple[int, ...]


def measure_memory(tokens: int, stages: int = 2, every: int = EVERY) -> list[Look]:
    """Looks at a real local cluster while it gives one answer of so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), "llama", SMALL)
        context = tokens + len(PROMPT) + 1
        options = ClusterOptions(model=str(model), dtype="float32", local=stages, context=context)
        with (
            progress("tokens", -(-tokens // every)) as step,
            open_session(
                options, Decoding(method="continuous", drafters=("ngram",)), lambda text, share: None
            ) as session,
        ):
            looks: list[Look] = []
            timing = Timing()
            limits = Limits(new_tokens_max=tokens, stop_ids=frozenset())
            answer = session.submit(PROMPT, Sampling(), limits, request=session.head.new_request())
            for _ in timed(answer, timing):
                if len(timing.new_tokens) >= every * (len(looks) + 1):
                    looks.append(_look(session, len(timing.new_tokens)))
                    step(f"{len(timing.new_tokens)} tokens")
            return looks


def _look(session: Session, tokens: int) -> Look:
    stages = session.stages_report()
    slots = -(-(len(PROMPT) + tokens) // KV_BLOCK) * KV_BLOCK
    width = SMALL["hidden_size"] * SMALL["num_key_value_heads"] // SMALL["num_attention_heads"]
    return Look(
        tokens=tokens,
        head_bytes=status_bytes(os.getpid(), "VmRSS"),
        stage_bytes=tuple(status_bytes(stage["pid"], "VmRSS") for stage in stages),
        kv_bytes=tuple(2 * 4 * width * slots * (stage["layers"][1] - stage["layers"][0]) for stage in stages),
    )


def report_memory(looks: Sequence[Look]) -> dict[str, Any]:
    """Growth from the first look to the last: of the head, and of each daemon beyond its keys and values."""
    first, last = looks[0], looks[-1]
    growth = [
        (last.stage_bytes[stage] - last.kv_bytes[stage]) - (first.stage_bytes[stage] - first.kv_bytes[stage])
        for stage in range(len(first.stage_bytes))
    ]
    return {
        "world": "cluster",
        "from_tokens": first.tokens,
        "to_tokens": last.tokens,
        "head_growth_mib": round((last.head_bytes - first.head_bytes) / 2**20, 2),
        "stage_growth_beyond_kv_mib": [round(size / 2**20, 2) for size in growth],
        "looks": [
            {
                "tokens": look.tokens,
                "head_bytes": look.head_bytes,
                "stage_bytes": look.stage_bytes,
                "kv_bytes": look.kv_bytes,
            }
            for look in looks
        ],
    }


def show_report(found: dict[str, Any]) -> None:
    if head := found.get("head"):
        rows = [[kind, *values.values()] for kind, values in head["milliseconds"].items()]
        title = (
            f"the head's own time in milliseconds (simulated), {head['living_nodes_mean']} living nodes on "
            "average"
        )
        show(title, ["event", "count", *SHARES], rows)
    if memory := found.get("memory"):
        rows = [
            [
                look["tokens"],
                mib(look["head_bytes"]),
                *(f"{mib(a)} / {mib(b)}" for a, b in zip(look["stage_bytes"], look["kv_bytes"], strict=True)),
            ]
            for look in memory["looks"]
        ]
        stages = [f"stage {index} / its KV" for index in range(len(memory["stage_growth_beyond_kv_mib"]))]
        show("resident sets (cluster)", ["tokens", "head", *stages], rows)
        print(
            f"\nfrom {memory['from_tokens']} to {memory['to_tokens']} tokens the head grew by "
            f"{memory['head_growth_mib']} MiB, the stages "
            f"beyond their keys and values by {', '.join(map(str, memory['stage_growth_beyond_kv_mib']))} MiB"
        )


def command(args: argparse.Namespace) -> int:
    found: dict[str, Any] = {}
    if args.part in ("head", "both"):
        found["head"] = report_head(measure_head(args.head_tokens))
    if args.part in ("memory", "both"):
        found["memory"] = report_memory(measure_memory(args.tokens))
    if args.json:
        print(json.dumps(found))
    else:
        show_report(found)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.overhead", __doc__)
    parser.add_argument(
        "--part",
        choices=("head", "memory", "both"),
        default="both",
        help="what to measure (default: %(default)s)",
    )
    parser.whole("--tokens", 4000, "tokens of the long answer")
    parser.whole("--head-tokens", 400, "tokens of the answer with a large tree")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
