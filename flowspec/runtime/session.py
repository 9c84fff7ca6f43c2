"""A model on a cluster, ready to answer: what the commands stand on.

Resolves the model, starts local daemons if asked to, loads the drafters or places them, connects a `Head`,
and turns prompts into answers with figures. One cluster can be held by one session after another, each with
its own method and drafters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowspec.core.cluster.forming import Start
from flowspec.core.head.events import Submit
from flowspec.core.head.prompt_chunks import SlotTime
from flowspec.core.methods import make_method
from flowspec.core.protocol.limits import TOP_LOGPROBS_MAX
from flowspec.core.protocol.messages import Sampling
from flowspec.core.protocol.model_spec import window_for
from flowspec.core.protocol.precision import CACHE_AUTO, FILED
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.draft.base import Drafter
from flowspec.draft.layouts import has_mtp
from flowspec.draft.lookup import LookUpDrafter
from flowspec.draft.registry import FALLBACK, NONE, WITHOUT_TENSORS
from flowspec.errors import InputError, first_line
from flowspec.model.engines import prepare, shown_to
from flowspec.model.families import check_family
from flowspec.model.files import ModelFiles, canonical_name
from flowspec.model.spec import spec_of
from flowspec.plan.advice import ModelDoesNotFitError
from flowspec.plan.placement import ClusterPlan
from flowspec.plan.shape import shape_of
from flowspec.plan.sites import PlanRequest
from flowspec.plan.timing import slowest
from flowspec.runtime.cluster import Device, check_local, pick_context, split_layers, stage_devices
from flowspec.runtime.cluster_file import read_cluster, read_drafters
from flowspec.runtime.decoding import Decoding
from flowspec.runtime.drafters import PlacedDrafter
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.head import Head, OnEvent
from flowspec.runtime.learnt import LearntFile
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.pipeline_connections import Progress, told_of
from flowspec.runtime.pipelines import Recovery
from flowspec.runtime.placing import assign_devices, captures_of, open_drafters, own_devices, use_one_thread
from flowspec.runtime.plan_inputs import drafter_inputs, model_weights, typical_context
from flowspec.runtime.planning import Chosen, Replanner, choose, compare
from flowspec.runtime.security.cluster_keys import cluster_keys
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.survey import Surveyor, refuse_silent
from flowspec.runtime.token_stream import Timing, TokenStream, timed
from flowspec.wire.codec import DTYPE_BYTES

log = logging.getLogger("flowspec.head")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where a model shall run: a cluster file, or `local` daemons on this machine, and what these emulate.

    With `all_devices` the planner leaves none of the cluster file's out.
    """

    model: str
    dtype: str | None = None
    cache: str = CACHE_AUTO
    cluster: Path | None = None
    local: int = 4
    layers: tuple[int, ...] | None = None
    all_devices: bool = False
    context: int | None = None
    log_level: str = "WARNING"
    log_file: str | None = None
    emulation: Emulation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryOptions:
    """What happens when devices are lost: whom to tell, in a line, and how long to wait for some to come back
    (None: for ever).

    An `arithmetic` that an earlier session began with is kept.
    """

    on_note: Callable[[str], None]
    wait_s: float | None = None
    arithmetic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    new_tokens_max: int
    stop_ids: frozenset[int]


