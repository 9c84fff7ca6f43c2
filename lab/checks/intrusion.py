"""What somebody in the network can do to a cluster: break-ins that are tried on real daemons on loopback,
with keys and without.

Each attempt says what came of it and whether that is as `docs/security.md` promises. The eavesdropper's are
made on a link in the clear, too, where they must succeed: so they can fail.

    python -m lab.checks.intrusion [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgpack

from flowspec.core.protocol.cluster_messages import Error, Welcome
from flowspec.core.protocol.messages import Segment, Verified
from flowspec.errors import ClusterError, FlowSpecError, PeerError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.text import Tokenizer
from flowspec.plan.placement import ClusterPlan
from flowspec.runtime.cluster import Device
from flowspec.runtime.head import Head
from flowspec.runtime.local import LocalCluster
from flowspec.runtime.security.keyfiles import device_keyring, head_keyring, make_keys
from flowspec.runtime.security.keyring import Keyring
from lab.checks.wiretap import Recording, Wiretap, messages, replay
from lab.command import Parser, run_command
from tests.runtime.clusters import plan_for, submit, tokens_of

STAGES = 2
PROMPT = "What is 17 + 25? Think of it as a secret that nobody else may read."
NEW_TOKENS = 24
LOG_S = 5.0
"""How long a daemon may take to write its line."""
QUIET_S = 0.5
"""How long a replayed connection is listened to after its last word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt: `outcome` is what the intruder saw, `logged` the daemon's line about it, if there is to be
    one."""

    name: str
    outcome: str
    logged: str
    as_promised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Tapped:
    """An answer that was listened to: its tokens, and all connections of the cluster with the address that
    each went to."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    recordings: tuple[tuple[str, Recording], ...]


class Site:
    """A cluster of local daemons with a wiretap before each, and their log."""

    def __init__(self, cluster: LocalCluster, log: Path, keys: Keyring | None) -> None:
        self.addresses = [daemon.address for daemon in cluster.wait()]
        self.log = log
        self.keys = keys

    def plan(self, addresses: Sequence[str]) -> ClusterPlan:
        devices = [Device(name=f"local-{index}", address=address) for index, address in enumerate(addresses)]
        return plan_for(Path(BUNDLED), devices, 256)

    def tapped_answer(self) -> Tapped:
        prompt = tuple(Tokenizer(ModelFiles(BUNDLED)).encode(PROMPT))
        with contextlib.ExitStack() as stack:
            taps = [stack.enter_context(Wiretap(address)) for address in self.addresses]
            with Head(self.plan([tap.address for tap in taps]), keys=self.keys) as head:
                tokens = tuple(tokens_of(submit(head, prompt, NEW_TOKENS)))
            pairs = zip(self.addresses, taps, strict=True)
            recordings = tuple((address, each) for address, tap in pairs for each in tap.recordings)
            return Tapped(prompt=prompt, tokens=tokens, recordings=recordings)

    def try_head(self, keys: Keyring | None) -> tuple[str, float]:
        """How a head with other keys is refused, and within how many seconds; empty if it is not."""
        started_s = time.monotonic()
        try:
            Head(self.plan(self.addresses), keys=keys).close()
        except (ClusterError, PeerError) as error:
            return str(error), time.monotonic() - started_s
        return "", time.monotonic() - started_s

    def logged(self, wanted: str, since: int) -> str:
        """The first line of the daemons' log from that byte on that has these words in it; empty if none
        comes."""
        deadline_s = time.monotonic() + LOG_S
        while time.monotonic() < deadline_s:
            for line in self.log.read_bytes()[since:].decode("utf-8", "replace").splitlines():
                if wanted in line:
                    return line
            time.sleep(0.02)
        return ""


@contextlib.contextmanager
def site(folder: Path, keys_folder: Path | None) -> Iterator[Site]:
    """Daemons on loopback, with keys or without."""
    log = folder / f"{'keyed' if keys_folder else 'keyless'}.log"
    log.touch()
    with LocalCluster(STAGES, log_level="INFO", log_file=str(log), keys=keys_folder) as cluster:
        yield Site(cluster, log, None if keys_folder is None else head_keyring(keys_folder))


def knock(where: Site, name: str, keys: Keyring | None, told: str, logged: str) -> Attempt:
    """A head that has no business here: the one line that it gets, and the daemon's."""
    since = where.log.stat().st_size
    text, spent_s = where.try_head(keys)
    line = where.logged(logged, since)
    outcome = f"refused after {spent_s:.1f} s: {text}" if text else "it was let in"
    return Attempt(name=name, outcome=outcome, logged=line, as_promised=told in text and bool(line))


