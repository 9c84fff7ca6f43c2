"""Random schedules: every seed draws a cluster, a method, a drafter, and what people ask of it and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from msgspec import structs

from flowspec.core.head.events import Cancel, DrafterLost, Finished, Forget, Submit
from flowspec.core.methods import METHODS, make_method
from flowspec.core.methods.continuous import Continuous
from flowspec.core.protocol.messages import Grammar, Sampling
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.draft.guide import certain_of
from flowspec.model.grammar import GrammarVocabulary, library_version
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.drafter import FakeDrafter
from flowspec.sim.drafter_device import DrafterDeviceSpec
from flowspec.sim.language import HashLanguage
from flowspec.sim.record import SimulatedAnswer
from flowspec.sim.world import Cluster, Handled, World
from tests.pipeline import StopAfter, ask, validate_at_rest
from tests.plain import plain_answer, plain_logprobs

EVENTS_MAX = 20_000
"""Ten times what the longest of thousands of schedules took."""
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.8, top_k=3),
    Sampling(temperature=1.0, min_p=0.1),
)


@dataclass
class Dialogue:
    """One request: its first question, how many more follow, and when it is cancelled or forgotten (None:
    never)."""

    first: Submit
    at_s: float
    turns: int
    cancel_s: float | None
    forget_s: float | None
    forgets_at_end: bool


@dataclass
class Schedule:
    """What one seed stands for."""

    seed: int
    method_name: str
    cluster: Cluster
    language: HashLanguage
    quality: float | None
    drafter_context: int
    captures: tuple[int, ...]
    others: tuple[float, ...] = ()
    lost: tuple[int, float] | None = None
    """A drafter, and when it goes."""
    dialogues: list[Dialogue] = field(default_factory=list)


def draw(seed: int) -> Schedule:
    """The schedule of a seed. Each kind of trouble has its own chance, so many seeds have little of it and
    some have all."""
    rng = random.Random(seed)
    language = HashLanguage(rng.choice([7, 24, 60]), seed, rng.choice([0.7, 2.0, 4.0]))
    if library_version():
        language.grammars = _letters(language.vocabulary_size)
    method = rng.choice(METHODS)
    context = rng.choice([16, 40, 90, 250])
    schedule = Schedule(
        seed=seed,
        method_name=method,
        cluster=_cluster(rng, method, context, seed),
        language=language,
        quality=None if method == "ar" and rng.random() < 0.5 else rng.choice([0.0, 0.5, 0.8, 0.95, 1.0]),
        drafter_context=rng.choice([1, 8, 20]) if rng.random() < 0.15 else context,
        captures=(1,) if rng.random() < 0.2 else (),
    )
    for request in range(rng.choices([1, 2, 3], weights=[6, 2, 1])[0]):
        schedule.dialogues.append(_dialogue(rng, request, language, context))
    chances = random.Random(~seed)
    for dialogue in schedule.dialogues:
        if chances.random() < 0.2:
            dialogue.first = _taken_over(chances, dialogue.first, language, context)
    schedule.cluster = replace(schedule.cluster, sliding_window=draw_window(random.Random(f"window {seed}")))
    wanted = random.Random(seed)
    for dialogue in schedule.dialogues:
        dialogue.first = replace(dialogue.first, top_logprobs=wanted.choice([-1, -1, 0, 3, 20]))
    if language.grammars is not None and random.Random(f"certain {seed}").random() < 0.7:
        schedule.cluster = replace(schedule.cluster, certain_of=certain_of(language.grammars.tokens))
    if make_method(method).drafters_max > 1 and chances.random() < 0.6:
        _add_drafters(chances, schedule)
    _share(random.Random(f"share {seed}"), schedule)
    return schedule


def _share(rng: random.Random, schedule: Schedule) -> None:
    """Short blocks are shared; and at times there are more dialogues, which begin as others do: what a seed
    had stays as it was."""
    context, language = schedule.cluster.context, schedule.language
    schedule.cluster = replace(schedule.cluster, prefix_block=rng.choice([0, 1, 2, 5, 16]))
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        dialogue = _dialogue(rng, len(schedule.dialogues), language, context)
        text = rng.choice(schedule.dialogues).first.prompt
        prompt = (*text[: rng.choice([len(text), rng.randint(1, len(text))])], *dialogue.first.prompt)
        rule = None if dialogue.first.stop_rule is None else StopAfter(rng.randint(1, 5))
        dialogue.first = replace(dialogue.first, prompt=prompt[: context - 1], stop_rule=rule)
        schedule.dialogues.append(dialogue)


def draw_window(rng: random.Random) -> SlidingWindow | None:
    """Of some layers: often a short one, from which much is given back."""
    if rng.random() < 0.4:
        return None
    tokens, back = rng.choice([1, 3, 9, 30]), rng.choice([0, 2, 10, 40])
    step, snapshot = rng.choice([1, 1, 4, 16]), rng.choice([0, 1, 5])
    return SlidingWindow(tokens=tokens, back=back, step=step, snapshot=snapshot)


def next_prompt(
    rng: random.Random, prompt: Sequence[int], answer: Sequence[int], vocabulary: int, context: int
) -> tuple[int, ...]:
    """Of a dialogue's next turn, which repeats some or all of it; some leave the answer out, and the end of
    its prompt, as templates do that drop thoughts."""
    text = [*prompt, *answer]
    kept = text if rng.random() < 0.6 else text[: rng.randint(0, len(text))]
    more = rng.randint(0 if kept else 1, 6)
    if random.Random(len(text)).random() < 0.5:
        kept, more = list(prompt[: max(0, len(prompt) - len(text) % 3)]), max(1, more)
    return tuple([*kept, *(rng.randrange(vocabulary) for _ in range(more))][: context - 1])


def _add_drafters(rng: random.Random, schedule: Schedule) -> None:
    """More models beside the target: each a drafter, or an intermediate that judges what drafters say."""
    others = tuple(rng.choice([0.0, 0.6, 0.9, 1.0]) for _ in range(rng.choice([1, 1, 2, 3])))
    levels = (0, *(rng.choice([0, 0, 1, 2]) for _ in others))
    drafting = schedule.cluster.drafting
    assert isinstance(drafting, Curve)
    times = (drafting, *(drafting.scaled(rng.choice([0.3, 1, 4])) for _ in others))
    schedule.others = others
    options = dict(schedule.cluster.options)
    if schedule.method_name == "cosine":
        options |= {
            "routing": rng.random() < 0.7,
            "fusion": rng.random() < 0.7,
            "count": rng.choice([None, None, 1, 2]),
        }
    if schedule.method_name == "specrouter" and rng.random() < 0.4:
        options |= {"chain": tuple(model for model in range(len(times)) if rng.random() < 0.6)}
    boards = _boards(rng, len(times), schedule.captures)
    schedule.cluster = replace(
        schedule.cluster, drafting=times, levels=levels, boards=boards, options=options
    )
    if rng.random() < 0.3:
        # Features come only once.
        schedule.lost = (rng.randrange(1 if schedule.captures else 0, len(times)), rng.uniform(0, 4))


def _boards(rng: random.Random, count: int, captures: tuple[int, ...]) -> tuple[DrafterDeviceSpec, ...]:
    """Drafters that share boards, the first one's at the head where it wants features; or none that do."""
    if rng.random() < 0.4:
        return ()
    places = [0, *(rng.randrange(count) for _ in range(count - 1))]
    return tuple(
        DrafterDeviceSpec(
            drafters=tuple(number for number, there in enumerate(places) if there == place),
            link=None if (place == 0 and captures) or rng.random() < 0.3 else _link(rng),
        )
        for place in sorted(set(places))
    )