class Session:
    """One connected model. Use `open_session`."""

    def __init__(
        self,
        files: ModelFiles,
        config: Any,
        head: Head,
        decoding: Decoding,
        chosen: Chosen | None = None,
        drafters: Sequence[str] = (),
    ) -> None:
        self.drafters = tuple(drafters)
        self.files = files
        self.config = config
        self.spec = spec_of(config)
        self.head = head
        self.decoding = decoding
        self.chosen = chosen

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        *,
        request: int,
        stop_rule: Any = None,
        answered: Sequence[int] = (),
        top_logprobs: int = -1,
    ) -> TokenStream:
        """Starts an answer, or goes on behind what is `answered`; raises `InputError` for token ids that the
        model does not have, and where no token may be drawn.

        With `top_logprobs` from 0 on its tokens come with their log-probabilities, and those of so many of
        the likeliest.
        """
        if not -1 <= top_logprobs <= TOP_LOGPROBS_MAX:
            raise InputError(f"top_logprobs: expected -1 (none) to {TOP_LOGPROBS_MAX}, got {top_logprobs}")
        size = self.spec.vocabulary
        biased = [token for token, _ in sampling.logit_bias]
        for name, tokens in (("prompt token ids", (*prompt, *answered)), ("logit_bias token ids", biased)):
            if wrong := [token for token in tokens if not 0 <= token < size]:
                raise InputError(f"{name}: expected 0 to {size - 1}, got {wrong[0]}")
        if sampling.grammar is not None and (trouble := self.head.grammar_trouble()):
            raise InputError(trouble)
        if len([token for token in sampling.suppress_tokens if token < size]) == size:
            raise InputError(
                f"suppress_tokens: expected a token that may be drawn, got all {size} of the model"
            )
        return self.head.submit(
            Submit(
                request=request,
                prompt=tuple(prompt),
                new_tokens_max=limits.new_tokens_max,
                sampling=sampling,
                stop_ids=limits.stop_ids,
                stop_rule=stop_rule,
                answered=tuple(answered),
                top_logprobs=top_logprobs,
            )
        )

    def ask(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limits: Limits,
        tell: Callable[[int], object] = lambda count: None,
    ) -> tuple[TokenStream, Timing]:
        """A whole answer, in a conversation of its own that is forgotten afterwards; its `end` is set. `tell`
        hears how many tokens come."""
        request = self.head.new_request()
        timing = Timing()
        answer = self.submit(prompt, sampling, limits, request=request)
        for tokens in timed(answer, timing):
            tell(len(tokens))
        self.head.forget(request)
        return answer, timing

    @property
    def drafter(self) -> str:
        """The drafters' names, as `--drafter` takes them."""
        return ", ".join(self.drafters) or NONE

    def stages_report(self) -> list[dict[str, Any]]:
        return [
            {
                "name": stage.plan.name,
                "layers": [stage.plan.first, stage.plan.end],
                "address": stage.plan.address,
                "pid": stage.welcome.pid if stage.welcome else None,
                "weight_bytes": stage.ready.weight_bytes if stage.ready else 0,
                "memory_bytes": stage.ready.memory_bytes if stage.ready else 0,
                "received_bytes": stage.ready.received_bytes if stage.ready else 0,
            }
            for stage in self.head.stages
        ]

    def drafters_report(self) -> list[dict[str, Any]]:
        """Where each model beside the target runs, as `--json` shows it; `device` is `head` for those in this
        process."""
        return [
            {"name": name, **drafter.report()}
            for name, drafter in zip(self.drafters, self.head.drafters, strict=True)
        ]

    def expertise_report(self) -> list[dict[str, Any]]:
        """What each model beside the target was worth so far, by what prompts are about, as `--json` shows
        it.

        `worth` is 0 to 1 by name, `best` the name of the one worth most; `example` are the last token ids of
        one of the prompts.
        """
        expertise, domains = self.head.expertise, self.head.domains
        if expertise is None or domains is None:
            return []
        found = []
        for number, domain in enumerate(list(expertise.domains)):
            worth = {
                name: round(value, 4)
                for name, value in zip(self.drafters, expertise.in_domain(domain), strict=True)
            }
            found.append(
                {
                    "answers": domain.answers,
                    "best": max(worth, key=worth.__getitem__),
                    "worth": worth,
                    "example": list(domains.examples[number]),
                }
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCluster:
    """Devices that are there, and what they are to run; held by one session at a time.

    `chosen` tells how the plan was made; local processes, which are alike, have an even split and none.
    `devices` may run stages; `drafter_devices` run drafters, those of a cluster file (`drafters` names these,
    and those that it has at the head) each its own. With a `surveyor` answers may begin without devices,
    which it asks later."""

    files: ModelFiles
    config: Any
    plan: ClusterPlan
    is_local: bool
    emulation: Emulation | None = None
    chosen: Chosen | None = None
    keys: Keyring | None = None
    devices: tuple[Device, ...] = ()
    drafters: tuple[str, ...] = ()
    drafter_devices: tuple[Device, ...] = ()
    surveyor: Surveyor | None = None

    @contextlib.contextmanager
    def session(
        self,
        decoding: Decoding,
        progress: Progress,
        on_event: OnEvent | None = None,
        recovery_options: RecoveryOptions | None = None,
    ) -> Iterator[Session]:
        """Loads the drafters that run here and takes hold of the devices; they are let go of at the end and
        keep their layers.

        With a `recovery_options` answers go on when devices are lost.
        """
        decoding.check(self.files.model, self.drafters)
        names = decoding.drafters_for(self.files.model, self.drafters)
        placed = assign_devices(names, self.drafter_devices)
        if self.is_local and any(name not in WITHOUT_TENSORS and name not in placed for name in names):
            use_one_thread()
        try:
            with _shown_kernels(progress):
                drafters = open_drafters(names, self.files, self.plan, decoding, placed)
        except InputError as error:
            if not decoding.is_default:
                raise
            _tell_left_out(names, first_line(error), recovery_options)
            names = (FALLBACK,)
            drafters = open_drafters(names, self.files, self.plan, decoding, {})
        method = make_method(decoding.method, **decoding.method_options(names))
        plan = replace(self.plan, captures=captures_of(drafters))
        if plan.tokens is not None:
            _give_grammars(drafters, plan.tokens)
        recovery = None
        if recovery_options is not None and self.emulation is None:  # a declared device has no spare
            used = {stage.name for stage in plan.stages}
            planner = Replanner(plan, self.devices, self.chosen, self.surveyor)
            recovery = Recovery(
                replan=planner.plan_of,
                rate=planner.rate if planner.is_planned else None,
                spares={device.name: device.address for device in self.devices if device.name not in used},
                on_note=recovery_options.on_note,
                wait_s=0.0 if self.is_local else recovery_options.wait_s,  # processes here do not come back
                start=Start.WHOLE if self.surveyor is None else Start.SHORT,
                absent={} if self.chosen is None else self.chosen.survey.absent,
                in_use=() if self.chosen is None else tuple(self.chosen.survey.in_use),
                survey=planner.survey,
                arithmetic=recovery_options.arithmetic,
            )
        with Head(
            plan,
            progress,
            method=method,
            drafters=drafters,
            levels=decoding.levels(names),
            emulation=self.emulation,
            recovery=recovery,
            on_event=on_event,
            keys=self.keys,
            slot_s=self._slot_s(),
            prefix_caching=decoding.prefix_caching,
            learnt=LearntFile(plan, method.name, names) if decoding.keep_learnt and names else None,
        ) as head:
            yield Session(self.files, self.config, head, decoding, self.chosen, names)

    def _slot_s(self) -> SlotTime | None:
        """What is foretold of the stages; None where nobody knows their devices."""
        if self.emulation is not None:
            return slowest([device.layers for device in self.emulation.devices])
        return None if self.chosen is None else slowest(self.chosen.curves())


@contextlib.contextmanager
def open_session(
    options: ClusterOptions,
    decoding: Decoding,
    progress: Progress,
    check: Callable[[ModelFiles], None] = lambda files: None,
    meanwhile: Callable[[ModelFiles], None] = lambda files: None,
    recovery_options: RecoveryOptions | None = None,
    tokens: Callable[[ModelFiles, Any], TokenBytes | None] = lambda files, config: None,
) -> Iterator[Session]:
    """A connected session; daemons that it starts are stopped at its end, whatever happens. See
    `open_cluster`; `tokens` are those of the model, where answers may be bound by grammars."""
    decoding.check(options.model, () if options.cluster is None else tuple(read_drafters(options.cluster)))
    needs_all = recovery_options is None
    with contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(
                open_cluster(options, check, meanwhile, decoding, progress, needs_all=needs_all)
            )
        except ModelDoesNotFitError:
            if not decoding.is_default:
                raise
            _tell_left_out(decoding.drafters, "with it the model does not fit", recovery_options)
            decoding = replace(decoding, drafters=(FALLBACK,), is_default=False)
            cluster = stack.enter_context(
                open_cluster(options, check, meanwhile, decoding, progress, needs_all=needs_all)
            )
        plan = replace(cluster.plan, tokens=tokens(cluster.files, cluster.config))
        cluster = replace(cluster, plan=plan)
        yield stack.enter_context(cluster.session(decoding, progress, recovery_options=recovery_options))


def _give_grammars(drafters: Sequence[Drafter | PlacedDrafter], tokens: TokenBytes) -> None:
    """Has drafters that are here propose what grammars allow."""
    for each in drafters:
        if isinstance(each, LookUpDrafter):
            each.take_tokens(tokens)
    computing = [each for each in drafters if not isinstance(each, PlacedDrafter | LookUpDrafter)]
    if not computing:
        return
    from flowspec.draft.cached import TreeCachedDrafter
    from flowspec.model.grammar import GrammarVocabulary

    grammars = GrammarVocabulary(tokens)
    for drafter in computing:
        if isinstance(drafter, TreeCachedDrafter):
            drafter.take_grammars(grammars)


def _tell_left_out(drafters: Sequence[str], why: str, options: RecoveryOptions | None) -> None:
    """That look-ups stand in for a model that nobody named."""
    told = f"drafter {', '.join(name for name in drafters if name != FALLBACK)} is left out: {why}"
    (log.warning if options is None else options.on_note)(told)


@contextlib.contextmanager
def open_cluster(
    options: ClusterOptions,
    check: Callable[[ModelFiles], None] = lambda files: None,
    meanwhile: Callable[[ModelFiles], None] = lambda files: None,
    decoding: Decoding | None = None,
    progress: Progress = lambda text, share: None,
    *,
    needs_all: bool = True,
) -> Iterator[OpenCluster]:
    """The devices, local ones started; those are stopped at the end.

    Devices of a cluster file that do not answer are an error, unless not all are needed and the planner
    shares out the layers.

    What can be wrong with the model, the cluster file or the split is found before anything is started;
    `check` may refuse the model, too. `meanwhile` runs while local daemons come up: for slow imports of the
    caller. The devices of a cluster file are asked, and the planner decides what they run (for `decoding`) or
    tells of a better split than the user's; raises `ModelDoesNotFitError` for a model that does not fit them.
    Several drafters of `decoding` get local daemons of their own, or the devices that the cluster file has
    for them.
    """
    emulation = options.emulation
    assert emulation is None or (options.cluster is None and len(emulation.devices) == options.local), (
        "a device for each local stage"
    )
    files = ModelFiles(options.model)
    raw = files.raw_config()
    check_family(raw, files.model)
    files.check_weights()
    check(files)
    decoding = decoding or Decoding()
    if options.cluster is None:
        with _local_cluster(options, files, raw, decoding, meanwhile, progress) as cluster:
            yield cluster
    else:
        cluster = _listed_cluster(
            options, options.cluster, files, raw, decoding, progress, needs_all=needs_all
        )
        meanwhile(files)
        yield cluster


def _shown_kernels(progress: Progress) -> contextlib.AbstractContextManager[None]:
    """While it lasts, kernels that are compiled or tried here are told of, as those of devices are."""
    return shown_to(lambda doing, share: progress(told_of("this machine", doing), share))


@contextlib.contextmanager
def _local_cluster(
    options: ClusterOptions,
    files: ModelFiles,
    raw: dict[str, Any],
    decoding: Decoding,
    meanwhile: Callable[[ModelFiles], None],
    progress: Progress,
) -> Iterator[OpenCluster]:
    """Daemons on this machine: those of the stages, then those of drafters."""
    emulation = options.emulation
    extra = own_devices(decoding.drafters_for(files.model)) if emulation is None else 0
    names = [f"local-{index}" for index in range(options.local + extra)]
    if options.layers is None:
        check_local(options.local, raw["num_hidden_layers"])
    stages = split_layers(
        [Device(name=name, address="") for name in names[: options.local]],
        raw["num_hidden_layers"],
        options.layers,
    )
    _check_context(options, raw)
    with _shown_kernels(progress):
        prepare()
    with LocalCluster(
        len(names),
        log_level=options.log_level,
        log_file=options.log_file,
        devices=() if emulation is None else emulation.devices,
    ) as local:
        config = files.config()
        plan = unplaced_plan(options, files, config)
        meanwhile(files)
        addresses = {daemon.name: daemon.address for daemon in local.wait()}
        devices = tuple(Device(name=name, address=addresses[name]) for name in names)
        yield OpenCluster(
            files=files,
            config=config,
            plan=replace(
                plan, stages=tuple(replace(stage, address=addresses[stage.name]) for stage in stages)
            ),
            is_local=True,
            emulation=emulation,
            devices=devices[: options.local],
            drafter_devices=devices[options.local :],
        )


def _listed_cluster(
    options: ClusterOptions,
    path: Path,
    files: ModelFiles,
    raw: dict[str, Any],
    decoding: Decoding,
    progress: Progress,
    *,
    needs_all: bool,
) -> OpenCluster:
    """The devices of a cluster file, asked, and what they run by the user's split or the planner's."""
    every = read_cluster(path)
    devices = stage_devices(every)
    is_given = options.layers is not None or devices[0].layers is not None
    given = split_layers(devices, raw["num_hidden_layers"], options.layers) if is_given else []
    _check_context(options, raw)
    keys = cluster_keys(path, every)
    hint = ""
    if is_given and not needs_all:
        where = "leave --layers out" if options.layers is not None else f"take the layers out of {path}"
        hint = f"given layers are for all devices: {where} to begin without it"
    needs_all = needs_all or is_given
    refuse_silent(devices, keys, needs_all=needs_all, hint=hint)
    config = files.config()
    plan = replace(unplaced_plan(options, files, config), stages=tuple(given))
    surveyor = Surveyor(devices=tuple(devices), cluster=path, precision=plan.dtype, keys=keys)
    chosen = choose_for(
        options, files, surveyor, plan, decoding, needs_all=needs_all, is_run=True, tell=progress
    )
    plan = replace(plan, stages=tuple(chosen.stages(devices)))
    return OpenCluster(
        files=files,
        config=config,
        plan=plan,
        is_local=False,
        chosen=chosen,
        keys=keys,
        devices=_placed(devices, plan),
        drafters=tuple(read_drafters(path)),
        drafter_devices=tuple(device for device in every if device.drafter is not None),
        surveyor=None if needs_all else surveyor,
    )


def _check_context(options: ClusterOptions, raw: dict[str, Any]) -> None:
    """Refuses a context that the model does not have, as far as config.json tells, before anything is
    started."""
    if "max_position_embeddings" in raw:
        pick_context(options.context, raw["max_position_embeddings"])


def unplaced_plan(options: ClusterOptions, files: ModelFiles, config: Any) -> ClusterPlan:
    """What is to be run, by no device yet. Raises `InputError` for a model that is not supported."""
    spec = files.spec
    context = pick_context(options.context, spec.context_max)
    return ClusterPlan(
        model=canonical_name(options.model),
        fingerprint=files.fingerprint(),
        dtype=pick_dtype(options.dtype, files, config),
        cache=options.cache,
        context=context,
        stages=(),
        vocabulary=spec.vocabulary,
        hidden_size=spec.hidden,
        carried=spec.carried_most,
        sliding_window=window_for(spec.windows, context, has_states=any(spec.states)),
        spec=spec,
    )


def choose_for(
    options: ClusterOptions,
    files: ModelFiles,
    surveyor: Surveyor,
    plan: ClusterPlan,
    decoding: Decoding,
    *,
    needs_all: bool = True,
    is_run: bool = False,
    tell: Progress = lambda text, share: None,
) -> Chosen:
    """What the devices of a cluster file run, where `plan` has no stages; else how those compare. Where it
    `is_run` at once, devices that others use cannot be had."""
    config = files.config()
    shape = shape_of(files.spec, files.model, files.filed_bytes, has_mtp=has_mtp(files, config))
    placed = read_drafters(surveyor.cluster)
    names = decoding.drafters_for(files.model, tuple(placed))
    drafter = drafter_inputs(names, placed, shape, may_fetch=decoding.may_fetch)
    found = surveyor.survey(
        head_drafts=drafter.head_drafts, needs_all=needs_all, needs_free=is_run, tell=tell
    )
    request = PlanRequest(
        sites=found.sites,
        network=found.network,
        shape=shape,
        weights=model_weights(files, shape),
        precisions=(plan.dtype,),
        drafter=drafter.planned,
        context=plan.context,
        typical_context=typical_context(plan.context),
        head=found.head,
        all_devices=options.all_devices,
        cache=plan.cache,
    )
    chosen = compare(request, found, plan.stages) if plan.stages else choose(request, found)
    for line in chosen.lines(chosen.stages(surveyor.devices)):
        log.info("%s", line)
    return chosen


def _placed(devices: Sequence[Device], plan: ClusterPlan) -> tuple[Device, ...]:
    """The devices with the addresses that they have by now; layers that the user fixed are for all of them
    together."""
    addresses = {stage.name: stage.address for stage in plan.stages}
    return tuple(
        replace(device, address=addresses.get(device.name, device.address), layers=None) for device in devices
    )


def pick_dtype(wanted: str | None, files: ModelFiles, config: Any) -> str:
    """The wanted dtype, else the checkpoint's; a GGUF file stays as it is packed where it can."""
    if wanted == FILED and not files.is_packed:
        raise InputError(
            f"--dtype {FILED}: expected a GGUF file or a checkpoint of packed matrices, but "
            f"{files.model!r} is none; leave --dtype out, or use bfloat16, int8 or int4"
        )
    if wanted is None and files.is_packed:
        return FILED
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if wanted is None and own not in DTYPE_BYTES:
        raise InputError(f"the checkpoint is {own}; choose --dtype {', '.join(DTYPE_BYTES)}")
    return wanted or own
