"""Token ids of answers: one recording for each question, by whatever method it is decoded.

What a question's answer is depends on model, precision, prompt, sampling and seed alone. So every answer here
is an observation of the same few keys, by method and stages, with a daemon killed, a head killed and resumed,
from copies of what another answer computed, in shared segments. Answers that a schema binds are among them.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from flowspec import LLM, Answer, Cluster
from flowspec.model.files import bundled_folder
from lab.golden.daemons import Daemon, daemons
from lab.golden.place import Place, UnavailableError, smollm2
from lab.golden.recording import Absent, Observation
from tests import ggufs

METHODS = ("ar", "continuous", "cosine", "specrouter", "tree-sd", "chunk-pp", "pipedec", "flowspec-paper")
TEMPERATURES = (0.0, 0.8)
SEED = 7
CONTEXT = 512
WAIT_S = 300.0
"""What nothing takes that goes well."""
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}, "is_even": {"type": "boolean"}},
    "required": ["sum", "is_even"],
    "additionalProperties": False,
}
BOUND: Mapping[str, dict[str, Any]] = {
    "a schema": {"json_schema": SUM},
    "a pattern": {"regex": "(yes|no), [0-9]{2}"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is asked of a model.

    `models`: where its weights are, by precision. `splits`: layers of each stage, by number of stages.
    `guesses`: keywords by method. `share`: of every so many methods one is tried in each precision with each
    number of stages, and all in each precision. `disturbed`: the precision in which daemons and heads die.
    """

    name: str
    models: Mapping[str, str]
    splits: Mapping[int, tuple[int, ...]]
    guesses: Mapping[str, dict[str, Any]]
    share: int
    prompts: tuple[str, ...]
    new_tokens: int
    disturbed: str
    long_tokens: int


LINES = {name: {"drafter": "ngram"} for name in METHODS}
"""No model of SmolLM2's vocabulary is smaller, so texts that came before are looked up."""


def toy(place: Place) -> Model:
    checkpoint, packed = bundled_folder("target"), place.home / "toy.gguf"
    ggufs.convert(checkpoint, packed, (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0))
    plain = ("float32", "bfloat16", "int8", "int4")
    return Model(
        name="toy",
        models={**dict.fromkeys(plain, "bundled"), "gguf": str(packed)},
        splits={1: (8,), 2: (3, 5), 3: (2, 3, 3), 4: (2, 1, 3, 2)},
        guesses={
            **{name: {"drafter": "draft"} for name in METHODS},
            "ar": {},
            "continuous": {"drafter": ["draft", "ngram"]},
            "cosine": {"drafter": ["draft", "draft-math", "ngram"]},
            "specrouter": {"chain": "draft,mid"},
        },
        share=4,
        prompts=("What is 17 + 25?", "Write a function that adds two numbers.", "Tell me a story."),
        new_tokens=24,
        disturbed="bfloat16",
        long_tokens=160,
    )


def smollm2_model(place: Place) -> Model:
    path = str(smollm2(place))
    return Model(
        name="smollm2",
        models=dict.fromkeys(("gguf", "float32", "bfloat16", "int8", "int4"), path),
        splits={1: (30,), 2: (14, 16), 3: (10, 10, 10), 4: (7, 8, 7, 8)},
        guesses={
            **LINES,
            "ar": {},
            "continuous": {"drafter": ["ngram", "suffix"]},
            "cosine": {"drafter": ["ngram", "suffix"]},
            "tree-sd": {"drafter": path},
        },
        share=8,
        prompts=("Why do leaves change colour?", "Write a palindrome check in Python."),
        new_tokens=12,
        disturbed="gguf",
        long_tokens=64,
    )


MODELS = {"tokens": toy, "tokens-smollm2": smollm2_model}


def observe(place: Place, name: str) -> Iterator[Observation | Absent]:
    try:
        model = MODELS[name](place)
    except UnavailableError as error:
        yield Absent(key="smollm2", why=str(error))
        return
    with daemons(place, 4, threads=1) as four:
        yield from every_method(model, place, four)
        yield from structured(model, four)
    if place.wants(f"{model.name}/long"):
        yield from disturbed(model, place)


def every_method(model: Model, place: Place, four: Sequence[Daemon]) -> Iterator[Observation]:
    """Each precision with each number of stages, by its share of the methods."""
    prompts: list[list[int]] = []
    for precision_at, precision in enumerate(
        ("float32", *(each for each in model.models if each != "float32"))
    ):
        for count in model.splits:
            for at, method in enumerate(METHODS):
                is_tried = (at + precision_at + count) % model.share == 0
                if not is_tried or (prompts and not place.wants(f"{model.name}/{precision}")):
                    continue
                with opened(model, four[:count], precision, method) as llm:
                    if not prompts:  # a file without a tokenizer is asked by ids, too
                        prompts = [llm.encode(text) for text in model.prompts]
                        yield Observation(key=f"{model.name}/prompts", value=prompts)
                    for temperature in TEMPERATURES:
                        answers = llm.generate(
                            prompts,
                            temperature=temperature,
                            seed=SEED,
                            max_new_tokens=model.new_tokens,
                            parallel=len(prompts),
                        )
                        yield Observation(
                            key=f"{model.name}/{precision}/T={temperature}",
                            value={
                                text: answer_value(one)
                                for text, one in zip(model.prompts, answers, strict=True)
                            },
                            at=f"{method}, {count} stages",
                        )