def eavesdrop(where: Site, answer: Tapped) -> Attempt:
    """What can be read of an answer: everything in the clear, nothing with keys."""
    streams = [
        bytes(stream) for _, recording in answer.recordings for stream in (recording.sent, recording.received)
    ]
    needles = {
        "the prompt's tokens": msgpack.packb(answer.prompt),
        "the model's name": BUNDLED.encode(),
        "the fingerprint": where.plan(where.addresses).fingerprint.encode(),
    }
    found = [name for name, needle in needles.items() if any(needle in stream for stream in streams)]
    read = [envelope.message for stream in streams for envelope in messages(stream)]
    verified = [part for message in read if isinstance(message, Verified) for part in message.parts]
    overheard = tuple(token for part in verified for token in part.next_tokens if token >= 0)
    prompts = [part.tokens for message in read if isinstance(message, Segment) for part in message.parts]
    is_read = overheard[: len(answer.tokens)] == answer.tokens and answer.prompt in prompts
    outcome = f"{sum(map(len, streams))} bytes, {len(read)} messages decoded"
    outcome += f"; found {', '.join(found) or 'nothing'}; answer {'read in full' if is_read else 'not read'}"
    promised = not found and not read if where.keys is not None else is_read and len(found) == len(needles)
    kind = "an encrypted link" if where.keys is not None else "a link in the clear (everything must be found)"
    return Attempt(name=f"eavesdropping on {kind}", outcome=outcome, logged="", as_promised=promised)


def play_again(where: Site, answer: Tapped) -> Attempt:
    """Each recorded connection, played to its daemon again: none may get further than Hello, which anybody
    can say without keys."""
    since = where.log.stat().st_size
    answers = [
        [envelope.message for envelope in messages(replay(recording, address, QUIET_S))]
        for address, recording in answer.recordings
    ]
    if where.keys is not None:
        refused = not any(answers)
        # Also from before: of the head with other keys the same was said, and what repeats is only counted.
        line = where.logged("not encrypted for this device's key, or replayed", 0)
    else:
        lengths = [len(list(messages(bytes(recording.sent)))) for _, recording in answer.recordings]
        said = {0: [], 1: [Welcome]}  # the connection between stages for signs of life carries no message
        allowed = [said.get(length, [Welcome, Error]) for length in lengths]
        refused = [[type(message) for message in each] for each in answers] == allowed and max(lengths) > 1
        line = where.logged("frames were lost or replayed", since)
    outcome = f"{len(answers)} connections played again: {'all refused' if refused else 'NOT all refused'}"
    kind = "encrypted" if where.keys is not None else "in the clear"
    return Attempt(
        name=f"a recorded session, {kind}", outcome=outcome, logged=line, as_promised=refused and bool(line)
    )


def try_everything(folder: Path) -> Iterator[Attempt]:
    """All attempts, one after another; keys and logs go into `folder`."""
    names = [f"local-{index}" for index in range(STAGES)]
    ours, others = folder / "ours", folder / "others"
    for each in (ours, others):
        make_keys(each, ["head"], names, force=False)
    with site(folder, ours) as keyed:
        assert keyed.keys is not None
        stranger = replace(head_keyring(others), devices=keyed.keys.devices)
        device = device_keyring(ours, names[0])
        told, logged = "encrypted connections only, and there are no keys here", "came without keys"
        yield knock(keyed, "a head without keys", None, told, logged)
        told, logged = "does not know the key of head", "its key is not listed"
        yield knock(keyed, "a head whose key is not listed", stranger, told, logged)
        told, logged = "it has no keys, or not the one", "not encrypted for"
        yield knock(keyed, "a head that holds other keys of the devices", head_keyring(others), told, logged)
        told = "opens no head-control connections"
        yield knock(keyed, "a device that plays the head", device, told, told)
        named = replace(keyed.keys, name="boss")
        yield knock(keyed, "a head that takes another name", named, "calls itself boss", "calls itself boss")
        answer = keyed.tapped_answer()
        yield eavesdrop(keyed, answer)
        yield play_again(keyed, answer)
        known = keyed.keys
    with site(folder, None) as keyless:
        told, logged = "it has no keys, ", "have keys, and this daemon has none"
        yield knock(keyless, "a head with keys, daemons without", known, told, logged)
        answer = keyless.tapped_answer()
        yield eavesdrop(keyless, answer)
        yield play_again(keyless, answer)


def report(tried: Iterable[Attempt], *, is_json: bool) -> int:
    """Prints attempts as they are made, or all as JSON; returns the exit status."""
    attempts = []
    for each in tried:
        attempts.append(each)
        if not is_json:
            promised = "as promised" if each.as_promised else "BROKEN"
            print(f"{promised}: {each.name}\n    {each.outcome}", flush=True)
            if each.logged:
                print(f"    the daemon's log: {each.logged}", flush=True)
    if is_json:
        print(json.dumps([asdict(each) for each in attempts]))
    return 0 if all(each.as_promised for each in attempts) else FlowSpecError.exit_status


def command(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return report(try_everything(Path(folder)), is_json=args.json)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(Parser("lab.checks.intrusion", __doc__), command, argv)


if __name__ == "__main__":
    sys.exit(main())
