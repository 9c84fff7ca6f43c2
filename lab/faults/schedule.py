"""What one seed stands for: a cluster, limits, a method, a drafter, questions, and the faults that happen to
it all and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import structs

from flowspec.core.cluster.forming import FormingTimeouts
from flowspec.core.cluster.membership import MembershipTimeouts
from flowspec.core.head.events import Submit
from flowspec.core.head.flights import Bounds
from flowspec.core.methods import METHODS, make_method, options_of
from flowspec.core.methods.base import Method
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.model_spec import SlidingWindow
from flowspec.plan.timing import Curve, LinkSpec
from flowspec.sim.device import DeviceSpec
from flowspec.sim.language import HashLanguage
from lab.faults.cluster import FORMING_TIMEOUTS
from lab.faults.daemon import PLAIN
from lab.faults.drafters import Place
from lab.faults.pipelines import HEAD
from tests.plain import plain_answer
from tests.sim.swarm import draw_window, penalised

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.9, top_k=3),
    Sampling(temperature=0.8, suppress_tokens=(1, 4), logit_bias=((0, -1.5), (2, 2.0))),
)
HEAL_S = 8.0
"""When all is well again."""
ANSWERED_SHARE = 0.25
"""Of the first questions: an answer that another head began, as its journal says."""
SILENT_S = 3.0
"""The longer of the silences by which a device is lost."""
HOLD_SHARE = 0.1
"""Of the silence by which a device is lost: for so long a segment may keep a link busy, as in the product."""
MORE_KINDS = ("held", "one way")
"""Faults that came later: drawn beside the others, so that a seed keeps the faults that it had."""
LATER_KINDS = (
    *("damaged", "short", "doomed", "locked", "babble", "heat"),
    *("garble", "mute", "slow link", "no name"),
)
"""And those that came after these."""
DRAFTER_KINDS = (
    *("crash", "restart", "stop", "slow", "stuck", "sever", "break", "refuse", "held"),
    *("damaged", "doomed", "short", "locked", "heat", "garble", "mute", "slow link", "no name"),
    *("babble", "babble", "babble", "numb"),
)
"""What happens to devices of drafters, and to their links."""
BITS_KINDS = ("poor",)
"""What may be so where devices have different arithmetics: one comes back without its best."""
START_KINDS = ("absent", "narrow")
"""What may be so when the head begins."""
KINDS = (
    *("crash", "restart", "stop", "slow", "stuck", "sever", "break"),
    *("head stops", "clock", "refuse", "drafter"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something goes wrong at `at_s` and is over after `for_s`; `where` is a device, or two places of which
    one may be the head."""

    kind: str
    at_s: float
    for_s: float
    where: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind} {' - '.join(self.where)} for {self.for_s:.2f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One request: its first question, how many more follow, and when it is cancelled or forgotten (None:
    never)."""

    first: Submit
    at_s: float
    turns: int
    cancel_s: float | None
    forget_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that a run depends on. With fewer than `devices_min` devices the model does not fit, more
    than `devices_max` are not planned with. A device that `arithmetics` does not name has the plain one."""

    seed: int
    devices: tuple[str, ...]
    spec: DeviceSpec
    links: tuple[LinkSpec, ...]
    late_s: float
    load_s: float
    layer_count: int
    devices_min: int
    devices_max: int
    queued_max: int
    spare_layers: int
    messages_max: int
    frames_max: int
    context: int
    bounds: Bounds
    membership_timeouts: MembershipTimeouts
    forming_timeouts: FormingTimeouts
    method: Callable[[], Method]
    language: HashLanguage
    cache_slots: Mapping[str, int]
    draft_slots: int
    qualities: tuple[float, ...]
    levels: tuple[int, ...]
    captures: tuple[int, ...]
    drafting: tuple[Curve, ...]
    places: tuple[Place | None, ...]
    dialogues: tuple[Dialogue, ...]
    faults: tuple[Fault, ...]
    arithmetics: Mapping[str, tuple[str, ...]]
    sliding_window: SlidingWindow | None
    prefix_block: int


def draw(seed: int) -> Schedule:
    """The schedule of a seed; most have a few faults, some have many at once."""
    rng = random.Random(seed)
    devices = tuple(
        f"pi-{index}" for index in range(rng.choices([1, 2, 3, 4, 6], weights=[1, 3, 4, 3, 1])[0])
    )
    context = rng.choice([16, 40, 90])
    language = HashLanguage(rng.choice([7, 24]), seed, rng.choice([0.7, 2.0, 4.0]))
    flights_max = rng.choice([None, None, 1, 2])
    name, qualities = rng.choice(METHODS), [rng.choice([0.0, 0.6, 0.95])]
    if name == "ar" and rng.random() < 0.5:
        qualities = []
    elif make_method(name).drafters_max > 1 and rng.random() < 0.5:
        qualities += [rng.choice([0.0, 0.6, 0.95]) for _ in range(rng.choice([1, 1, 2, 3]))]
    shape: dict[str, Any] = {
        "segment_nodes": rng.choice([1, 4, 16]),
        "width": rng.choice([1, 3]),
        "window": rng.choice([None, 1, 2]),
    }
    sizes = (
        {}
        if name == "ar"
        else {"nodes": rng.choice([4, 16]), "depth": rng.choice([1, 3]), "width": rng.choice([1, 3])}
    )
    has_features = rng.random() < 0.15
    dialogues = tuple(
        _dialogue(rng, request, language, context)
        for request in range(rng.choices([1, 2, 3], weights=[6, 3, 1])[0])
    )
    room = random.Random(f"room {seed}")
    heat = random.Random(f"heat {seed}")
    later = random.Random(f"later {seed}")
    bits = random.Random(f"bits {seed}")
    arithmetics = _arithmetics(bits, devices)
    bits.random()  # drawn for nothing, so that a seed keeps the faults that it had
    narrow = random.Random(f"narrow {seed}")
    narrows = _narrow_ways(narrow, devices)
    devices_min = room.randint(1, len(devices)) if room.random() < 0.2 else 1
    wanted = random.Random(~seed)
    dialogues = tuple(
        replace(each, first=replace(each.first, top_logprobs=wanted.choice([-1, -1, 0, 3, 20])))
        for each in dialogues
    )
    made = Schedule(
        seed=seed,
        devices=devices,
        spec=DeviceSpec(
            curve=Curve(base_s=rng.choice([0.002, 0.02, 0.1]), row_s=rng.choice([0.0, 0.002])),
            layers=rng.choice([1, 3]),
        ),
        links=tuple(
            LinkSpec(delay_s=rng.choice([0.0, 0.002, 0.05]), jitter_s=rng.choice([0.0, 0.01, 0.2]))
            for _ in range(3)
        ),
        late_s=rng.choice([0.01, 0.5, 3.0]),
        load_s=rng.choice([0.01, 0.2]),
        layer_count=rng.choice([len(devices), 8, 12]),
        devices_min=devices_min,
        devices_max=room.randint(devices_min, len(devices)) if room.random() < 0.25 else len(devices),
        queued_max=flights_max or 64,
        spare_layers=random.Random(f"spare {seed}").choice([0, 1, 12]),
        messages_max=random.Random(f"turn {seed}").choice([1, 2, limits.MESSAGES_PER_TURN_MAX]),
        frames_max=later.choice([0, 2, 1000]),
        forming_timeouts=replace(
            FORMING_TIMEOUTS,
            wait_s=later.choice([2.0, 4.0]) if later.random() < 0.05 else None,
            changed_s=heat.choice([0.2, 1.0, 60.0]),
        ),
        context=context,
        bounds=Bounds(flights_max=flights_max, prefill_chunk=rng.choice([1, 4, 128])),
        membership_timeouts=MembershipTimeouts(
            silent_s=rng.choice([1.2, SILENT_S]),
            loading_silent_s=4.0,
            loading_s=5.0,
            stuck_s=rng.choice([4.0, 6.0]),
            probe_s=rng.choice([0.5, 1.0]),
            back_s=rng.choice([0.5, 2.0]),
            forgive_s=rng.choice([5.0, 60.0]),
            worth=rng.choice([0.0, 3.0, 10.0]),
            moment_s=room.choice([0.3, 1.0, 10.0]),
            again_s=heat.choice([1.0, 600.0]),
        ),
        method=partial(
            make_method,
            name,
            **(_options(rng, name, len(qualities)) | shape if "window" in options_of(name) else sizes),
        ),
        language=language,
        cache_slots={
            device: rng.choice([1, 1, 2, 64]) * (context + limits.TREE_NODES_MAX) for device in devices
        },
        draft_slots=rng.choice([0, 1, 2, 64]) * (context + limits.DRAFT_NODES_MAX),
        qualities=tuple(qualities),
        levels=(0, *(rng.choice([0, 0, 1, 2]) for _ in qualities[1:]))[: len(qualities)],
        captures=(),
        drafting=tuple(Curve(base_s=rng.choice([0.0, 0.003, 0.05])) for _ in qualities),
        places=(None,) * len(qualities),
        dialogues=dialogues,
        faults=tuple(
            sorted(
                (
                    *_faults(
                        rng,
                        devices,
                        0 if has_features else len(qualities),
                        [dialogue.at_s for dialogue in dialogues],
                    ),
                    *_more_faults(random.Random(f"more {seed}"), devices),
                    *_later_faults(later, devices, [dialogue.at_s for dialogue in dialogues]),
                    *_start_faults(random.Random(f"start {seed}"), devices),
                    *_bits_faults(bits, arithmetics, [dialogue.at_s for dialogue in dialogues]),
                    *narrows,
                ),
                key=lambda fault: fault.at_s,
            )
        ),
        arithmetics=arithmetics,
        sliding_window=draw_window(random.Random(f"window {seed}")),
        prefix_block=random.Random(f"block {seed}").choice([0, 1, 2, 5, 16]),
    )
    made = replace(made, dialogues=_sharing(random.Random(f"share {seed}"), dialogues, language, context))
    first = narrow.choice([1, 2] if narrows else [1, 2, None])
    if narrows:  # where four rows wait for each other a word takes nearly a second
        made = replace(made, membership_timeouts=replace(made.membership_timeouts, silent_s=SILENT_S))
    hold_s = HOLD_SHARE * made.membership_timeouts.silent_s
    made = replace(made, bounds=replace(made.bounds, prefill_first=first, hold_s=hold_s))
    if not has_features:
        return _with_places(made)
    return replace(made, captures=_captures(random.Random(f"captures {seed}"), made.layer_count))


def _sharing(
    rng: random.Random, dialogues: tuple[Dialogue, ...], language: HashLanguage, context: int
) -> tuple[Dialogue, ...]:
    """The same, and at times more of them, which begin as others do: what a seed had stays as it was."""
    more: list[Dialogue] = []
    for _ in range(rng.choice([0, 0, 1, 3])):
        dialogue = _dialogue(rng, len(dialogues) + len(more), language, context)
        text = rng.choice([*dialogues, *more]).first.prompt
        prompt = (*text[: rng.choice([len(text), rng.randint(1, len(text))])], *dialogue.first.prompt)
        more.append(
            replace(dialogue, first=replace(dialogue.first, prompt=prompt[: context - 1], answered=()))
        )
    return (*dialogues, *more)


def _with_places(made: Schedule) -> Schedule:
    """The same with some of its drafters on devices of their own, those that are lost among them, and with
    what happens to these."""
    rng = random.Random(f"drafters {made.seed}")
    lost = {fault.where[0] for fault in made.faults if fault.kind == "drafter"}
    share, handover_s = rng.choice([0.0, 0.0, 0.6]), rng.choice([0.0, 0.01, 0.3, 1.0])
    names = [drafter_device(number) for number in range(len(made.qualities))]
    is_away = [name in lost or rng.random() < share for name in names]
    places = tuple(
        Place(device=name, handover_s=handover_s) if away else None
        for name, away in zip(names, is_away, strict=True)
    )
    there = [place.device for place in places if place is not None]
    found = list(made.faults)
    for _ in range(rng.choice([0, 1, 1, 2, 4]) if there else 0):
        kind, device = rng.choice(DRAFTER_KINDS), rng.choice(there)
        is_link = kind in ("sever", "break", "garble", "mute", "slow link", "no name")
        ends = [HEAD, device] if kind == "no name" else rng.sample([HEAD, device], 2)
        at_s = rng.choice([0.0, rng.choice(made.dialogues).at_s + rng.uniform(0, 2), rng.uniform(0, HEAL_S)])
        for_s = rng.choice([0.3, 2.0, HEAL_S])
        where = tuple(ends) if is_link else (device,)
        found.append(Fault(kind=kind, at_s=min(at_s, HEAL_S), for_s=for_s, where=where))
        if kind in ("damaged", "short", "doomed", "locked"):  # they show when it is loaded, or dialled
            found.append(Fault(kind="restart", at_s=min(at_s + 0.3, HEAL_S), for_s=0.0, where=(device,)))
    return replace(
        made,
        places=places,
        drafting=tuple(
            curve if place is None else Curve(base_s=rng.choice([curve.base_s, 0.1, 0.4]))
            for curve, place in zip(made.drafting, places, strict=True)
        ),
        faults=tuple(sorted(found, key=lambda fault: fault.at_s)),
    )


def drafter_device(number: int) -> str:
    """What the device of a drafter is called, where it has one."""
    return f"draft-{number}"


def _options(rng: random.Random, name: str, drafters: int) -> dict[str, Any]:
    """How a method with several drafters uses them."""
    if name == "cosine":
        return {
            "routing": rng.random() < 0.7,
            "fusion": rng.random() < 0.7,
            "count": rng.choice([None, None, 1, 2]),
        }
    if name == "specrouter" and rng.random() < 0.4:
        return {"chain": tuple(drafter for drafter in range(drafters) if rng.random() < 0.6)}
    return {}


def _dialogue(rng: random.Random, request: int, language: HashLanguage, context: int) -> Dialogue:
    prompt = tuple(
        rng.randrange(language.vocabulary_size)
        for _ in range(rng.randint(1, min(context - 1, rng.choice([4, 12, 60]))))
    )
    submit = Submit(
        request=request,
        prompt=prompt,
        new_tokens_max=rng.choice([1, 8, 20, 40]),
        sampling=structs.replace(rng.choice(SAMPLINGS), seed=rng.randrange(1 << 40)),
        stop_ids=frozenset(),
    )
    penalties = random.Random(f"penalties {submit.sampling.seed}")
    submit = replace(submit, sampling=penalised(penalties, submit.sampling))
    plain = partial(
        plain_answer, language, prompt, submit.sampling, new_tokens_max=submit.new_tokens_max, context=context
    )
    if rng.random() < 0.2:
        whole, _ = plain()
        submit = replace(submit, stop_ids=frozenset(rng.choices(whole, k=1)))
    at_s = rng.choice([0.0, 0.5, rng.uniform(0, HEAL_S / 2)])
    if rng.random() < ANSWERED_SHARE:
        whole, _ = plain(stop_ids=submit.stop_ids)
        submit = replace(submit, answered=tuple(whole[: rng.randint(0, len(whole))]))
    return Dialogue(
        first=submit,
        at_s=at_s,
        turns=rng.choice([0, 0, 1, 2]),
        cancel_s=at_s + rng.uniform(0, 6) if rng.random() < 0.15 else None,
        forget_s=at_s + rng.uniform(0, 6) if rng.random() < 0.1 else None,
    )


def _faults(
    rng: random.Random, devices: tuple[str, ...], drafters: int, asked_s: list[float]
) -> tuple[Fault, ...]:
    """Faults of devices and of so many drafters. Each kind has its own chance in a seed, so that many seeds
    have one kind alone and some have all; most fall into an answer."""
    possible = KINDS if drafters else tuple(kind for kind in KINDS if kind != "drafter")
    kinds = [kind for kind in possible if rng.random() < rng.choice([0.15, 0.6])] or [rng.choice(possible)]
    found = []
    for _ in range(rng.choices([1, 2, 4, 8], weights=[4, 4, 2, 1])[0]):
        kind = rng.choice(kinds)
        pair = rng.sample([HEAD, *devices], 2)
        if kind == "drafter":
            where: tuple[str, ...] = (drafter_device(rng.randrange(drafters)),)
        else:
            at_head = kind in ("head stops", "clock")
            is_link = kind in ("sever", "break")
            where = (HEAD,) if at_head else tuple(pair) if is_link else (rng.choice(devices),)
        last_s = rng.choice([0.0, 0.1, 1.0, 3.0, HEAL_S]) * rng.uniform(0.5, 1.5)
        soon_s, later_s = (rng.choice(asked_s) + rng.uniform(0, most_s) for most_s in (1, 3))
        at_s = rng.choice([soon_s, later_s, rng.uniform(0, HEAL_S)])
        found.append(Fault(kind=kind, at_s=min(at_s, HEAL_S), for_s=last_s, where=where))
    return tuple(found)


def _more_faults(rng: random.Random, devices: tuple[str, ...]) -> tuple[Fault, ...]:
    """In a fifth of the seeds: a device that another head takes, or that cannot send to a place what is
    longer than a Commit."""
    if rng.random() > 0.2:
        return ()
    found = []
    for _ in range(rng.choice([1, 1, 2])):
        kind = rng.choice(MORE_KINDS)
        device = rng.choice(devices)
        others = [each for each in devices if each != device] or [HEAD]
        where = (device,) if kind == "held" else (device, *rng.sample(others, rng.choice([1, len(others)])))
        at_s, for_s = rng.uniform(0, HEAL_S / 2), rng.choice([1.0, 3.0, HEAL_S])
        found.append(Fault(kind=kind, at_s=at_s, for_s=for_s, where=where))
    return tuple(found)


def _later_faults(rng: random.Random, devices: tuple[str, ...], asked_s: list[float]) -> tuple[Fault, ...]:
    """In a third of the seeds: a device that cannot do what it should, a link that is slow, dead one way or
    noisy, a name that is lost."""
    if rng.random() > 0.35:
        return ()
    found = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind = rng.choice(LATER_KINDS)
        is_link = kind in ("garble", "mute", "slow link", "no name")
        where = tuple(rng.sample([HEAD, *devices], 2)) if is_link else (rng.choice(devices),)
        at_s = rng.choice([0.0, rng.choice(asked_s) + rng.uniform(0, 1), rng.uniform(0, HEAL_S)])
        for_s = rng.choice([0.5, 2.0, HEAL_S])
        found.append(Fault(kind=kind, at_s=min(at_s, HEAL_S), for_s=for_s, where=where))
        shows_when_loaded = kind in ("damaged", "short", "doomed")
        if shows_when_loaded and rng.random() < 0.7:
            found.append(Fault(kind="restart", at_s=min(at_s + 0.3, HEAL_S), for_s=0.0, where=where))
    return tuple(found)


def _start_faults(rng: random.Random, devices: tuple[str, ...]) -> tuple[Fault, ...]:
    """In a fifth of the seeds: a device is down and has no name for a while, or is not there at the start."""
    kind = rng.choices(["", "no name", "absent"], weights=[8, 1, 1])[0]
    if kind == "absent":
        return _absences(rng, devices)
    if not kind:
        return ()
    at_s, for_s, device = rng.uniform(0, HEAL_S / 2), rng.choice([1.0, 3.0, HEAL_S]), rng.choice(devices)
    return (
        Fault(kind="no name", at_s=at_s, for_s=for_s, where=(HEAD, device)),
        Fault(kind="crash", at_s=at_s, for_s=0.3 * for_s, where=(device,)),
    )


def _captures(rng: random.Random, layer_count: int) -> tuple[int, ...]:
    """Hidden states of one to three stages or of fewer, the output among them or not."""
    return tuple(sorted(rng.sample(range(layer_count + 1), rng.randint(1, min(3, layer_count)))))


def _arithmetics(rng: random.Random, devices: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """In half of the seeds devices differ in what they have, and in what is best; one they all have."""
    if rng.random() > 0.5:
        return {}
    strong, weak = [("fast", PLAIN), ("fast", "safe", PLAIN)], [(PLAIN,), (PLAIN, "safe"), ("safe", PLAIN)]
    return {device: rng.choice(strong if rng.random() < 0.6 else weak) for device in devices}


def _bits_faults(
    rng: random.Random,
    arithmetics: Mapping[str, tuple[str, ...]],
    asked_s: list[float],
) -> tuple[Fault, ...]:
    """Where devices differ, in most seeds: one, or all, are started again without the best that they have."""
    several = [device for device, names in arithmetics.items() if len(names) > 1]
    if not several or rng.random() > 0.8:
        return ()
    at_s, for_s = rng.choice([0.0, rng.choice(asked_s) + rng.uniform(0, 1)]), rng.choice([1.0, 3.0, HEAL_S])
    where = several if rng.random() < 0.4 else [rng.choice(several)]
    return tuple(Fault(kind="poor", at_s=min(at_s, HEAL_S), for_s=for_s, where=(device,)) for device in where)


def _narrow_ways(rng: random.Random, devices: tuple[str, ...]) -> tuple[Fault, ...]:
    """In a tenth of the seeds: the network is slow where some devices are, from the beginning on."""
    if rng.random() > 0.1:
        return ()
    found = rng.sample(devices, rng.choice([1, len(devices)]))
    return tuple(Fault(kind="narrow", at_s=0.0, for_s=HEAL_S, where=(device,)) for device in found)


def _absences(rng: random.Random, devices: tuple[str, ...]) -> tuple[Fault, ...]:
    """Some devices are absent at first; of some the power fails again as soon as they have come up."""
    found = []
    for device in rng.sample(devices, rng.randint(1, max(1, len(devices) - 1))):
        for_s = rng.uniform(0, HEAL_S / 2)
        found.append(Fault(kind="absent", at_s=0.0, for_s=for_s, where=(device,)))
        if rng.random() < 0.4:
            at_s = for_s + rng.uniform(0, 3)
            found.append(Fault(kind="crash", at_s=at_s, for_s=rng.uniform(0, 2), where=(device,)))
    return tuple(found)
