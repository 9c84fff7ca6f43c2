"""How often a drafter's guesses are right: by rank, by distance and by domain.

    python -m lab.perf.acceptance --drafter eagle3 --prompts FILE ... --out FOLDER [--json]

The drafter walks along plain answers. At every third token it is told all that the target has computed up to
there (features, where it reads any), and then given the answer's own next tokens as guesses. A proposal's
*distance* is how many tokens it is ahead of the newest token that the target has given: 1 is what follows
that one. So places of an answer are asked about at distances up to 16, which is where a full pipeline is,
always below true tokens. Nothing of virtual time is in it: the drafter runs as in the runtime.

`FOLDER/NAME.toml` is a profile as `lab.bench` takes it, with the hashes of the drafter's and the target's
files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from msgspec import to_builtins

from flowspec.bench.cases import PlainCase, Prompt, make_samplings, plain_cases, prompt_path, read_prompts
from flowspec.bench.drafters import open_drafter
from flowspec.bench.experiment import SHIPPED_PROMPTS, WIDTH_MAX, Experiment
from flowspec.cli.options import reals
from flowspec.core.protocol.messages import Commit, Open, Release, Segment, SegmentPart
from flowspec.draft.base import Drafter, FileKind
from flowspec.draft.feature_kinds import Block
from flowspec.draft.registry import find_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.plan.tables import toml_of
from lab.bench.profiles import BLOCK, CHAIN, MEASURED, TEXT, WITHIN, Profile, Shares
from lab.command import Parser, run_command

AHEAD, STRIDE = 16, 3
"""Distances that are asked about, and tokens between two places from where they are."""
CHUNK = 256
"""Rows of a prompt that a drafter is given at once."""
SLOTS_MORE = 900
"""Of a request's cache, for all the guesses that are made below one path."""
TOKENS_LEAST = 10
"""At distance 1, at each temperature: a domain of fewer tells nothing, and is left out of the profile."""

Hits = list[list[int]]
"""By distance: the numbers of proposals that came true at each rank, and behind these of all that were
looked at."""


class Walk:
    """One request of a drafter, along the path of a prompt and its plain answer."""

    def __init__(self, drafter: Drafter, case: PlainCase, request: int) -> None:
        self.path = (*case.prompt, *case.answer)
        self._drafter, self._case, self._request = drafter, case, request
        self._nodes = list(range(len(case.prompt) + 1))  # by position, as far as they are committed
        self._next = len(self._nodes)

    def read_prompt(self) -> list[tuple[int, Sequence[int]]]:
        """Of the answer's first token, the root, what follows it, as `guess` has it."""
        root = len(self._case.prompt)
        self._tell(range(root))
        found = []
        for first in range(0, root + 1, CHUNK):
            nodes = self._nodes[first : first + CHUNK]
            found = self._draft((), first, nodes, [node - 1 for node in nodes], root)
        return found

    def guess(self, ahead: int) -> list[tuple[int, Sequence[int]]]:
        """Distances, and the tokens that are proposed there, of the root and of up to `ahead - 1` true tokens
        below it, which are guesses now."""
        root = len(self._nodes) - 1
        count = min(ahead - 1, len(self.path) - 2 - root)
        new = list(range(self._next, self._next + count))
        self._next += count
        self._ahead = new
        return self._draft(self._committed, root + 1, new, [self._nodes[-1], *new][:count], root)

    def go_on(self, count: int) -> None:
        """So many of the guesses are the output: the target has given them, and the features before the
        last."""
        self._committed = self._ahead[:count]
        first = len(self._nodes) - 1
        self._nodes += self._committed
        self._tell(range(first, len(self._nodes) - 1))

    _ahead: Sequence[int] = ()
    _committed: Sequence[int] = ()

    def _tell(self, positions: Sequence[int]) -> None:
        if self._drafter.captures:
            nodes = [self._nodes[at] for at in positions]
            nothing = np.empty((len(nodes), 0))  # which states they are is known from the path
            self._drafter.take_features(self._request, 0, nodes, nothing)

    def _draft(
        self, committed: Sequence[int], first: int, nodes: Sequence[int], parents: Sequence[int], root: int
    ) -> list[tuple[int, Sequence[int]]]:
        """Rows `nodes` from position `first` on; those before `root` only fill the cache."""
        begun = len(self._case.prompt) + 1
        opening = Open(
            request=self._request,
            epoch=0,
            keep=0,
            length=begun,
            root=begun - 1,
            slots=len(self.path) + SLOTS_MORE,
            sampling=self._case.sampling,
            answer_start=len(self._case.prompt),
        )
        positions = range(first, first + len(nodes))
        part = SegmentPart(
            commit=Commit(
                request=self._request,
                epoch=0,
                base=len(self._nodes) - len(committed),
                path=tuple(committed),
            ),
            opening=opening,
            ids=tuple(nodes),
            parents=tuple(parents),
            tokens=tuple(self.path[at] for at in positions),
            positions=tuple(positions),
            committed=tuple(at < root for at in positions),
        )
        distance = {self._nodes[-1]: 1} | {
            node: at - root + 1 for node, at in zip(nodes, positions, strict=True)
        }
        found = self._drafter.draft(Segment(segment=0, parts=(part,)), WIDTH_MAX)
        return [(distance[each.node], each.tokens) for each in found if each.node in distance]


