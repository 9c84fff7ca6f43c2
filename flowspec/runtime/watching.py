"""Those who watch a head: they come and go while it runs, and nothing is done for them while nobody watches.

A thread makes frames ten times a second (`watch.recorder`), adds what the devices say of themselves, and puts
the same batch into everybody's queue. Queues are bounded: who reads too slowly misses what waits, is told so,
and goes on with the present.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from flowspec.core.protocol.cluster_messages import Pong, Ready
from flowspec.errors import FlowSpecError
from flowspec.runtime.head import Head
from flowspec.runtime.session import Session
from flowspec.watch.detokenizer import Decode
from flowspec.watch.figures import Frame
from flowspec.watch.recorder import Recorder, StageRows
from flowspec.watch.recording import About, as_text, document_text, rebased
from flowspec.watch.state import WatchState

WATCHERS_MAX = 16
BATCHES_MAX = 100
"""Batches that wait for one watcher: ten seconds."""
MISSES_MAX = 6
"""A watcher that has missed so many full queues without a look is taken off the list."""
EVERY_S = 0.1
DEVICES_EVERY_S = 1.0
LOADING_EVERY_S = 0.3
"""The same while there is no pipeline, or devices make ready for one."""
KEPT_CHARS_MAX = 32 << 20
"""Of the last recording; a longer one is given up."""
SETTLE_S = 5.0
NOTES_MAX = 100
"""That wait for the thread."""

log = logging.getLogger("flowspec.watch")


class TooManyError(FlowSpecError):
    """No more can watch."""


class FrameBatch:
    """Frames that were made together; their text is made at once, for all who want it."""

    def __init__(self, frames: list[Frame]) -> None:
        self.frames = frames
        self.texts = [as_text(frame) for frame in frames]
        self.text = f"[{','.join(self.texts)}]"
        """A JSON list."""


class Watcher:
    """One who watches; any one thread takes what is there. One that does not `read` gets no frames: it looks
    at the present, or has it recorded."""

    def __init__(self, *, reads: bool = True) -> None:
        self.reads = reads
        self._batches: deque[FrameBatch] = deque()
        self._misses = 0

    @property
    def is_gone(self) -> bool:
        """Whether it has taken nothing for so long that nobody can be there."""
        return self._misses >= MISSES_MAX

    def take(self) -> list[FrameBatch]:
        self._misses = 0
        found = []
        while True:
            try:
                found.append(self._batches.popleft())
            except IndexError:  # the watch's thread may clear them meanwhile
                return found

    def give(self, batch: FrameBatch, present: WatchState) -> None:
        """Another batch; where too many wait, the present instead of them all."""
        if len(self._batches) < BATCHES_MAX:
            self._batches.append(batch)
            return
        self._misses += 1
        self._batches.clear()
        self._batches.append(FrameBatch([{"t": present.t, "kind": "missed"}, *present.frames()]))


class Notes:
    """What is told of devices: `tell` is told each line, and so is who watches, while there is a `watch`."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.watch: Watch | None = None
        self._tell = tell

    def __call__(self, text: str) -> None:
        self._tell(text)
        if (watch := self.watch) is not None:
            watch.note(text)


class KeptFrames:
    """The frames of the last answer, or of those that were under way together, as text; nothing once they are
    too many."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._chars = 0
        self._open: set[int] = set()
        self._was_open = False
        self.is_cut = False

    def take(self, batch: FrameBatch, present: WatchState) -> None:
        """Frames, when `present` has them already."""
        self._was_open = bool(self._open)
        for frame, text in zip(batch.frames, batch.texts, strict=True):
            self._take(frame, text, present)

    def _take(self, frame: Frame, text: str, present: WatchState) -> None:
        if frame["kind"] == "begin":
            if not self._open:
                self._begin(present, frame)
            self._open.add(frame["request"])
            self._was_open = True
        elif frame["kind"] == "note" and self._texts and self._was_open:
            pass  # notes come last in a batch: what they tell of may have been before the end
        elif not self._texts or not self._open:
            return
        self._add(text)
        if frame["kind"] == "end":
            self._open.discard(frame["request"])
        elif frame["kind"] == "missed":
            self.stop()

    def stop(self) -> None:
        """How what is under way goes on is not seen; the next answer is another recording."""
        self._open.clear()

    def _begin(self, present: WatchState, frame: Frame) -> None:
        self._texts, self._chars, self.is_cut = [], 0, False
        self._add(as_text({"t": frame["t"], "kind": "stages", "stages": present.stages}))
        if present.devices is not None:
            self._add(as_text({**present.devices, "t": frame["t"]}))

    def _add(self, text: str) -> None:
        self._chars += len(text)
        if self._chars > KEPT_CHARS_MAX:
            self._texts, self._chars, self.is_cut = [""], 0, True
        elif not self.is_cut:
            self._texts.append(text)

    def texts(self) -> list[str]:
        """All of them, on the watch's clock."""
        return [] if self.is_cut else list(self._texts)