def _taken_over(rng: random.Random, submit: Submit, language: HashLanguage, context: int) -> Submit:
    """The same question to a head that takes the answer over from another one, at some point."""
    whole, _ = plain(language, submit, context)
    return replace(submit, answered=tuple(whole[: rng.randint(0, len(whole))]))


def plain(language: HashLanguage, submit: Submit, context: int) -> tuple[list[int], str]:
    """What plain decoding answers, and why it ends there."""
    return plain_answer(
        language,
        submit.prompt,
        submit.sampling,
        new_tokens_max=submit.new_tokens_max,
        context=context,
        stop_ids=submit.stop_ids,
        stop_rule=submit.stop_rule,
    )


def _cluster(rng: random.Random, method: str, context: int, seed: int) -> Cluster:
    stages = rng.choices(range(1, 9), weights=[6, 6, 4, 2, 1, 1, 1, 1])[0]
    speed = Curve(
        base_s=rng.choice([0.005, 0.02, 0.05]),
        row_s=rng.choice([0.0, 0.001, 0.01]),
        extra_row_s=rng.choice([0.0, 0.0005]),
    )
    devices = [
        DeviceSpec(curve=speed, layers=rng.choice([1, 2, 7]), sampling=Curve(row_s=rng.choice([0.0, 0.002])))
        for _ in range(stages)
    ]
    if rng.random() < 0.3:
        slow = rng.randrange(stages)
        devices[slow] = replace(devices[slow], curve=speed.scaled(5))
    shape = {"nodes": rng.choice([1, 4, 16]), "depth": rng.choice([1, 2, 4]), "width": rng.choice([1, 2, 5])}
    window = rng.choice([None, None, 1, 2])
    make = partial(
        Continuous,
        segment_nodes=shape["nodes"],
        width=shape["width"],
        batch=rng.choice([1, 4, 8]),
        window=window,
    )
    return Cluster(
        devices=tuple(devices),
        control=tuple(_link(rng) for _ in range(stages)),
        data=tuple(_link(rng) for _ in range(stages + 1)),
        method=make if method == "continuous" and rng.random() < 0.7 else method,
        options={} if method in ("ar", "continuous") else shape,
        context=context,
        drafting=Curve(base_s=rng.choice([0.0, 0.003, 0.03]), row_s=rng.choice([0.0, 0.001])),
        head_s=rng.choice([0.0, 0.0, 0.0005, 0.01]),
        row_bytes=rng.choice([None, 2048, 8192]),
        seed=seed,
    )


