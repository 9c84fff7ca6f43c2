"""The head of a running cluster: connects to the daemons, gives them their layers, and answers prompts
through them.

One thread owns the sockets and the `HeadCore`. Callers submit from their own threads and read a
`TokenStream`. With a `Recovery` a lost device costs a pause (`pipelines.py`), and a lost drafter never more
than its guesses; without one, and for what no other pipeline could do, the head fails as a whole: every open
answer gets the error, and nothing hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from flowspec.checking import check, is_on
from flowspec.core.cluster.forming import Start
from flowspec.core.cluster.membership import Tick
from flowspec.core.head.domains import Domains
from flowspec.core.head.drafter_traits import DrafterTraits
from flowspec.core.head.events import (
    Cancel,
    Draft,
    DrafterLost,
    DrafterRecovered,
    Emit,
    Finished,
    Forget,
    HeadCommand,
    HeadEvent,
    PipelineLost,
    PipelineReformed,
    SegmentTimed,
    SendToDrafter,
    SendToFirstStage,
    SendToStages,
    SetTimer,
    Submit,
    TimerFired,
)
from flowspec.core.head.expertise import Expertise
from flowspec.core.head.flights import Bounds
from flowspec.core.head.head import HeadCore
from flowspec.core.head.link_pacer import FIRST_BYTES
from flowspec.core.head.prompt_chunks import SlotTime
from flowspec.core.head.request import Request
from flowspec.core.head.sharing import BLOCK
from flowspec.core.methods import WITHOUT_GUESSES, make_method
from flowspec.core.methods.base import Method
from flowspec.core.protocol.cluster_messages import capturing_of
from flowspec.core.protocol.messages import Hop
from flowspec.core.protocol.precision import ACTIVATIONS
from flowspec.draft.base import CopiesFeatures, Drafter
from flowspec.draft.guide import certain_of
from flowspec.draft.lookup import LookUpDrafter
from flowspec.errors import BrokenError, ClusterError, FlowSpecError, InputError, PeerError
from flowspec.extras import how_to_get
from flowspec.model.grammar import library_version
from flowspec.plan.placement import ClusterPlan, assigns_of
from flowspec.plan.timing import Curve
from flowspec.runtime.compute import Crashed, WorkFailed
from flowspec.runtime.drafters import (
    DrafterAbsent,
    LocalDrafter,
    Notice,
    PlacedDrafter,
    RemoteDrafter,
    Result,
)
from flowspec.runtime.emulation import Emulation
from flowspec.runtime.heap import free_cycles, share_one_heap
from flowspec.runtime.learnt import WRITE_EVERY_S, LearntFile
from flowspec.runtime.pipeline_connections import Progress, StageStatus
from flowspec.runtime.pipelines import Pipelines, Recovery
from flowspec.runtime.security.keyring import Keyring
from flowspec.runtime.token_stream import End, Tokens, TokenStream
from flowspec.runtime.transport import TIMER_EARLY_S, Wake, poll_timeout_ms
from flowspec.wire.codec import DTYPE_BYTES

TIMED_SEGMENTS_MAX = 1_000
"""Whose times are kept: the last ones, of which each takes more than half a KiB."""
POLL_MS = 500
LOOK_EVERY_TOKENS = 32
"""And when an answer has ended, it is looked whether a link holds answers up."""

log = logging.getLogger("flowspec.head")

OnEvent = Callable[[HeadEvent, Sequence[HeadCommand], float], None]
"""Told in the head's thread of every event, the commands that it led to (they are done), and the instant."""


def traits_of(drafter: Drafter | PlacedDrafter, level: int) -> DrafterTraits:
    """What the core must know of a drafter that is loaded here, or shall be on a device."""
    if isinstance(drafter, PlacedDrafter):
        return drafter.traits(level)
    return DrafterTraits(
        context=drafter.context,
        needs_features=bool(drafter.captures),
        level=level,
        cache_slots=drafter.cache_slots,
        looks_up=isinstance(drafter, LookUpDrafter),
        copies_features=isinstance(drafter, CopiesFeatures),
    )