class Watch:
    """Lets others watch a head. `keeps` what it sees of the last answer for `recording`; `decode` gives
    tokens' text; `clock` is that of the head's events.

    Any thread may call it.
    """

    def __init__(
        self,
        head: Head,
        about: About,
        decode: Decode,
        *,
        keeps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._head = head
        self._about = about
        self._decode = decode
        self._kept = KeptFrames() if keeps else None
        self._clock = clock
        self._origin_s = clock()
        self._lock = threading.RLock()
        self._watchers: list[Watcher] = []
        self._recorder: Recorder | None = None
        self._stop = threading.Event()
        self._devices: dict[str, dict[str, Any]] = {}
        self._devices_due_s = 0.0
        self._standing: tuple[bool, list[str]] = (True, [])
        self._notes: deque[str] = deque(maxlen=NOTES_MAX)

    @property
    def present(self) -> WatchState | None:
        """What there is to see now, None while nobody watches. Its fields change while they are read."""
        recorder = self._recorder
        return None if recorder is None else recorder.present

    def join(self, *, reads: bool = True) -> Watcher:
        """Somebody begins to watch, with the present; raises `TooManyError`. Who `reads` must take the
        frames, or is taken off the list."""
        with self._lock:
            if len(self._watchers) >= WATCHERS_MAX:
                raise TooManyError(f"{WATCHERS_MAX} watch already, and no more can; close one")
            watcher = Watcher(reads=reads)
            self._watchers.append(watcher)
            if self._recorder is None:
                self._start()
            elif reads:
                watcher.give(FrameBatch(self._recorder.present.frames()), self._recorder.present)
            return watcher

    def leave(self, watcher: Watcher) -> None:
        """Somebody watches no more; with the last one all work for them ends."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)
            if not self._watchers:
                self._end()

    def has(self, watcher: Watcher) -> bool:
        return watcher in self._watchers

    def close(self) -> None:
        with self._lock:
            self._watchers.clear()
            self._end()

    def note(self, text: str) -> None:
        """Shows those who watch what was told of devices, in a line."""
        if self._recorder is not None:
            self._notes.append(text)

    def hello(self) -> dict[str, Any]:
        """What a watcher must know before the first frame: a recording's document without frames."""
        return {**self._described().document(), "live": True}

    def recording(self) -> dict[str, Any] | None:
        """The last answer's (of several at once, theirs), as far as somebody watched it; None without one,
        and where it became too long."""
        text = self.recording_text()
        return None if text is None else json.loads(text)

    def recording_text(self) -> str | None:
        """The same as JSON. What takes time holds up nobody who watches, comes or goes."""
        assert self._kept is not None, "this watch keeps nothing"
        with self._lock:
            texts = self._kept.texts()
        if not texts:
            return None
        origin_s = json.loads(texts[0])["t"]
        return document_text(self._described(), (rebased(text, origin_s) for text in texts))

    def settle(self) -> None:
        """Waits until all that happened by now has become frames, answers that have ended included."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            with self._lock:
                if self._recorder is None:
                    return
                self._turn(self._recorder)
                if not self._recorder.present.answers:
                    return
            time.sleep(EVERY_S / 10)

    def _described(self) -> About:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        return replace(self._about, stages=stages_of(self._head), created=now)

    # ------------------------------------------------------------------------------------------- the thread

    def _start(self) -> None:
        self._recorder = Recorder(
            self._head.requests, lambda: stages_of(self._head), self._decode, self._origin_s
        )
        self._stop = threading.Event()
        self._devices_due_s = 0.0
        self._head.observe(self._recorder)
        threading.Thread(
            target=self._run, args=(self._recorder, self._stop), name="watch", daemon=True
        ).start()

    def _end(self) -> None:
        if self._recorder is not None:
            self._stop.set()
            self._head.unobserve(self._recorder)
            self._recorder = None
            if self._kept is not None:
                self._kept.stop()

    def _run(self, recorder: Recorder, stop: threading.Event) -> None:
        while not stop.wait(EVERY_S):
            with self._lock:
                if self._recorder is not recorder:
                    return
                try:
                    if self._head.observes(recorder):
                        self._turn(recorder)
                    else:  # it failed in the head's thread, which has told so
                        self.close()
                except Exception:  # the top of a thread: else streams would go on without a word
                    log.exception("watching the head failed; nobody watches any more")
                    self.close()

    def _turn(self, recorder: Recorder) -> None:
        now_s, beat_s = self._clock(), time.monotonic()
        frames = recorder.frames(now_s)
        while self._notes:
            frames.append(recorder.tell(now_s, "note", text=self._notes.popleft()))
        standing = (self._head.is_formed, self._head.lost)
        if beat_s >= self._devices_due_s or standing != self._standing:
            self._standing = standing
            is_calm = self._head.is_formed and not self._head.loading
            self._devices_due_s = beat_s + (DEVICES_EVERY_S if is_calm else LOADING_EVERY_S)
            frames.append(recorder.tell(now_s, "devices", devices=self._look_at_devices()))
        if self._head.failure is not None and recorder.present.failed is None:
            frames.append(recorder.tell(now_s, "failed", text=str(self._head.failure)))
        if not frames:
            return
        readers = [watcher for watcher in self._watchers if watcher.reads]
        if self._kept is None and not readers:
            return
        batch = FrameBatch(frames)
        if self._kept is not None:
            self._kept.take(batch, recorder.present)
        for watcher in readers:
            watcher.give(batch, recorder.present)
            if watcher.is_gone:
                self.leave(watcher)

    def _look_at_devices(self) -> list[dict[str, Any]]:
        """What each device last said of itself, those of earlier pipelines included."""
        lost, loading = set(self._head.lost), self._head.loading
        for name in lost - self._devices.keys():
            self._devices[name] = _device(name)
        for stage in self._head.stages:
            self._devices[stage.plan.name] = _device(stage.plan.name, stage.pong, stage.ready)
        for name, row in self._devices.items():
            row["present"] = name not in lost
            doing, share = loading.get(name, ("", 0.0))
            row["loading"] = {"doing": doing, "share": share} if doing else None
        return [dict(row) for row in self._devices.values()]


def _device(name: str, pong: Pong | None = None, ready: Ready | None = None) -> dict[str, Any]:
    """One of which so much is known."""
    said, celsius = pong or ready, None if pong is None else pong.temperature_c
    return {
        "name": name,
        "memory_bytes": 0 if said is None else said.memory_bytes,
        "temperature_c": None if celsius is None else round(celsius, 1),
        "throttled": False if pong is None else pong.is_throttled,
        "queued": 0 if pong is None else pong.queued,
        "done": 0 if pong is None else pong.done,
        "running_s": 0.0 if pong is None else round(pong.running_s, 3),
        "present": False,
        "loading": None,
    }


def stages_of(head: Head) -> StageRows:
    return [{"name": stage.name, "layers": [stage.first, stage.end]} for stage in head.plan.stages]


def watch_session(session: Session, decode: Decode, *, keeps: bool = False) -> Watch:
    """A watch over a session's head, until it is closed."""
    about = About(
        world="cluster",
        model=session.head.plan.model,
        method=session.decoding.method,
        drafters=session.drafters,
        stages=stages_of(session.head),
    )
    return Watch(session.head, about, decode, keeps=keeps)