def _link(rng: random.Random) -> LinkSpec:
    return LinkSpec(
        delay_s=rng.choice([0.0, 0.0005, 0.005, 0.1]),
        bandwidth_mbps=rng.choice([float("inf"), 150.0, 5.0]),
        jitter_s=rng.choice([0.0, 0.0, 0.01, 0.2]),
    )


def _dialogue(rng: random.Random, request: int, language: HashLanguage, context: int) -> Dialogue:
    length_max = min(context - 1, rng.choice([3, 10, 30, 200]))
    prompt = tuple(rng.randrange(language.vocabulary_size) for _ in range(rng.randint(1, length_max)))
    sampling = structs.replace(rng.choice(SAMPLINGS), seed=rng.randrange(1 << 40))
    sampling = biased(random.Random(f"bias {sampling.seed}"), sampling, language.vocabulary_size)
    sampling = penalised(random.Random(f"penalties {sampling.seed}"), sampling)
    if language.grammars is not None and not sampling.suppress_tokens:
        sampling = bound(random.Random(f"grammar {sampling.seed}"), sampling)
    submit = ask(
        request, prompt, rng.choices([1, 4, 8, 12, 20, 40], weights=[2, 4, 8, 4, 2, 1])[0], sampling=sampling
    )
    whole, _ = plain_answer(language, prompt, sampling, new_tokens_max=submit.new_tokens_max, context=context)
    if rng.random() < 0.35:
        submit = replace(submit, stop_ids=frozenset(rng.choices(whole, k=rng.choice([1, 1, 2]))))
    if rng.random() < 0.15:
        submit = replace(submit, stop_rule=StopAfter(rng.randint(1, len(whole))))
    at_s = rng.choice([0.0, 0.0, 0.1, rng.uniform(0, 3)])
    return Dialogue(
        first=submit,
        at_s=at_s,
        turns=rng.choices([0, 1, 2], weights=[6, 3, 1])[0],
        cancel_s=at_s + rng.uniform(0, 4) if rng.random() < 0.25 else None,
        forget_s=at_s + rng.uniform(0, 6) if rng.random() < 0.15 else None,
        forgets_at_end=rng.random() < 0.3,
    )


