"""Two processes beside llama.cpp and its RPC server: the same target and the same drafter, one thread each,
in turns: `python -m tests.perf.llama_cpp_rpc --binaries FOLDER --target T.gguf --drafter D.gguf`.

FOLDER has llama.cpp's own programs `llama-completion` (plain decoding), `llama-speculative-simple` (with the
drafter) and `ggml-rpc-server`. They come of its source:

    cmake -B build -DGGML_RPC=ON -DLLAMA_CURL=OFF
    cmake --build build --target llama-completion llama-speculative-simple ggml-rpc-server

Half of the layers are in its client, half in the server. Ours are two local daemons, half of the layers each,
with `ar` and with `continuous` and the drafter at the head. Both get the same prompts and decode greedily;
llama.cpp drafts as many tokens as is best for it, in each domain and prompt by prompt. Speeds are without the
prompt, as each program states its own. *Acceptance* is how many of the answers' tokens are the drafter's
first guess.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flowspec import LLM
from flowspec.bench.console import progress, show
from flowspec.cli.options import positives
from flowspec.core.protocol.messages import Sampling
from flowspec.errors import ClusterError, InputError, UnexpectedError
from flowspec.model.files import ModelFiles, bundled_folder
from flowspec.model.prompts import Prompt, read_prompts
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from tests.command import Parser, run_command
from tests.recipe.hits import ranks

PLAIN, SPECULATIVE, SERVER = "llama-completion", "llama-speculative-simple", "ggml-rpc-server"
CONTEXT = 1024
RUN_S = 300.0
"""How long one answer of llama.cpp's may take, the model's loading included."""
START_S = 20.0
PLAIN_TOLD = re.compile(
    r"prompt eval time =.*?/ +(\d+) tokens.*?\n.*? eval time = +([\d.]+) ms / +(\d+) runs", re.DOTALL
)
SPECULATIVE_TOLD = re.compile(
    r"encoded +(\d+) tokens.*?decoded +(\d+) tokens in +([\d.]+) seconds"
    r".*?n_drafted = (\d+).*?n_accept += (\d+)",
    re.DOTALL,
)


@dataclass(slots=True)
class Measured:
    """Of one prompt: tokens per second of each round, by who decoded it."""

    domain: str
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    accepted: dict[int, float] = field(default_factory=dict)
    """Of what llama.cpp drafted, by how many tokens it drafts."""
    tokens: int = 0
    hits: int = 0
    """Of the tokens, those that are the drafter's first guess."""

    def speed(self, name: str) -> float:
        return statistics.median(self.speeds[name])


def drafts_of(count: int) -> str:
    """The name of llama.cpp's speed where it drafts so many tokens."""
    return f"llama.cpp, {count} drafted"


class LlamaCpp:
    """llama.cpp's programs, a client whose second half of the layers is in a server that runs already."""

    def __init__(self, binaries: Path, target: Path, drafter: Path, layers: int, port: int) -> None:
        self._binaries, self._drafter = binaries, drafter
        behind = layers - layers // 2 + 1  # what follows the layers counts as one
        self._shared = [
            *("-m", str(target), "--rpc", f"127.0.0.1:{port}", "--device", "RPC0"),
            *("--gpu-layers", str(behind), "--fit", "off"),
            *("--threads", "1", "--ctx-size", str(CONTEXT), "--temp", "0"),
            "--no-escape",
        ]

    def plain(self, text: str, prompt_tokens: int, tokens: int) -> float:
        """Tokens per second."""
        told = self._run(PLAIN, text, tokens, PLAIN_TOLD, "-no-cnv")
        self._check(told[0], prompt_tokens)
        return 1000 * int(told[2]) / float(told[1])

    def speculative(self, text: str, prompt_tokens: int, tokens: int, drafts: int) -> tuple[float, float]:
        """Tokens per second, and how many of the drafted ones were accepted."""
        flags = (
            *("--spec-type", "draft-simple", "--model-draft", str(self._drafter)),
            *("--device-draft", "none", "--spec-draft-n-max", str(drafts)),
        )
        told = self._run(SPECULATIVE, text, tokens, SPECULATIVE_TOLD, *flags)
        self._check(told[0], prompt_tokens)
        return int(told[1]) / float(told[2]), int(told[4]) / max(1, int(told[3]))

    def _run(self, program: str, text: str, tokens: int, told: re.Pattern[str], *flags: str) -> Sequence[str]:
        asked = "--prompt", text, "--predict", str(tokens)  # of a file's text it drops the last newline
        words = [str(self._binaries / program), *self._shared, *asked, *flags]
        try:
            done = subprocess.run(
                words, capture_output=True, stdin=subprocess.DEVNULL, timeout=RUN_S, check=False, text=True
            )
        except subprocess.TimeoutExpired:
            raise ClusterError(f"{program} was not done after {RUN_S:.0f} s; try a quieter machine") from None
        found = told.search(done.stderr)
        if done.returncode or found is None:
            last = (done.stderr.strip().splitlines() or [""])[-1]
            raise InputError(f"{program} ended with status {done.returncode} and told no speed: {last:.300}")
        return found.groups()

    def _check(self, told: str, prompt_tokens: int) -> None:
        if int(told) != prompt_tokens:
            raise InputError(
                f"expected a prompt to have {prompt_tokens} tokens in llama.cpp, too, got {told}: it reads "
                "the GGUF file's tokenizer in another way"
            )