def structured(model: Model, four: Sequence[Daemon]) -> Iterator[Observation]:
    """Answers that are bound to a form, log-probabilities, penalties, and prompts that begin alike."""
    shared = f"{model.prompts[-1]} {'It is about a hen, a fox and a river. ' * 4}"
    for method, count in (("ar", 1), ("continuous", 3)):
        at = f"{method}, {count} stages"
        with opened(model, four[:count], model.disturbed, method) as llm:
            for name, form in BOUND.items():
                for temperature in TEMPERATURES:
                    one = llm.generate(
                        model.prompts[0], temperature=temperature, seed=SEED, max_new_tokens=40, **form
                    )
                    yield Observation(
                        key=f"{model.name}/{name}/T={temperature}", at=at, value=text_value(one)
                    )
            one = llm.generate(model.prompts[0], temperature=0.0, max_new_tokens=8, logprobs=3)
            yield Observation(key=f"{model.name}/log-probabilities", at=at, value=logprobs_value(one))
            one = llm.generate(
                model.prompts[-1],
                temperature=0.9,
                seed=SEED,
                max_new_tokens=16,
                top_k=20,
                top_p=0.9,
                presence_penalty=0.4,
                frequency_penalty=0.3,
                repetition_penalty=1.15,
                logit_bias={5: -100, 9: 1.5},
            )
            yield Observation(key=f"{model.name}/penalties", at=at, value=text_value(one))
            for end in ("What does the fox say?", "What does the hen say?"):
                one = llm.generate(shared + end, temperature=0.0, max_new_tokens=12)
                key = f"{model.name}/prompts that begin alike/{end}"
                yield Observation(key=key, at=at, value={**text_value(one), "reused": one.reused_tokens})
        with opened(model, four[:count], model.disturbed, method, enable_prefix_caching=False) as llm:
            one = llm.generate(shared + end, temperature=0.0, max_new_tokens=12)
            yield Observation(
                key=f"{model.name}/without copies/{end}",
                at=at,
                value={**text_value(one), "reused": one.reused_tokens},
            )


def disturbed(model: Model, place: Place) -> Iterator[Observation]:
    """One long answer: undisturbed, with one of four stages killed while it comes, and with the head killed
    and another that goes on."""
    key = f"{model.name}/long"
    for victim in (None, 0, 1, 3):
        with (
            daemons(place, 4, threads=1) as four,
            opened(model, four, model.disturbed, "continuous", layers=None, all_devices=True) as llm,
        ):
            stream = llm.stream(
                model.prompts[-1],
                temperature=0.8,
                seed=SEED,
                max_new_tokens=model.long_tokens,
                ignore_eos=True,
            )
            if victim is not None:
                for _ in zip(range(4), stream, strict=False):
                    pass
                four[victim].process.send_signal(signal.SIGKILL)
            at = "undisturbed" if victim is None else f"stage {victim} killed"
            yield Observation(key=key, value=text_value(stream.answer()), at=at)
    with daemons(place, 2, threads=1) as two:
        yield Observation(key=key, value=resumed(model, place, two), at="head killed, another goes on")


def resumed(model: Model, place: Place, two: Sequence[Daemon]) -> dict[str, Any]:
    """The answer that a head begins, and another finishes after the first was killed."""
    cluster, journal = place.home / "cluster.toml", place.home / "answer.journal"
    cluster.write_text(Cluster([each.address for each in two]).text(), "utf-8")
    words = ["generate", "--cluster", str(cluster), "--all-devices", "--json"]
    asked = ["--model", model.models[model.disturbed], "--dtype", model.disturbed, "--context", str(CONTEXT)]
    asked += ["--temperature", "0.8", "--seed", str(SEED), "--max-new-tokens", str(model.long_tokens)]
    asked += ["--ignore-eos", "--journal", str(journal), model.prompts[-1]]
    nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with place.start(place.flowspec(*words, *asked), **nowhere) as head:
        ends_s = time.monotonic() + WAIT_S
        while head.poll() is None and journal_lines(journal) < 5 and time.monotonic() < ends_s:
            time.sleep(0.01)
        head.kill()
    done = place.run(*words, "--resume", str(journal), timeout_s=WAIT_S)
    if done.returncode:
        return {"error": done.stderr.splitlines()}
    answer = json.loads(done.stdout)
    assert 0 < answer["resumed"] < model.long_tokens, "it was killed in the middle"
    return {
        "tokens": answer["token_ids"],
        "text": answer["text"].splitlines(),
        "finish_reason": answer["finish_reason"],
    }


def journal_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def opened(
    model: Model, some: Sequence[Daemon], precision: str, method: str, **options: Any
) -> Iterator[LLM]:
    """The model on these daemons; what earlier answers taught of drafters is left out of it."""
    common: dict[str, Any] = {
        "cluster": Cluster([each.address for each in some]),
        "layers": model.splits[len(some)],
        "dtype": precision,
        "context": CONTEXT,
        "method": method,
        "keep_learnt": False,
        **model.guesses[method],
    }
    with LLM(model.models[precision], **{**common, **options}) as llm:
        yield llm


def answer_value(answer: Answer) -> dict[str, Any]:
    return {"tokens": list(answer.token_ids), "finish_reason": answer.finish_reason}


def text_value(answer: Answer) -> dict[str, Any]:
    return {**answer_value(answer), "text": answer.text.splitlines()}


def logprobs_value(answer: Answer) -> list[list[Any]]:
    """Of each token its id and logarithm, and those of the likeliest."""
    found = []
    for token in answer.logprobs or ():
        likely = [[other.token_id, round(other.logprob, 6)] for other in token.top]
        found.append([[token.token_id, round(token.logprob, 6)], *likely])
    return found
