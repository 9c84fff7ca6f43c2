"""Real processes, every method, drafter and way to draw: every answer is that of decoding step by step in one
process.

The cases are chosen so that every two values of different factors meet in one of them.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from flowspec.bench.records import EXACT
from flowspec.bench.verify import Case, ClusterAnswer, answer_of, judge
from flowspec.core.methods import METHODS, make_method
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, ModelFiles, bundled_folder
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer, recommended
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.session import ClusterOptions, Limits, open_cluster
from tests.checkpoints import SMALL, make_checkpoint

pytestmark = pytest.mark.usefixtures("lent")
RANDOM = "random"
EAGLE = "eagle"
NEW_TOKENS_MAX = 20
BIASED = {
    "suppress_tokens": tuple(range(260, 3000, 3)),
    "logit_bias": tuple((token, 1.5) for token in range(264, 1000, 7)),
}
"""A third of the vocabulary is never drawn, and some tokens oftener than the model says."""
PENALISED = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.15}
FACTORS: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "drafter": (BUNDLED, "ngram", RANDOM, EAGLE),
    "filter": ({}, {"top_k": 8, **PENALISED}, {"top_p": 0.8, **BIASED}, {"min_p": 0.1}),
    "temperature": (0.0, 0.5, 1.0),
    "stages": (1, 3),
    "seed": (1, 2, 3),
    "prompt": ("What is 17 + 25?", "Add two numbers.", "Tell a story."),
}
Pair = frozenset[tuple[int, int]]
"""Two factors, each with the index of a value."""


def all_pairs(sizes: Sequence[int]) -> list[list[int]]:
    """Few cases in which all pairs of values meet, as indices of values.

    Each next case begins with a pair that is missing; its other factors are chosen one by one for the most
    pairs that are.
    """
    factors = sorted(range(len(sizes)), key=lambda factor: -sizes[factor])
    pairs = [
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(factors, 2)
        for x in range(sizes[a])
        for y in range(sizes[b])
    ]
    missing = dict.fromkeys(pairs)
    cases = []
    while missing:
        case = dict(next(iter(missing)))
        for factor in factors:
            if factor not in case:
                gains = [_gain((factor, value), case, missing) for value in range(sizes[factor])]
                case[factor] = gains.index(max(gains))
        cases.append([case[factor] for factor in range(len(sizes))])
        for pair in itertools.combinations(case.items(), 2):
            missing.pop(frozenset(pair), None)
    return cases


def _gain(choice: tuple[int, int], case: dict[int, int], missing: Collection[Pair]) -> int:
    return sum(frozenset({choice, other}) in missing for other in case.items())


CASES = [
    {factor: FACTORS[factor][index] for factor, index in zip(FACTORS, chosen, strict=True)}
    for chosen in all_pairs([len(values) for values in FACTORS.values()])
]


def test_every_pair_of_values_meets_in_few_cases() -> None:
    for first, second in itertools.combinations(FACTORS, 2):
        met = [(case[first], case[second]) for case in CASES]
        assert all(pair in met for pair in itertools.product(FACTORS[first], FACTORS[second])), (
            f"{first} and {second}"
        )
    assert len(CASES) <= len(METHODS) * len(FACTORS["drafter"]) + 4


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ModelFiles(BUNDLED)


@pytest.fixture(scope="module")
def plain(files: ModelFiles) -> StepByStep:
    return StepByStep.load(files, "float32")


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, files: ModelFiles) -> dict[str, str]:
    """What `--drafter` takes, by the names used here."""
    shape = {
        **SMALL,
        "vocab_size": files.config().vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    folder = make_checkpoint(tmp_path_factory.mktemp("drafter"), "llama", shape)
    shutil.copy(files.path("tokenizer.json"), folder)
    return {RANDOM: str(folder), EAGLE: str(bundled_folder(EAGLE))}


@pytest.mark.parametrize("stages", FACTORS["stages"])
def test_no_answer_holds_a_wrong_token(
    stages: int, files: ModelFiles, plain: StepByStep, drafters: dict[str, str]
) -> None:
    tokenizer = Tokenizer(files)
    limits = Limits(new_tokens_max=NEW_TOKENS_MAX, stop_ids=recommended(files, files.config()).stop_ids)
    found: list[ClusterAnswer] = []
    drafted: dict[str, int] = {}
    with open_cluster(ClusterOptions(model=BUNDLED, dtype="float32", local=stages, context=200)) as cluster:
        own = [case for case in CASES if case["stages"] == stages]
        for (method, drafter), cases in itertools.groupby(sorted(own, key=_decoding), key=_decoding):
            name = None if method == "ar" else drafters.get(drafter, drafter)
            with cluster.session(
                Decoding(method=method, drafters=(name,)), lambda text, share: None
            ) as session:
                for case in cases:
                    sampling = Sampling(temperature=case["temperature"], seed=case["seed"], **case["filter"])
                    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": case["prompt"]}]))
                    asked = Case(prompt_id=case["prompt"], prompt=prompt, sampling=sampling)
                    running, timing = session.ask(prompt, sampling, limits)
                    found.append(answer_of(session, asked, running, timing, limits))
                    assert not set(sampling.suppress_tokens).intersection(found[-1].tokens)
                    assert running.end is not None
                    if method != "ar" and not make_method(method).is_calibrated:
                        # those stop listening to a drafter where it does not pay
                        count = running.end.statistics["nodes_sent"] - running.end.statistics["segments"]
                        drafted[drafter] = drafted.get(drafter, 0) + count
    verdicts = [judge(plain, one, limits.stop_ids) for one in found]
    assert [verdict for verdict in verdicts if verdict["verdict"] != EXACT] == []
    assert all(count for drafter, count in drafted.items() if drafter != "ngram"), (
        f"guesses took part: {drafted}"
    )


def _decoding(case: dict[str, Any]) -> tuple[str, str]:
    return case["method"], case["drafter"]