class Head:
    """A connected cluster; a context manager that lets go of the daemons at its end.

    `method` decides what is sent and drafted (default: plain decoding); the drafters are the head's from now
    on, each with a thread. Those that are placed on devices must be there at first, unless the recovery may
    start short; later answers go on without those that are lost. `levels` are those of `DrafterTraits`
    (default: all drafters). An `emulation` is what the local daemons were started with. With `keys` the
    cluster is spoken to in secret, else in the clear. `slot_s` is what is foretold of the stages. With
    `prefix_caching` prompts begin with what other conversations have computed. It begins with what is in the
    `learnt` file, and keeps there what it learns.
    """

    def __init__(
        self,
        plan: ClusterPlan,
        progress: Progress = lambda text, share: None,
        *,
        method: Method | None = None,
        drafters: Sequence[Drafter | PlacedDrafter] = (),
        levels: Sequence[int] = (),
        emulation: Emulation | None = None,
        recovery: Recovery | None = None,
        on_event: OnEvent | None = None,
        keys: Keyring | None = None,
        slot_s: SlotTime | None = None,
        prefix_caching: bool = True,
        learnt: LearntFile | None = None,
    ) -> None:
        share_one_heap()
        free_cycles()  # of the head before, in a process that has one after another
        self.hops: deque[tuple[Hop, ...]] = deque(maxlen=TIMED_SEGMENTS_MAX)
        traits = [
            traits_of(drafter, level)
            for drafter, level in zip(drafters, levels or [0] * len(drafters), strict=True)
        ]
        width = plan.carried + plan.hidden_size
        self._row_bytes = width * DTYPE_BYTES[ACTIVATIONS[plan.dtype]]
        self._core = HeadCore(
            context=plan.context,
            stage_count=len(plan.stages),
            method=method or make_method(WITHOUT_GUESSES),
            drafters=traits,
            bounds=Bounds(prefill_first=max(1, FIRST_BYTES // max(1, self._row_bytes))),
            slot_s=slot_s,
            sliding_window=plan.sliding_window,
            prefix_block=BLOCK if prefix_caching else 0,
            certain_of=None if plan.tokens is None else certain_of(plan.tokens),
            capturing=capturing_of(assigns_of(plan)),
        )
        self._core.vocabulary = plan.vocabulary
        self._learnt = learnt
        self._keep_at_s = time.monotonic() + WRITE_EVERY_S
        self._has_told_link = recovery is None  # then links are declared, or nobody is to be told
        self._is_checked = is_on()
        self._wake = Wake()
        self._keys = keys
        self._pipelines = Pipelines(
            plan,
            self._wake,
            progress,
            emulation,
            recovery,
            keys,
            on_change=self._changed,
            meanwhile=self._meanwhile,
        )
        self._tokens = 0
        self._look_at = LOOK_EVERY_TOKENS
        self._stages_shown: list[StageStatus] = []
        pace = None if emulation is None else emulation.drafting
        self._on_note = log.warning if recovery is None else recovery.on_note
        self._recall()
        self._may_be_short = recovery is not None and recovery.start is Start.SHORT
        self._progress = progress
        self._drafting: list[LocalDrafter | RemoteDrafter] = []
        self._absent: set[int] = set()
        self._observers: tuple[OnEvent, ...] = () if on_event is None else (on_event,)
        self._observing = threading.Lock()
        self._timer_s: float | None = None
        self._core_s = 0.0
        self._inbox: deque[tuple[HeadEvent, TokenStream | None]] = deque()
        self._answers: dict[int, TokenStream] = {}
        self._stopping = self._is_over = False
        self._failure: FlowSpecError | None = None
        self._requests_begun = 0
        self._numbers = itertools.count(1)
        try:
            self._begin_drafters(drafters, pace)
            self._pipelines.connect()
            assert self._pipelines.connections is not None
            assigns = assigns_of(self._pipelines.plan)
            self._core.begin(
                PipelineReformed(
                    stage_count=len(assigns),
                    rooms=self._pipelines.connections.rooms,
                    capturing=capturing_of(assigns),
                )
            )
            self._show_stages()
            while self._absent:
                self._turn()
        except BaseException:  # also Ctrl-C: devices that were assigned layers are to be free again
            self._disconnect()
            raise
        self._thread = threading.Thread(target=self._run, name="head", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------ for other threads

    @property
    def stages(self) -> list[StageStatus]:
        """The stages as they introduced themselves, in pipeline order; those of the last pipeline while there
        is none."""
        return self._stages_shown

    def observe(self, observer: OnEvent) -> None:
        """Has an observer told of every event from the next one on."""
        with self._observing:
            self._observers = (*self._observers, observer)

    def unobserve(self, observer: OnEvent) -> None:
        """An observer is told no more; it may be in the middle of a last event."""
        with self._observing:
            self._observers = tuple(each for each in self._observers if each is not observer)

    def observes(self, observer: OnEvent) -> bool:
        """Whether an observer is told of events still: one that raises is told no more."""
        return any(each is observer for each in self._observers)

    def requests(self) -> list[Request]:
        """Every conversation as the core has it: for observers, which run in the head's thread."""
        return self._core.requests()

    def may_copy(self, tokens: int) -> bool:
        """As `HeadCore.may_copy`."""
        return self._core.may_copy(tokens)

    @property
    def drafters(self) -> list[LocalDrafter | RemoteDrafter]:
        """The models beside the target, by number."""
        return self._drafting

    @property
    def expertise(self) -> Expertise | None:
        """What the method learnt of the models beside the target, by what prompts are about, if it goes by
        that."""
        return self._core.method.expertise

    @property
    def domains(self) -> Domains | None:
        """The kinds of prompts that the method tells apart, if it does."""
        return self._core.method.domains

    @property
    def plan(self) -> ClusterPlan:
        """What runs where, now or last."""
        return self._pipelines.plan

    @property
    def arithmetic(self) -> str:
        """What all pipelines compute with (`core.cluster.agreement`)."""
        return self._pipelines.arithmetic

    def grammar_trouble(self) -> str:
        """Why no answer can be bound by a grammar now; empty where answers can."""
        if self.plan.tokens is None:
            return f"structured output needs llguidance at the head; {how_to_get('grammars')}"
        wanted, last = library_version(), self._stages_shown[-1]
        found = "" if last.ready is None else last.ready.grammars
        if found == wanted:
            return ""
        why = f"expected {wanted} on device {last.plan.name}, which draws the tokens, as at the head"
        return f"structured output: {why}, got {found or 'none'}; {how_to_get('grammars')} there"

    @property
    def lost(self) -> list[str]:
        """The devices that are lost now, by name."""
        return self._pipelines.lost

    @property
    def returning(self) -> list[str]:
        """Those of them that answer again and make ready, by name."""
        return self._pipelines.returning

    @property
    def loading(self) -> dict[str, tuple[str, float]]:
        """What devices do to make ready, and how far they have come, by name."""
        return self._pipelines.loading

    @property
    def is_formed(self) -> bool:
        """Whether there is a pipeline now."""
        return self._core.is_formed

    @property
    def is_waiting(self) -> bool:
        """Whether answers wait for devices: there is no pipeline, and none on its way."""
        return self._pipelines.is_waiting

    @property
    def failure(self) -> FlowSpecError | None:
        """Why the head answers nothing any more, if it does not."""
        return self._failure

    @property
    def is_closed(self) -> bool:
        """Whether it has let go of the daemons, or is about to."""
        return self._stopping

    def new_request(self) -> int:
        """An id for a new conversation."""
        self._requests_begun += 1
        return self._requests_begun

    def submit(self, submit: Submit) -> TokenStream:
        """Starts an answer. What is wrong with the prompt or the cluster is raised when the answer is
        read."""
        answer = TokenStream(
            submit.request,
            time.monotonic(),
            next(self._numbers),
            is_bound=submit.sampling.grammar is not None,
        )
        self._post(replace(submit, answer=answer.number), answer)
        return answer

    def cancel(self, answer: TokenStream) -> None:
        """Ends an answer soon, with the reason `cancelled`; one that is over already stays as it is."""
        self._post(Cancel(request=answer.request, answer=answer.number), None)

    def forget(self, request: int) -> None:
        """Frees a conversation's cache on every stage."""
        self._post(Forget(request=request), None)

    def close(self) -> None:
        """Lets go of the daemons and ends the thread; answers that are open get an error."""
        if self._stopping:
            return
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:  # which may be the one that collects garbage
            self._thread.join()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post(self, event: HeadEvent, answer: TokenStream | None) -> None:
        assert not self._stopping, "the head is closed"
        self._inbox.append((event, answer))
        self._wake.set()
        if self._is_over:
            self._refuse_asked()

    # ------------------------------------------------------------------------------------------- the thread

    def _begin_drafters(self, drafters: Sequence[Drafter | PlacedDrafter], pace: Curve | None) -> None:
        """Starts their threads; those on devices count as lost until they are there."""
        for number, drafter in enumerate(drafters):
            if isinstance(drafter, PlacedDrafter):
                self._core.handle(DrafterLost(drafter=number), time.monotonic())
                self._absent.add(number)
                remote = RemoteDrafter(
                    drafter,
                    number,
                    self._wake,
                    self._keys,
                    may_be_absent=self._may_be_short,
                )
                self._drafting.append(remote)
            else:
                self._drafting.append(LocalDrafter(drafter, number, self._wake, pace))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except FlowSpecError as error:
            self._fail(error)
        except BaseException as error:  # the top of a thread: who waits for an answer is to have it
            self._fail(ClusterError(f"the head failed: {type(error).__name__}: {error}"))
            raise
        else:
            self._keep()
        finally:
            self._end_answers(ClusterError("the head is closed"))
            self._is_over = True  # who asks from here on sees it, or is seen in the inbox
            self._refuse_asked()
            self._disconnect()

    def _turn(self) -> None:
        try:
            for event in self._pipelines.listen(self._patience_ms()):
                self._step(event, time.monotonic())
        except PeerError as error:
            self._pipelines.broken(BrokenError(str(error), ""))
        self._meanwhile()

    def _meanwhile(self) -> bool:
        """What is done whether there is a pipeline or not; False when the head is closed."""
        now_s = time.monotonic()
        for thread in self._drafting:
            while thread.results:
                self._drafted(thread.results.popleft(), now_s)
        if self._timer_s is not None and now_s >= self._timer_s - TIMER_EARLY_S:
            now_s, self._timer_s = max(now_s, self._timer_s), None
            self._step(TimerFired(), now_s)
        while self._inbox:
            self._begin(*self._inbox.popleft(), now_s)
        self._pipelines.watch(self._tick)
        return not self._stopping

    def _tick(self, now_s: float) -> Tick:
        """How things stand, for those who decide about devices."""
        core = self._core
        flight, rows = core.flights.oldest
        return Tick(
            flight_s=core.flight_s(now_s),
            flight=flight,
            flight_bytes=rows * self._row_bytes,
            left_s=core.left_s(),
            tokens=self._tokens,
        )

    def _changed(self, event: PipelineLost | PipelineReformed) -> None:
        self._step(event, time.monotonic())
        if isinstance(event, PipelineReformed):
            self._has_told_link = False
            self._show_stages()
            self._end_bound_answers()

    def _end_bound_answers(self) -> None:
        """Answers that a grammar binds end with an error where the new last stage cannot obey it."""
        bound = [answer for answer in self._answers.values() if answer.is_bound]
        if bound and (trouble := self.grammar_trouble()):
            for answer in bound:
                answer.items.put(ClusterError(trouble))
                self._step(Cancel(request=answer.request, answer=answer.number), time.monotonic())

    def _tell_of_slow_link(self) -> None:
        """Names the link that holds answers up, once for a pipeline, where what a row takes on the wire is
        known."""
        found = self._core.costs.slow_link(self._core.portions.rows_s)
        if found is None or not self._row_bytes:
            return
        self._has_told_link = True
        stage, row_s = found
        first, second = (self.plan.stages[at].name for at in (stage - 1, stage))
        rate = self._row_bytes * 8 / 1000 / row_s
        self._on_note(
            f"the link from {first} to {second} carries about {rate:.0f} kbit/s, and holds answers up"
        )

    def _show_stages(self) -> None:
        assert self._pipelines.connections is not None
        self._stages_shown = self._pipelines.connections.all

    def _drafted(self, result: Result, now_s: float) -> None:
        if isinstance(result, WorkFailed | Crashed):
            raise result.error
        if isinstance(result, Notice):
            if result.share is None:
                self._on_note(result.text)
            else:
                self._progress(result.text, result.share)
            return
        if isinstance(result, DrafterAbsent):
            self._absent.discard(result.drafter)
            return
        if isinstance(result, DrafterRecovered):
            remote = self._drafting[result.drafter]
            assert isinstance(remote, RemoteDrafter), "only those on devices come back"
            remote.post(result)
            self._absent.discard(result.drafter)
        self._step(result, now_s)

    def _patience_ms(self) -> int:
        """How long the next poll may wait."""
        due_s = self._pipelines.due_s
        return poll_timeout_ms(
            due_s if self._timer_s is None else min(due_s, self._timer_s), time.monotonic(), POLL_MS
        )

    def _end_answers(self, error: FlowSpecError) -> None:
        for answer in self._answers.values():
            answer.items.put(error)
        self._answers.clear()

    def _fail(self, error: FlowSpecError) -> None:
        """Ends every answer with the error, also those that are asked for until the head is closed."""
        self._failure = error
        self._end_answers(error)
        while not self._stopping:
            self._refuse_asked()
            time.sleep(0.05)

    def _refuse_asked(self) -> None:
        """Ends answers that are asked for where none is begun any more."""
        with contextlib.suppress(IndexError):  # the inbox is empty
            while True:
                _, answer = self._inbox.popleft()
                if answer is not None:
                    answer.items.put(self._failure or ClusterError("the head is closed"))

    def _begin(self, event: HeadEvent, answer: TokenStream | None, now_s: float) -> None:
        if answer is not None:
            if answer.is_bound and (trouble := self.grammar_trouble()):  # since it was asked for
                answer.items.put(InputError(trouble))
                return
            self._answers[answer.request] = answer
            answer.core_s = -self._core_s
        try:
            self._step(event, now_s)
        except InputError as error:
            if answer is None:
                raise
            del self._answers[answer.request]
            answer.items.put(error)

    def _step(self, event: HeadEvent, now_s: float) -> None:
        """Runs the core's commands; what the stages wait for goes out before readers are woken."""
        for_readers: list[Emit | Finished] = []
        started_s = time.perf_counter()
        commands = self._core.handle(event, now_s)
        self._core_s += time.perf_counter() - started_s
        if self._is_checked:
            check(self._core, event)
        for command in commands:
            if isinstance(command, SendToFirstStage):
                assert self._pipelines.connections is not None
                self._pipelines.connections.send(command.segment)
            elif isinstance(command, SendToStages):
                assert self._pipelines.connections is not None
                self._pipelines.connections.tell(command.message)
            elif isinstance(command, Draft | SendToDrafter):
                self._drafting[command.drafter].post(command)
            elif isinstance(command, SetTimer):
                self._timer_s = command.at_s
            elif isinstance(command, SegmentTimed):
                self.hops.append(command.hops)
                self._pipelines.passed(command.hops, command.context)
            else:
                for_readers.append(command)
        if not self._has_told_link and (
            self._tokens >= self._look_at or any(isinstance(command, Finished) for command in for_readers)
        ):
            self._look_at = self._tokens + LOOK_EVERY_TOKENS
            self._tell_of_slow_link()
        for command in for_readers:
            if isinstance(command, Emit):
                self._tokens += len(command.tokens)
                tokens = Tokens(tokens=command.tokens, at_s=now_s, logprobs=command.logprobs)
                self._answers[command.request].items.put(tokens)
            else:
                answer = self._answers.pop(command.request)
                report = {**command.statistics.report(), "head_s": round(answer.core_s + self._core_s, 6)}
                answer.items.put(End(reason=command.reason, reused=command.reused, statistics=report))
        if now_s >= self._keep_at_s and any(isinstance(command, Finished) for command in for_readers):
            self._keep()
        for observer in self._observers:
            try:
                observer(event, commands, now_s)
            except Exception:  # a defect in what only looks on must not cost an answer
                log.exception("an observer failed, and is told no more; the head goes on")
                self.unobserve(observer)

    def _recall(self) -> None:
        """Begins with what an earlier run learnt, as far as it can be read."""
        if self._learnt is None:
            return
        try:
            found = self._learnt.read()
            if found is not None:
                self._core.load_state_dict(found)
        except ValueError as error:
            anew = "" if self._learnt.path.is_dir() else ", and will be written anew"
            self._on_note(f"{self._learnt.path} is not used{anew}: {error}")

    def _keep(self) -> None:
        if self._learnt is None or self._tokens == 0:
            return
        self._keep_at_s = time.monotonic() + WRITE_EVERY_S
        try:
            self._learnt.write(self._core.state_dict())
        except OSError as error:
            self._on_note(f"what is learnt of drafters is not kept: {self._learnt.path}: {error.strerror}")
            self._learnt = None

    def _disconnect(self) -> None:
        for thread in self._drafting:
            thread.stop()
        # weights go now, not when Python happens to look for cycles of which a head is a part
        self._drafting = []
        self._pipelines.close()
        self._wake.close()
