"""Devices that are named: who waits for look-ups, and what a name service that is out costs."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowspec.core.cluster.addresses import LookupTimeouts
from flowspec.errors import InputError
from flowspec.runtime.addresses import ADDRESSES, Addresses
from flowspec.runtime.head import Head
from lab.plain_model import PlainModel
from tests import names
from tests.daemons import DaemonProcess
from tests.runtime.clusters import listening, plain, plan_for, submit, surviving, tokens_of, wait_until

COUNT = 60
PAUSE_S_MAX = 15.0
"""One look-up takes 20 s while the service is out.

A stage waits 3 s for it, and then takes the head's word.
"""
CODE = (
    "import sys; from pathlib import Path; from tests import names; names.install(Path(sys.argv.pop(1))); "
    "from flowspec.cli.main import main; sys.exit(main())"
)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """While there is such a file the name service is out."""
    plain = socket.getaddrinfo
    path = tmp_path / "out"
    names.install(path)
    yield path
    path.unlink(missing_ok=True)
    socket.getaddrinfo = plain


def addresses() -> Addresses:
    return Addresses(LookupTimeouts(limit_s=0.5, fresh_s=0.0, again_s=0.0))


def test_a_service_that_hangs_is_waited_for_once_for_all_and_an_old_address_is_kept(out: Path) -> None:
    book = addresses()
    assert book.wait_for("pi.board") == "127.0.0.1"
    out.touch()
    began_s = time.monotonic()
    assert [book.look_up("pi.board") for _ in range(3)] == ["127.0.0.1"] * 3
    book.prepare(("a.board", "b.board", "c.board"))
    for host in ("a.board", "b.board", "c.board"):
        with pytest.raises(
            InputError, match=rf"cannot find the host {host}: no name service answered within 0.5 s"
        ):
            book.wait_for(host)
    assert time.monotonic() - began_s < names.HANGS_S / 2, "nobody waits for the service itself"
    out.unlink()
    woken = threading.Event()
    with contextlib.suppress(InputError):
        book.look_up("a.board", woken.set)
    wait_until(lambda: book.look_up("d.board", woken.set) is not None, "the service is back")
    assert woken.wait(5)


def test_what_cannot_be_a_name_is_an_error(out: Path) -> None:
    for host in ("no-such-host.invalid", "a\0b", "x" * 300):
        with pytest.raises(InputError, match="cannot find the host"):
            Addresses(LookupTimeouts(limit_s=10.0, fresh_s=30.0, again_s=2.0)).wait_for(host)


def test_an_answer_goes_on_when_a_device_is_lost_while_the_name_service_is_out(
    out: Path,
    folder: Path,
    reference: PlainModel,
) -> None:
    """The middle one of three: the first has to reach the last, whose name it never looked up."""
    run = ("-c", CODE, str(out))
    started = [DaemonProcess(f"d{index}", run=run, is_warm=True) for index in range(3)]
    plan, notes = plan_for(folder, [listening(each) for each in started]), list[str]()
    named = [
        replace(stage, address=stage.address.replace("127.0.0.1", f"{stage.name}{names.ENDING}"))
        for stage in plan.stages
    ]
    plan = replace(plan, stages=tuple(named))
    try:
        with Head(plan, recovery=surviving(plan, notes)) as head:
            answer = submit(head, count=COUNT)
            found, came_s = list[int](), list[float]()
            for batch in answer:
                found += batch.tokens
                came_s.append(time.monotonic())
                if len(came_s) == 5:
                    out.touch()
                    started[1].process.kill()
            pause_s = max(after - before for before, after in itertools.pairwise(came_s))
            assert found == plain(reference, COUNT)
            assert notes == ["device d1 is lost (its connection closed)", "going on with 2 devices"]
            assert pause_s < PAUSE_S_MAX, f"a pause of {pause_s:.1f} s"
            before_s = time.monotonic()
            assert tokens_of(submit(head)) == plain(reference)
            assert time.monotonic() - before_s < PAUSE_S_MAX, "nobody waits for look-ups of the lost one"
    finally:
        out.unlink(missing_ok=True)
        for each in started:
            each.stop()
    assert ADDRESSES.look_up(f"d0{names.ENDING}") == "127.0.0.1"
