"""What watching costs: tokens per second of the same answers with somebody watching and without, on a local
cluster.

One session of `continuous`; each pair answers one prompt twice, in turns with the watched one first. The
watcher is what a page is to the head's process: it joins, takes every batch of frames as text ten times a
second, and a recording is kept. (The page itself runs elsewhere.) Ratios are `watched / unwatched` of each
pair; what is reported is their geometric mean, and a 95% interval of it by Student's t. Answers beforehand
teach the head what it learns.

    python -m tests.perf.watching [--pairs 30] [--local 4] [--tokens 128] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import threading
from collections.abc import Sequence
from typing import Any

from flowspec.bench.console import progress, show
from flowspec.bench.plain import DTYPE
from flowspec.cli.options import positive
from flowspec.core.methods import METHODS
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import FlowSpecError, InputError
from flowspec.model.files import BUNDLED
from flowspec.model.prompts import Prompt, read_prompts
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, OpenCluster, Session, open_cluster
from flowspec.runtime.token_stream import Timing
from flowspec.runtime.watching import EVERY_S, Watch, watch_session
from tests.command import Parser, run_command
from tests.perf.beside import WORLD, add_prompt_arguments, first_of_each

AIM = 0.98
WARM_UPS = 2
"""Answers to each prompt before anything counts: the head learns from them how far to trust the drafter."""


class Page:
    """Takes all frames as text, in a thread of its own, as a server does that sends them to a page."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._watcher = watch.join()
        self._stop = threading.Event()
        self.chars = 0
        self.frames = 0
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """When all of an answer that is over has been taken."""
        self._watch.settle()
        self._stop.set()
        self._thread.join()
        self._watch.leave(self._watcher)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._take()
        self._take()

    def _take(self) -> None:
        for batch in self._watcher.take():
            self.frames += len(batch.frames)
            self.chars += len(batch.text)


def measure(
    cluster: OpenCluster, method: str, prompts: Sequence[Prompt], tokens: int, pairs: int
) -> list[dict[str, Any]]:
    """Rates of each pair; raises `FlowSpecError` where answers differ."""
    tokenizer = Tokenizer(cluster.files)
    limits = Limits(new_tokens_max=tokens, stop_ids=recommended(cluster.files, cluster.config).stop_ids)
    encoded = [
        tokenizer.encode_dialogue([{"role": "user", "content": prompt.turns[0]}]) for prompt in prompts
    ]
    found = []
    warm_ups = WARM_UPS * len(prompts)
    with (
        cluster.session(Decoding(method=method), lambda text, share: None) as session,
        progress("answers", warm_ups + 2 * pairs) as step,
    ):
        watch = watch_session(session, tokenizer.decode, keeps=True)
        for number in range(warm_ups):
            _answer(session, encoded[number % len(encoded)], limits)
            step("warming up")
        for number in range(pairs):
            rates: dict[bool, Timing] = {}
            about = {"frames": 0, "chars": 0}
            for is_watched in (True, False) if number // len(prompts) % 2 else (False, True):
                page = Page(watch) if is_watched else None
                try:
                    rates[is_watched] = _answer(session, encoded[number % len(prompts)], limits)
                finally:
                    if page is not None:
                        page.close()
                        about = {"frames": page.frames, "chars": page.chars}
                step(f"pair {number + 1}")
            prompt = prompts[number % len(prompts)]
            if rates[True].new_tokens != rates[False].new_tokens:
                raise FlowSpecError(
                    f"prompt {prompt.prompt_id} ({prompt.domain}) is answered otherwise while somebody "
                    "watches"
                )
            found.append(
                {
                    "prompt": prompt.prompt_id,
                    "tokens": len(rates[True].new_tokens),
                    "watched": rates[True].tokens_per_s,
                    "unwatched": rates[False].tokens_per_s,
                    **about,
                }
            )
        watch.close()
    return found


def _answer(session: Session, ids: Sequence[int], limits: Limits) -> Timing:
    return session.ask(ids, Sampling(), limits)[1]


def report(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of rates and its interval; answers too short to time are left out."""
    timed = [each for each in found if each["watched"] > 0 and each["unwatched"] > 0]
    if len(timed) < 2:
        raise InputError(
            "fewer than two pairs have tokens enough to time; give more --pairs or --tokens, or other "
            "--prompts"
        )
    logs = [math.log(each["watched"] / each["unwatched"]) for each in timed]
    mean, half = (
        statistics.fmean(logs),
        student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)),
    )
    tokens = sum(each["tokens"] for each in timed)
    return {
        "world": WORLD,
        "pairs": len(timed),
        "tokens_per_s": {
            name: statistics.fmean(each[name] for each in timed) for name in ("watched", "unwatched")
        },
        "ratio": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "aim": AIM,
        "frames_per_token": sum(each["frames"] for each in timed) / tokens,
        "bytes_per_token": sum(each["chars"] for each in timed) / tokens,
        "each": timed,
    }


def student(freedom: int) -> float:
    """The 97.5% point of Student's t, by Cornish and Fisher's expansion: within 1% from 3 degrees of freedom
    on, above that below."""
    if freedom < len(_FEW):
        return _FEW[freedom]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


_FEW = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571)


def command(args: argparse.Namespace) -> int:
    prompts = first_of_each(read_prompts(args.prompts), args.prompts_per_domain)
    with open_cluster(ClusterOptions(model=args.model, dtype=DTYPE, local=args.local)) as cluster:
        found = measure(cluster, args.method, prompts, args.tokens, args.pairs)
    result = {**report(found), "stages": args.local, "method": args.method}
    if args.json:
        print(json.dumps(result))
        return 0
    rates = result["tokens_per_s"]
    rows = [
        ["tokens/s", rates["watched"], rates["unwatched"], result["ratio"], result["low"], result["high"]]
    ]
    title = f"{WORLD}, {args.local} stages, {args.method}: {result['pairs']} pairs of answers"
    show(title, ["", "watched", "unwatched", "ratio", "low", "high"], rows)
    print(
        f"\nwatching leaves {result['ratio']:.3f} of the speed (95%: {result['low']:.3f} to "
        f"{result['high']:.3f}; aim {AIM}); "
        f"{result['frames_per_token']:.1f} frames and {result['bytes_per_token']:.0f} bytes for each token"
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.watching", __doc__)
    parser.add_argument(
        "--model", default=BUNDLED, metavar="PATH-OR-HUB-ID", help="default: the bundled demo model"
    )
    parser.add_argument("--method", default="continuous", choices=METHODS, help="default: %(default)s")
    parser.add_argument("--pairs", type=positive, default=30, metavar="N", help="default: %(default)s")
    add_prompt_arguments(parser, local=4)
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