def count_hits(
    drafter: Drafter, case: PlainCase, request: int, *, ahead: int = AHEAD, stride: int = STRIDE
) -> Hits:
    """Of one answer; a drafter that reads no features is asked about each place once, at distance 1."""
    reads = bool(drafter.captures)
    hits = [[0] * (WIDTH_MAX + 1) for _ in range(ahead if reads else 1)]
    walk = Walk(drafter, case, request)
    found, root = walk.read_prompt(), len(case.prompt)
    while True:
        found += walk.guess(ahead if reads else stride + 1)
        for distance, tokens in found:
            true, at = walk.path[root + distance], hits[distance - 1 if reads else 0]
            at[WIDTH_MAX] += 1
            if true in tokens:
                at[tokens.index(true)] += 1
        if root + stride > len(walk.path) - 2:
            break
        found = []
        walk.go_on(stride)
        root += stride
    drafter.release(Release(request=request, epoch=0))
    return hits


def profile_of(
    name: str,
    target: ModelFiles,
    counted: Sequence[tuple[str, float, Hits]],
    source: str,
    depths: Sequence[float],
) -> Profile:
    """The sums of what was counted in each domain at each temperature."""
    kind = find_drafter(name)
    sums: dict[tuple[str, float], Hits] = {}
    for domain, temperature, hits in counted:
        known = sums.setdefault((domain, temperature), [[0] * (WIDTH_MAX + 1) for _ in hits])
        for mine, other in zip(known, hits, strict=True):
            mine[:] = map(sum, zip(mine, other, strict=True))
    shares = []
    few = {domain for (domain, _), hits in sums.items() if hits[0][WIDTH_MAX] < TOKENS_LEAST}
    for (domain, temperature), hits in sums.items():
        if domain in few:
            continue
        asked = [row for row in hits if row[WIDTH_MAX]]
        shares.append(
            Shares(
                domain=domain,
                temperature=temperature,
                tokens=tuple(row[WIDTH_MAX] for row in asked),
                shares=tuple(
                    tuple(round(sum(row[:within]) / row[WIDTH_MAX], 4) for within in WITHIN) for row in asked
                ),
            )
        )
    if not shares:
        raise InputError(
            f"--each: expected answers of {TOKENS_LEAST} tokens to guess in one domain at least, got fewer; "
            "give more prompts"
        )
    return Profile(
        basis=MEASURED,
        source=source,
        reads=TEXT if not kind.reads_features else BLOCK if isinstance(kind, Block) else CHAIN,
        depths=tuple(depths),
        within=WITHIN,
        files={
            f"{label}/{file}": sha256(Path(files.path(file)).read_bytes()).hexdigest()
            for label, files in (
                (name, kind.files if isinstance(kind, FileKind) else None),
                ("target", target),
            )
            if files is not None
            for file in sorted(set(files.file_map().values()))
        },
        shares=tuple(shares),
    )


def chosen_prompts(names: Sequence[str], each: int) -> Iterator[Prompt]:
    """The first prompts of each domain of each file. Domains of the shipped file keep their names; others are
    called after their file, for public sets call them differently."""
    for name in names:
        seen: dict[str, int] = {}
        for prompt in read_prompts(prompt_path(name)):
            seen[prompt.domain] = seen.get(prompt.domain, 0) + 1
            if seen[prompt.domain] <= each:
                label = Path(name).stem
                yield (
                    prompt
                    if name == SHIPPED_PROMPTS
                    else replace(prompt, domain=label, prompt_id=f"{label} {prompt.prompt_id}")
                )


def measure(args: argparse.Namespace, name: str, target: ModelFiles, cases: Sequence[PlainCase]) -> Profile:
    experiment = Experiment(name="acceptance", testbeds=(), setups=(), model=args.model)
    virtual = open_drafter(experiment, name, coupled=True)
    drafter, counts = virtual(cases[0])(), []
    for request, case in enumerate(cases):
        # One that looks up texts is one for all: it remembers. Others begin anew, with the case's features.
        if find_drafter(name).has_tensors:
            drafter = virtual(case)()
        assert drafter is not None, "nothing drafts"
        hits = count_hits(drafter, case, request)
        counts.append((case.domain, case.sampling.temperature, hits))
        print(f"{name}: {request + 1} of {len(cases)}", file=sys.stderr, flush=True)
    return profile_of(name, target, counts, args.source, getattr(drafter, "depths", ()))


def command(args: argparse.Namespace) -> int:
    args.source = f"lab.perf.acceptance, {args.each} of each domain of " + ", ".join(
        Path(name).stem for name in args.prompts or [SHIPPED_PROMPTS]
    )
    args.source += f"; up to {args.max_new_tokens} tokens"
    target = ModelFiles(args.model)
    samplings = make_samplings(args.temperatures, [1])
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = list(chosen_prompts(args.prompts or [SHIPPED_PROMPTS], args.each))
    cases = plain_cases(target, prompts, samplings, args.max_new_tokens, args.out / "answers.json")
    profiles: dict[str, Profile] = {}
    for name in args.drafter:
        profiles[name] = measure(args, name, target, [case for case in cases if len(case.answer) > 1])
        (args.out / f"{name}.toml").write_text(toml_of(to_builtins(profiles[name])), "utf-8")
    print(json.dumps(to_builtins(profiles)) if args.json else f"{', '.join(profiles)}: written to {args.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("lab.perf.acceptance", __doc__)
    parser.add_argument("--drafter", action="append", required=True, metavar="NAME")
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--prompts", action="append", metavar="FILE", help="as of flowspec bench")
    parser.whole("--each", 2, "prompts of each domain")
    parser.add_argument("--temperatures", type=reals, default=(0.0, 1.0), metavar="0,1")
    parser.whole("--max-new-tokens", 96)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