def biased(rng: random.Random, sampling: Sampling, vocabulary: int) -> Sampling:
    """Some never draw some tokens, all but one at most, and some have biases."""
    if rng.random() < 0.3:
        suppressed = rng.sample(range(vocabulary), rng.choice([1, vocabulary // 2, vocabulary - 1]))
        sampling = structs.replace(sampling, suppress_tokens=tuple(sorted(suppressed)))
    if rng.random() < 0.2:
        named = sorted(rng.sample(range(vocabulary), rng.randint(1, 5)))
        bias = tuple((token, rng.choice([-100.0, -1.5, 0.0, 2.0, 100.0])) for token in named)
        sampling = structs.replace(sampling, logit_bias=bias)
    return sampling


def penalised(rng: random.Random, sampling: Sampling) -> Sampling:
    """Some look at the text before what they draw."""
    if rng.random() >= 0.3:
        return sampling
    return structs.replace(
        sampling,
        presence_penalty=rng.choice([0.0, -0.5, 1.5]),
        frequency_penalty=rng.choice([0.0, -0.2, 0.7]),
        repetition_penalty=rng.choice([1.0, 0.8, 1.3]),
    )


def bound(rng: random.Random, sampling: Sampling) -> Sampling:
    """Some may only write what a grammar allows, and end where it lets them."""
    if rng.random() < 0.8:
        return sampling
    texts = ["(ab?|c[d-f]{2,4}|[a-c])*", "[a-f]{30}", "(a|b[a-f]|[c-f]{3})+", "(abcdef|f[abc]edab)+"]
    text = rng.choice(texts)
    return structs.replace(sampling, grammar=Grammar(kind="regex", text=text, ends=(0,)))


@cache
def _letters(count: int) -> GrammarVocabulary:
    """Of so many tokens the first ends, and the others are a letter each, or two."""
    texts = [b"", *(bytes([97 + token % 6]) * (1 + token // 30) for token in range(1, count))]
    return GrammarVocabulary(TokenBytes(tuple(texts)))


class Play:
    """One run of a schedule. With `checks` what the cores say of themselves is true after every event, and
    every answer is the plain one."""

    def __init__(self, schedule: Schedule, *, checks: bool) -> None:
        self.schedule = schedule
        self.world = self._build(schedule)
        self._rngs = [
            random.Random(schedule.seed * 1000 + request) for request in range(len(schedule.dialogues))
        ]
        self._turns = [dialogue.turns for dialogue in schedule.dialogues]
        self._forgotten: set[int] = set()
        self.world.checks = checks
        self.world.on_event = self._look
        if schedule.lost is not None and self.world.drafters:
            drafter, at_s = schedule.lost
            self.world.at(at_s, DrafterLost(drafter=drafter))
        for request, dialogue in enumerate(schedule.dialogues):
            self.world.at(dialogue.at_s, dialogue.first)
            if dialogue.cancel_s is not None:
                self.world.at(dialogue.cancel_s, Cancel(request=request))
            if dialogue.forget_s is not None:
                self.world.at(dialogue.forget_s, Forget(request=request))

    @staticmethod
    def _build(schedule: Schedule) -> World:
        drafters = []
        if schedule.quality is not None:
            for number, quality in enumerate((schedule.quality, *schedule.others)):
                drafters.append(
                    FakeDrafter(
                        schedule.language,
                        quality,
                        schedule.seed + number,
                        context=schedule.drafter_context,
                        captures=schedule.captures if number == 0 else (),
                    )
                )
        return World(schedule.cluster, schedule.language, drafters)

    def run(self) -> str:
        """The digest, once nothing moves any more."""
        self.world.run(events_max=EVENTS_MAX)
        if self.world.checks:
            validate_at_rest(self.world)
            for answers in self.world.answers.values():
                for answer in answers:
                    self._check(answer)
        return self.world.digest.hex()

    def _look(self, handled: Handled) -> None:
        if isinstance(handled.event, Forget):
            self._forgotten.add(handled.event.request)
        for command in handled.commands:
            if isinstance(command, Finished):
                self._go_on(command.request)

    def _go_on(self, request: int) -> None:
        """An answer ended: the next turn repeats some or all of the dialogue, or its end is forgotten."""
        rng, dialogue, answer = (
            self._rngs[request],
            self.schedule.dialogues[request],
            self.world.answers[request][-1],
        )
        later_s = self.world.clock.now_s + rng.choice([0.0, 0.05, 1.0])
        if request in self._forgotten or dialogue.forget_s is not None:
            return
        if self._turns[request] == 0:
            if dialogue.forgets_at_end:
                self.world.at(later_s, Forget(request=request))
            return
        self._turns[request] -= 1
        said = (*answer.submit.answered, *answer.tokens)
        vocabulary, context = self.schedule.language.vocabulary_size, self.schedule.cluster.context
        prompt = next_prompt(rng, answer.submit.prompt, said, vocabulary, context)
        submit = replace(
            answer.submit,
            prompt=prompt,
            answered=(),
            new_tokens_max=rng.randint(1, 6),
            stop_ids=frozenset(),
            stop_rule=None,
        )
        self.world.at(later_s, submit)

    def _check(self, answer: SimulatedAnswer) -> None:
        submit = answer.submit
        assert not set(submit.sampling.suppress_tokens).intersection(answer.tokens)
        whole, reason = plain(self.schedule.language, submit, self.schedule.cluster.context)
        expected = whole[len(submit.answered) :]
        assert answer.end is not None, f"request {submit.request} never ended"
        assert answer.logprobs == plain_logprobs(self.schedule.language, submit, answer.tokens), (
            f"request {submit.request}: log-probabilities"
        )
        if answer.end.reason == "cancelled":
            assert answer.tokens == expected[: len(answer.tokens)], (
                f"request {submit.request} was cancelled in a wrong answer"
            )
        else:
            assert (answer.tokens, answer.end.reason) == (expected, reason), (
                f"request {submit.request} has a wrong answer"
            )
