"""Answers bound by the schemas of JSON-Schema-Test-Suite: `python -m tests.checks.schemas FOLDER`.

The folder is a copy of that suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite). Its schemas of
draft 2020-12 and then of draft 7 are taken in the order of their files' names, and in each file as they come.
Where one speaks of the parts of objects, say, and allows anything else, an object is asked for. What the
library refuses is counted by its reasons. Of every other one the bundled model gives two answers, at
temperature 0 and 1, decoded step by step, and then by every method, in a pipeline in this process whose
events come in any order: these must be the same token by token. A whole answer must be a document that the
schema allows, by a checker of our own (`json_validity`), where that agrees with the suite on all documents
that the suite has for the schema. Tokens that close something are likelier than the model has them, or one
that has never seen JSON would not end.

`--done FILE` keeps what is found, and goes on from there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flowspec.bench.console import progress, show
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import Forget, Submit
from flowspec.core.head.head import HeadCore
from flowspec.core.methods import METHODS, WITHOUT_GUESSES, make_method
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.draft.cached import TreeCachedDrafter
from flowspec.draft.guide import certain_of
from flowspec.draft.kinds import FALLBACK, open_drafter
from flowspec.draft.text import TextDrafter
from flowspec.errors import InputError
from flowspec.model import shaping
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.grammar import GrammarVocabulary, check_grammar, schema_text
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from tests.checks.json_validity import UnknownError, is_valid, read
from tests.command import Parser, chosen, run_command
from tests.model.slices import load_stages, pipeline

DRAFTS = ("draft2020-12", "draft7")
STAGES = 2
CONTEXT = 256
NEW_TOKENS_MAX = 40
TEMPERATURES = (0.0, 1.0)
QUESTION = "Tell me about it as JSON."
CLOSING = re.compile(rb'["}\]]')
CLOSING_BIAS = 5.0
OF_TYPE = {
    "object": "properties required additionalProperties patternProperties propertyNames minProperties "
    "maxProperties dependentRequired dependentSchemas dependencies unevaluatedProperties",
    "array": "items prefixItems additionalItems contains minItems maxItems uniqueItems unevaluatedItems",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
    "string": "minLength maxLength pattern format",
}
"""What speaks of values of one type alone."""
REFUSED, UNCHECKED, CHECKED = "refused", "unchecked", "checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A schema of the suite: `draft/file#number`, and the documents that it allows or does not."""

    name: str
    schema: Any
    documents: Sequence[tuple[Any, bool]]

    @property
    def is_draft7(self) -> bool:
        return self.name.startswith("draft7/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a schema. It is `refused` for a reason, or its answers are `checked`, or `unchecked` where
    our checker does not know the schema, for a reason.

    `texts` are the answers, `whole` says which ended by themselves, `invalid` which of these the schema does
    not allow, and `wrong` which methods answered otherwise at which temperature.
    """

    name: str
    kind: str
    reason: str = ""
    texts: Sequence[str] = ()
    whole: Sequence[bool] = ()
    invalid: Sequence[int] = ()
    wrong: Sequence[str] = ()
    tokens: int = 0

    @property
    def is_right(self) -> bool:
        return not self.invalid and not self.wrong


def entries(folder: Path) -> Iterator[Entry]:
    """Raises `InputError` for a folder that is not the suite."""
    for draft in DRAFTS:
        paths = sorted((folder / "tests" / draft).glob("*.json"))
        if not paths:
            raise InputError(f"{folder}: expected JSON-Schema-Test-Suite with tests/{draft}, found none")
        for path in paths:
            for number, group in enumerate(json.loads(path.read_text("utf-8"))):
                yield Entry(
                    name=f"{draft}/{path.stem}#{number}",
                    schema=group["schema"],
                    documents=[(test["data"], test["valid"]) for test in group["tests"]],
                )


def asked_for(schema: Any) -> Any:
    """The schema, with the type that it speaks of where it allows any."""
    if not isinstance(schema, dict) or schema.keys() & {"type", "const", "enum", "$ref"}:
        return schema
    types = [name for name, keys in OF_TYPE.items() if schema.keys() & set(keys.split())]
    return {**schema, "type": types[0]} if types else schema


def why_unchecked(entry: Entry) -> str:
    """Why our checker says nothing of a schema; empty where it does."""
    try:
        agrees = all(
            is_valid(entry.schema, document, is_draft7=entry.is_draft7) == valid
            for document, valid in entry.documents
        )
    except UnknownError as unknown:
        return str(unknown)
    return "" if agrees else "it does not agree with the suite"


class Rig:
    """The bundled model in this process: step by step, and in a pipeline for each method."""

    def __init__(self, methods: Sequence[str]) -> None:
        files = ModelFiles(BUNDLED)
        config, tokenizer = files.config(), Tokenizer(files)
        self.stop_ids = recommended(files, config).stop_ids
        tokens = tokenizer.token_bytes_of_all(config.vocab_size, self.stop_ids)
        self._tokenizer = tokenizer
        self._prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": QUESTION}]))
        self._plain = StepByStep.load(files, "float32")
        self._plain.grammars = GrammarVocabulary(tokens)
        closing = {token for token, text in enumerate(tokens.texts) if CLOSING.match(text)} | self.stop_ids
        self._bias = tuple((token, CLOSING_BIAS) for token in sorted(closing))
        self._requests = 0
        self._runs = {}
        made = [(method, FALLBACK) for method in methods]
        made += [(method, BUNDLED) for method in methods[:1] if method != WITHOUT_GUESSES]
        for method, name in made:
            slices = load_stages(Path(str(files.folder)), STAGES)
            slices[-1].grammars = GrammarVocabulary(tokens)
            drafters = []
            if method != WITHOUT_GUESSES:
                drafter = open_drafter(name, files, "float32", torch.device("cpu"), context=CONTEXT)
                assert drafter is not None
                if isinstance(drafter, TextDrafter):
                    drafter.take_tokens(tokens)
                elif isinstance(drafter, TreeCachedDrafter):
                    drafter.take_grammars(GrammarVocabulary(tokens))
                drafters.append(drafter)
            traits = [
                DrafterTraits(context=each.context, looks_up=isinstance(each, TextDrafter))
                for each in drafters
            ]
            head = HeadCore(
                context=CONTEXT,
                stage_count=STAGES,
                method=make_method(method),
                drafters=traits,
                certain_of=certain_of(tokens),
            )
            run = pipeline(slices, head, drafters)
            run.rng = random.Random(method)
            self._runs[f"{method} with {name}" if drafters else method] = run

    def outcome(self, entry: Entry) -> Outcome:
        try:
            text = schema_text(asked_for(entry.schema))
            check_grammar("json_schema", text)
        except InputError as refused:
            return Outcome(name=entry.name, kind=REFUSED, reason=_family(str(refused)))
        grammar = Grammar(kind="json_schema", text=text, ends=tuple(sorted(self.stop_ids)))
        reason = why_unchecked(entry)
        texts, whole, invalid, wrong, count = [], [], [], [], 0
        seed = zlib.crc32(entry.name.encode())
        for place, temperature in enumerate(TEMPERATURES):
            sampling = Sampling(temperature=temperature, seed=seed, grammar=grammar, logit_bias=self._bias)
            expected = self._plain.generate(self._prompt, sampling, NEW_TOKENS_MAX, self.stop_ids)
            is_whole = expected[-1] in self.stop_ids
            expected = expected[:-1] if is_whole else expected
            for method in self._runs:
                if self._answer(method, sampling) != (expected, is_whole):
                    wrong.append(f"{method}, temperature {temperature:g}")
            count += len(expected)
            texts.append(self._tokenizer.decode(expected))
            whole.append(is_whole)
            if is_whole and not reason:
                try:
                    if not self._allows(entry, texts[-1]):
                        invalid.append(place)
                except UnknownError as unknown:
                    reason = str(unknown)
        return Outcome(
            name=entry.name,
            kind=UNCHECKED if reason else CHECKED,
            reason=reason,
            texts=texts,
            whole=whole,
            invalid=invalid,
            wrong=wrong,
            tokens=count,
        )

    @staticmethod
    def _allows(entry: Entry, text: str) -> bool:
        try:
            document = read(text)
        except ValueError:
            return False
        return is_valid(entry.schema, document, is_draft7=entry.is_draft7)

    def _answer(self, method: str, sampling: Sampling) -> tuple[tuple[int, ...], bool]:
        """The tokens without the one that ended them, and whether one did."""
        run, request = self._runs[method], self._requests
        self._requests += 1
        run.give(
            Submit(
                request=request,
                prompt=self._prompt,
                new_tokens_max=NEW_TOKENS_MAX,
                sampling=sampling,
                stop_ids=self.stop_ids,
            )
        )
        run.settle()
        found, end = tuple(run.answers.pop(request, ())), run.ends.pop(request)
        run.give(Forget(request=request))
        run.settle()
        return found, end.reason == "stop"


def _family(reason: str) -> str:
    """A reason without what only its schema has."""
    reason = reason.removeprefix("json_schema: ").removeprefix("llguidance refuses it: ")
    return re.sub(r"'[^']*'|\d[\d.e+-]*|(?<=: )/\S*", "…", reason)[:100]


def read_done(path: Path) -> dict[str, Outcome]:
    if not path.exists():
        return {}
    return {each["name"]: Outcome(**each) for each in map(json.loads, path.read_text("utf-8").splitlines())}


def summary(done: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of schemas and answers, and all that is wrong."""
    answered = [each for each in done if each.kind != REFUSED]
    checked = [each for each in answered if each.kind == CHECKED]
    return {
        "schemas": len(done),
        "refused": dict(Counter(each.reason for each in done if each.kind == REFUSED).most_common()),
        "answered": len(answered),
        "answers": sum(len(each.texts) for each in answered),
        "tokens": sum(each.tokens for each in answered),
        "whole": sum(sum(each.whole) for each in answered),
        "checked": sum(sum(each.whole) for each in checked),
        "unchecked": dict(Counter(each.reason for each in answered if each.kind == UNCHECKED).most_common()),
        "invalid": [[each.name, each.texts[place]] for each in checked for place in each.invalid],
        "wrong": [[each.name, other] for each in answered for other in each.wrong],
    }


def report(found: Mapping[str, Any]) -> None:
    rows = [[reason, str(count)] for reason, count in found["refused"].items()]
    show(f"{sum(found['refused'].values())} of {found['schemas']} schemas are refused", ["why", "n"], rows)
    print(
        f"{found['answers']} answers to {found['answered']} schemas, {found['tokens']} tokens, "
        f"{found['whole']} whole, {found['checked']} of these checked"
    )
    for name, text in found["invalid"]:
        print(f"NOT VALID: {name}: {text}")
    for name, other in found["wrong"]:
        print(f"WRONG: {name}: {other}")


def command(args: argparse.Namespace) -> int:
    shaping.BESIDE_TOKENS_MIN = 1  # masks beside the layers, as of a large vocabulary
    torch.set_num_threads(1)
    every = list(entries(args.folder))[: args.limit]
    done = {} if args.done is None else read_done(args.done)
    rig = Rig(args.methods)
    with progress("starting", len(every)) as step:
        for entry in every:
            step(entry.name)
            if entry.name in done:
                continue
            done[entry.name] = rig.outcome(entry)
            if args.done is not None:
                with args.done.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(done[entry.name])) + "\n")
    outcomes = [done[entry.name] for entry in every]
    found = summary(outcomes)
    if args.json:
        print(json.dumps(found))
    else:
        report(found)
    return 0 if all(each.is_right for each in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("tests.checks.schemas", __doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a copy of JSON-Schema-Test-Suite")
    parser.whole("--limit", 500, "schemas")
    parser.add_argument(
        "--methods",
        type=chosen(METHODS),
        default=METHODS,
        metavar="NAME[,NAME...]",
        help="methods that answer (default: all)",
    )
    parser.add_argument("--done", type=Path, metavar="FILE", help="what is found, one schema a line")
    return run_command(parser, command, argv)


if __name__ == "__main__":
    sys.exit(main())