@contextlib.contextmanager
def rpc_server(binaries: Path) -> Iterator[int]:
    """Runs llama.cpp's server with one thread; yields its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    words = [str(binaries / SERVER), "--threads", "1", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            began_s = time.monotonic()
            while server.poll() is None and time.monotonic() - began_s < START_S:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            else:
                raise ClusterError(f"{SERVER} does not listen; run {' '.join(words)} to see why")
            yield port
        finally:
            server.terminate()


def asked(path: str, limit: int) -> list[Prompt]:
    """The first `limit` prompts of each domain."""
    found: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in read_prompts(Path(path)):
        found[prompt.domain].append(prompt)
    return [prompt for domain in found.values() for prompt in domain[:limit]]


def measure(args: argparse.Namespace) -> dict[str, Measured]:
    files = ModelFiles(str(args.target))
    tokenizer, layers = Tokenizer(files), files.config().num_hidden_layers
    drafter = Reference(ModelFiles(str(args.drafter)), "float32")
    prompts = [prompt for path in args.prompts for prompt in asked(path, args.limit)]
    runs = args.rounds * len(prompts) * (3 + len(args.drafts))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(rpc_server(args.binaries))
        theirs = LlamaCpp(args.binaries, args.target, args.drafter, layers, port)
        ours = {
            method: stack.enter_context(
                LLM(
                    args.target,
                    local=2,
                    layers=(layers // 2, layers - layers // 2),
                    context=CONTEXT,
                    method=method,
                    drafter=with_drafter,
                )
            )
            for method, with_drafter in (("ar", "none"), ("continuous", str(args.drafter)))
        }
        found: dict[str, Measured] = {}
        step = stack.enter_context(progress("answers", runs))
        for _ in range(args.rounds):
            for prompt in prompts:
                ids = tokenizer.encode_chat([{"role": "user", "content": prompt.turns[0]}])
                text = b"".join(map(tokenizer.token_bytes, ids)).decode()
                name = f"{prompt.domain} {prompt.prompt_id}"
                if len(ids) + args.tokens > CONTEXT - max(args.drafts):
                    raise InputError(f"prompt {name} is longer than the context of {CONTEXT} tokens allows")
                of = found.setdefault(name, Measured(prompt.domain))
                answers = []
                for method, llm in ours.items():
                    answer = llm.generate(ids, temperature=0, max_new_tokens=args.tokens)
                    of.speeds[method].append(answer.timing.tokens_per_s)
                    answers.append(list(answer.token_ids))
                    step(f"{name}, {method}")
                if len(answers[0]) < 2:
                    raise InputError(f"prompt {name} has too short an answer to time")
                if answers[0] != answers[1]:
                    raise UnexpectedError(f"{name}: expected continuous to give the tokens of ar")
                places = ranks(drafter, tuple(ids), answers[0], Sampling(), coupled=False)
                of.tokens, of.hits = len(places), places.count(0)
                of.speeds["llama.cpp"].append(theirs.plain(text, len(ids), args.tokens))
                step(f"{name}, llama.cpp")
                for count in args.drafts:
                    speed, of.accepted[count] = theirs.speculative(text, len(ids), args.tokens, count)
                    of.speeds[drafts_of(count)].append(speed)
                    step(f"{name}, {drafts_of(count)}")
    return found


def table(found: Sequence[Measured], drafts: Sequence[int]) -> list[list[object]]:
    """A row for each domain, and one for all: medians over the prompts of their medians over the rounds, of
    ratios too."""
    rows: list[list[object]] = []
    for domain in [*dict.fromkeys(each.domain for each in found), "all"]:
        some = [each for each in found if domain in (each.domain, "all")]

        def median(name: str, by: str = "", some: list[Measured] = some) -> float:
            return statistics.median(each.speed(name) / (each.speed(by) if by else 1) for each in some)

        best = max(drafts, key=lambda count: median(drafts_of(count)))
        by_prompt = statistics.median(
            each.speed("continuous") / max(each.speed(drafts_of(count)) for count in drafts) for each in some
        )
        rows.append(
            [
                domain,
                sum(each.hits for each in some) / sum(each.tokens for each in some),
                *(median("ar"), median("llama.cpp"), median("ar", "llama.cpp")),
                *(median("continuous"), median(drafts_of(best)), best),
                statistics.mean(each.accepted[best] for each in some),
                median("continuous", drafts_of(best)),
                by_prompt,
            ]
        )
    return rows


COLUMNS = (
    *("domain", "acceptance", "ar", "llama.cpp", "ar / llama.cpp"),
    *("continuous", "llama.cpp with drafter", "drafted", "of these accepted"),
    *("continuous / llama.cpp with drafter", "where each prompt has its best"),
)


def command(args: argparse.Namespace) -> int:
    for program in (PLAIN, SPECULATIVE, SERVER):
        if not (args.binaries / program).is_file():
            raise InputError(f"--binaries: expected a folder with llama.cpp's {program}, got {args.binaries}")
    found = measure(args)
    rows = table(list(found.values()), args.drafts)
    if args.json:
        by_prompt = {
            name: {"speeds": each.speeds, "tokens": each.tokens, "hits": each.hits}
            for name, each in found.items()
        }
        told = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
        print(json.dumps({"domains": told, "prompts": by_prompt}))
    else:
        show("Two processes beside llama.cpp's, tokens per second", COLUMNS, rows)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.perf.llama_cpp_rpc", __doc__)
    for name, what in (("binaries", "FOLDER"), ("target", "T.gguf"), ("drafter", "D.gguf")):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar=what)
    parser.add_argument("--prompts", nargs="+", default=[str(bundled_folder("bench.jsonl"))], metavar="FILE")
    parser.whole("--limit", 2, "prompts of each domain")
    parser.whole("--tokens", 64, "of an answer")
    parser.whole("--rounds", 1)
    parser.add_argument(
        "--drafts", type=positives, default=(2, 4, 8, 16), help="that llama.cpp is tried with"
    )
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
