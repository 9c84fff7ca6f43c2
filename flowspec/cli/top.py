"""Watch a running flowspec serve, or a recording, in the terminal: devices, how busy they are, tokens/s,
what is guessed and dropped.

`q` and Ctrl-C leave. The key of the server, if it wants one, is taken from FLOWSPEC_API_KEY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from flowspec.cli.live_source import Step, played, served
from flowspec.cli.screen import blocks_of, report, screen
from flowspec.errors import ClusterError, InputError
from flowspec.watch.recording import read_recording
from flowspec.watch.state import WatchState

KEY_VARIABLE = "FLOWSPEC_API_KEY"
URL = "http://127.0.0.1:8000"
JSON_EVERY_S = 1.0
ONCE_S = 1.5
"""So long frames are gathered for a single look: devices are told once a second."""
SPEED_MAX = 1000.0
KEY_EVERY_S = 0.2
"""How often it is looked whether keys are still waited for."""
ROWS_BESIDE = 13
"""Lines of the screen beside the devices'."""
LEAVES = "q or Ctrl-C leaves"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--url", default=URL, metavar="URL", help="where flowspec serve runs (default: %(default)s)"
    )
    where.add_argument("--replay", type=Path, metavar="FILE", help="play a recording instead")
    parser.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="with --replay: so many times as fast (default: 1)",
    )
    parser.add_argument(
        "--once", action="store_true", help="show one picture and end; of a recording the last one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a second instead")


def run(args: argparse.Namespace) -> int:
    if not 0 < args.speed <= SPEED_MAX:
        raise InputError(f"--speed: expected a number above 0 and at most {SPEED_MAX:g}, got {args.speed:g}")
    if args.speed != 1.0 and args.replay is None:
        raise InputError("--speed is for --replay: what happens now has its own")
    document = None if args.replay is None else read_recording(args.replay)
    if document is not None and args.once:
        steps: Iterator[Step] = iter([(document, document["frames"])])
    elif document is not None:
        steps = played(document, args.speed)
    else:
        steps = served(args.url, first_key(os.environ.get(KEY_VARIABLE, "")))
    console = Console(highlight=False)
    with contextlib.closing(_closable(steps)) as found:
        try:
            if args.once:
                once(found, console, is_json=args.json)
            elif args.json or not console.is_terminal:
                lines(found, console, is_json=args.json)
            else:
                live(found, console, stays=document is not None)
        except KeyboardInterrupt:
            return 0  # that is how it ends
    return 0


def first_key(text: str) -> str:
    """The first of a server's keys, which are one in each line; nothing without any."""
    key = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if not key.isascii() or not key.isprintable():
        raise InputError(f"{KEY_VARIABLE}: expected a key of ASCII characters, one in each line")
    return key


def _closable(steps: Iterator[Step]) -> Any:
    """The steps as a generator, whose closing closes the connection."""
    yield from steps


class TopView:
    """The picture that steps add up to."""

    def __init__(self) -> None:
        self.present = WatchState()
        self.about: dict[str, Any] | None = None

    def take(self, step: Step) -> None:
        hello, frames = step
        if hello is not None:
            self.about = hello
            self.present = WatchState()
            self.present.stages = hello["stages"]
        for frame in frames:
            self.present.take(frame)


def once(steps: Iterator[Step], console: Console, *, is_json: bool) -> None:
    view, started_s = TopView(), time.monotonic()
    for step in steps:
        view.take(step)
        is_told = view.present.devices is not None and view.present.stages
        if view.about is not None and (is_told or time.monotonic() - started_s > ONCE_S):
            break
    _show(view, console, is_json=is_json)


def lines(steps: Iterator[Step], console: Console, *, is_json: bool) -> None:
    """A line, or a picture, a second; the last one at the end."""
    view, due_s = TopView(), 0.0
    for step in steps:
        view.take(step)
        if view.about is not None and time.monotonic() >= due_s:
            due_s = time.monotonic() + JSON_EVERY_S
            _show(view, console, is_json=is_json)
    _show(view, console, is_json=is_json)


def _show(view: TopView, console: Console, *, is_json: bool) -> None:
    if view.about is None:
        raise ClusterError("the server ended the stream before it said anything; is that flowspec serve?")
    if is_json:
        print(json.dumps(report(view.present, view.about)), flush=True)
    else:
        console.print(screen(view.present, view.about, blocks=blocks_of(console)))


def live(steps: Iterator[Step], console: Console, *, stays: bool) -> None:
    """The whole screen, until `q` or Ctrl-C; what has ended `stays` until then."""
    view = TopView()
    with q_interrupts(), Live(console=console, screen=True, auto_refresh=False) as shown:
        for step in steps:
            view.take(step)
            if view.about is not None:
                rows_max = console.height - ROWS_BESIDE
                picture = screen(view.present, view.about, blocks=blocks_of(console), rows_max=rows_max)
                whole = Layout()
                whole.split_column(Layout(picture), Layout(Text(LEAVES, style="dim"), size=1))
                shown.update(whole, refresh=True)
        while stays:
            time.sleep(0.2)
    raise ClusterError("the server has ended")


@contextlib.contextmanager
def q_interrupts() -> Iterator[None]:
    """Has `q` mean what Ctrl-C does, where keys are typed at a terminal; nothing that is typed is shown."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            ready, _, _ = select.select([descriptor], [], [], KEY_EVERY_S)
            if ready and not is_over.is_set():
                typed = os.read(descriptor, 1024)
                if not typed or b"q" in typed.lower():  # or the terminal is gone
                    os.kill(os.getpid(), signal.SIGINT)
                    return

    reader = threading.Thread(target=read, name="keys", daemon=True)
    tty.setcbreak(descriptor)
    try:
        reader.start()
        yield
    finally:
        is_over.set()
        reader.join()
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
