"""The daemons of a local cluster: imports once what they compute with, then forks one daemon per stage.

Started by `LocalCluster` with a pipe on standard input. The pipe is the lifeline: when it closes, because the
head stopped it or died in whatever way, every daemon ends. Prints one JSON line per daemon: name, port, pid.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from flowspec.child_process import ending
from flowspec.errors import FlowSpecError
from flowspec.model.accelerator import tells_of_memory
from flowspec.repeats import LOG_FORM, LOG_TIME, RepeatHandler
from flowspec.runtime.emulation import devices_from_json
from flowspec.runtime.local import NO_MEMORY
from flowspec.runtime.machine import Machine
from flowspec.runtime.security.keyfiles import device_keyring

log = logging.getLogger("flowspec")


def main() -> None:
    parser = argparse.ArgumentParser(prog="flowspec-local-pool", description=__doc__)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--log-level", default="WARNING")
    parser.add_argument("--log-file", help="append the log to this file instead of standard error")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        help="each daemon stores weights that a head sends in a folder of its name in there",
    )
    parser.add_argument(
        "--keys", type=Path, help="a folder with a key for each daemon; without it they have none"
    )
    parser.add_argument(
        "--emulate",
        type=devices_from_json,
        default=(),
        help="JSON list of the devices that the daemons emulate",
    )
    args = parser.parse_args()
    handler = logging.FileHandler(args.log_file) if args.log_file else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORM, None if args.log_file else LOG_TIME))
    logging.basicConfig(level=args.log_level, handlers=[RepeatHandler(handler)])
    faulthandler.enable(handler.stream or sys.stderr)  # of the daemons, too
    try:
        importlib.import_module("flowspec.runtime.daemon")
    except (ImportError, MemoryError, OSError) as error:
        if not tells_of_memory(f"{type(error).__name__}: {error}"):
            raise
        log.error("the local daemons' process: %s", error)
        sys.exit(NO_MEMORY)
    gc.collect()
    gc.freeze()  # keep the collector from touching, and so copying, the shared pages
    children = [_fork(index, args) for index in range(args.count)]
    sys.stdout.close()
    os.close(1)
    failed = _await(children)
    logging.shutdown()
    os._exit(failed)


def _await(children: Sequence[int]) -> int:
    """Waits for the ends of all; 0 where none failed, else an exit status."""
    failed, left = 0, set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and child in children:  # it could say nothing itself
            log.error("local-%d %s", children.index(child), ending(code))
        failed = failed or (NO_MEMORY if code == -signal.SIGKILL else abs(code))
    return failed


def _fork(index: int, args: argparse.Namespace) -> int:
    """Starts daemon `local-INDEX` in a child process; returns its pid."""
    with warnings.catch_warnings():
        # Python 3.12 and newer warn of other threads. What is imported here has those of numpy's OpenBLAS,
        # which ends them for a fork, and starts none of its own.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        form = logging.Formatter(
            f"%(asctime)s %(levelname)-7s local-{index}: %(message)s", datefmt="%H:%M:%S"
        )
        logging.getLogger().handlers[0].setFormatter(form)
        from flowspec.runtime.daemon import Daemon

        daemon = Daemon(
            host="127.0.0.1",
            port=0,
            name=f"local-{index}",
            machine=Machine(
                device="cpu",
                threads=1,
                cache_dir=args.cache_dir and args.cache_dir / f"local-{index}",
                sharers=args.count,
            ),
            lifeline_fd=0,
            emulation=args.emulate[index] if args.emulate else None,
            keys=args.keys and device_keyring(args.keys, f"local-{index}"),
        )
        daemon.stop_on_signals()
        line = json.dumps({"name": daemon.name, "port": daemon.port, "pid": os.getpid()}) + "\n"
        try:
            os.write(1, line.encode())
        except BrokenPipeError:  # the head was killed meanwhile, so nobody is there to serve
            os._exit(0)
        os.close(1)
        daemon.run()
        status = 0
    except FlowSpecError as error:
        log.error("%s", error)
    except MemoryError:
        status = NO_MEMORY
        log.exception("no memory is left")
    except BaseException:  # the top of a process: its log says why it ended
        log.exception("unexpected error")
        raise
    finally:
        logging.shutdown()
        os._exit(status)


if __name__ == "__main__":
    main()
