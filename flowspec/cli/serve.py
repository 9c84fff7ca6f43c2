"""Serve the model by an OpenAI-compatible API, for editors, agents and programs, with tools (function calls)
and answers by a schema, and a page with a chat and a live view of the pipeline.

Listens at once, prints its addresses when it is ready, and runs until it is stopped (Ctrl-C, SIGTERM). See
docs/serving.md and docs/watching.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

from flowspec.cli.answer import open_llm
from flowspec.cli.options import (
    UNTIL_ITS_END,
    add_decoding_arguments,
    add_model_arguments,
    decoding_options,
    joined,
    positive,
)
from flowspec.cli.parser import Rare
from flowspec.cli.terminal import note
from flowspec.draft.registry import FALLBACK, SHARING
from flowspec.errors import FlowSpecError, InputError
from flowspec.interruption import hear_signals
from flowspec.llm import PARALLEL_MAX
from flowspec.model.files import BUNDLED, TOY_TOLD
from flowspec.runtime.cluster_file import read_drafters
from flowspec.runtime.session import RecoveryOptions
from flowspec.runtime.transport import is_loopback
from flowspec.runtime.watching import Notes, watch_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    group.add_argument(
        "--port",
        type=port_number,
        default=8000,
        metavar="N",
        help="(default: %(default)s; 0 takes a free one)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API keys, one in each line; or set FLOWSPEC_API_KEY (needed beyond this machine)",
    )
    group.add_argument(
        "--cors",
        action="append",
        default=[],
        type=origin,
        metavar="ORIGIN",
        help=Rare("let web pages of this origin use the API; may be repeated (default: none)"),
    )
    group.add_argument(
        "--parallel", type=positive, default=8, metavar="N", help="answers at a time (default: %(default)s)"
    )
    group.add_argument(
        "--queue",
        type=count,
        default=32,
        metavar="N",
        help=Rare("answers that wait; others are told to try later (default: %(default)s)"),
    )
    group.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help=f"longest answer of a chat that names no length (default: {UNTIL_ITS_END})",
    )
    group.add_argument(
        "--model-name",
        default="",
        metavar="NAME",
        help=Rare("what clients call the model (default: its own name)"),
    )
    group.add_argument(
        "--no-live",
        action="store_true",
        help=Rare("no page and no live view, which show every prompt and answer to whoever has a key"),
    )
    group.add_argument(
        "--share-texts",
        action="store_true",
        help=Rare(
            f"allow drafters that remember the texts of all users ({', '.join(SHARING)}): how fast an answer "
            "comes then tells of others' texts"
        ),
    )
    group.add_argument("--json", action="store_true", help="print the address as a JSON object")
    add_model_arguments(parser)
    add_decoding_arguments(parser)


def port_number(text: str) -> int:
    """A TCP port, for argparse."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)


def count(text: str) -> int:
    """A whole number from 0, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)


def origin(text: str) -> str:
    """`https://name:port` as browsers send it, for argparse."""
    scheme, _, host = text.partition("://")
    if scheme not in ("http", "https") or not host or "/" in host or text != text.lower():
        raise argparse.ArgumentTypeError(f"expected an origin such as http://localhost:3000, got {text!r}")
    return text


def full_path(model: str) -> str:
    """A folder or file with all of its path; a hub id, or a name of ours, as it is."""
    return os.path.realpath(model) if os.path.exists(model) else model


def check_sharing(args: argparse.Namespace) -> None:
    """Raises `InputError` for a drafter by which users could learn of each other's texts, unless they may."""
    placed = () if args.cluster is None else tuple(read_drafters(args.cluster))
    decoding = decoding_options(args, args.method, joined(args.drafter), args.chain)
    sharing = [name for name in decoding.drafters_for(args.model or BUNDLED, placed) if name in SHARING]
    if sharing and not args.share_texts:
        raise InputError(
            f"drafter {sharing[0]} remembers what all users ask and are answered, and guesses better where a "
            "text comes again: users who measure time could learn of each other's texts; add --share-texts "
            f"to allow that, or take --drafter {FALLBACK}"
        )


def run(args: argparse.Namespace) -> int:
    from starlette.routing import Route

    from flowspec.serve.guard import KEY_VARIABLE, LOCAL_NAMES, AccessRules, read_keys
    from flowspec.serve.live import PATHS, live_routes, page_routes
    from flowspec.serve.metrics import Totals
    from flowspec.serve.server import Loading, bind, loading_server, serve, url_of
    from flowspec.serve.service import QUEUE_MAX, Service, ServiceOptions, name_of

    for name, given, most in (("parallel", args.parallel, PARALLEL_MAX), ("queue", args.queue, QUEUE_MAX)):
        if given > most:
            raise InputError(f"--{name}: expected at most {most}, got {given}")
    check_sharing(args)
    keys = read_keys(args.api_key_file)
    local = is_loopback(args.host)
    if not keys and not local:
        raise InputError(
            f"beyond this machine others could use the model: give --api-key-file or {KEY_VARIABLE}, or "
            "leave out --host"
        )
    access = AccessRules(
        keys=keys,
        names=(*LOCAL_NAMES, args.host.lower()),
        origins=args.cors,
        free=() if args.no_live else PATHS,
    )
    options = ServiceOptions(
        parallel=args.parallel, queue=args.queue, new_tokens=args.max_new_tokens, model_name=args.model_name
    )
    totals = Totals()

    def told(text: str) -> None:
        note(f"({text})")
        totals.note(text)

    notes = Notes(told)
    failures: list[FlowSpecError] = []

    def failed(error: FlowSpecError) -> None:
        failures.append(error)
        totals.note(f"failed: {error}")
        note(f"flowspec serve: failed: {error}; nothing is answered any more, so stop it and start it again")

    def stopped() -> None:
        if not args.json:
            note("(stopped)")

    def ready(service: Service, stop: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop)
        url = url_of(args.host, bound)
        if args.json:
            print(
                json.dumps({"url": url, "page": page, "model": service.model, "needs_key": bool(keys)}),
                flush=True,
            )
        else:
            if llm.session.head.plan.model == BUNDLED:
                note(f"({TOY_TOLD})")
            if llm.session.chosen is not None:
                for line in llm.session.chosen.lines(llm.session.head.plan.stages):
                    note(f"({line})")
            view = "" if page is None else f", live view at {page}"
            print(
                f"serving {service.model} at {url}" + (" (with an API key)" if keys else "") + view,
                flush=True,
            )

    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with contextlib.ExitStack() as stack:
        bound = stack.enter_context(contextlib.closing(bind(args.host, args.port)))
        recovery_options = RecoveryOptions(on_note=notes)
        loading = Loading(args.model_name or name_of(full_path(args.model or BUNDLED)))
        page = None if args.no_live else url_of(args.host, bound).removesuffix("v1")
        is_told = args.json or page is None

        def progress(text: str, share: float) -> None:
            nonlocal is_told
            if not is_told:
                is_told = True  # once there is something to see: what cannot be loaded is refused before
                note(f"(the model is being loaded; {page} shows how far it is)")
            loading.take(text, share)

        try:
            with loading_server(bound, loading, access, has_page=not args.no_live):
                llm = stack.enter_context(open_llm(args, recovery_options, also=progress))
        except KeyboardInterrupt:
            stopped()
            return 0  # a server that was stopped, as it is later
        assert llm.tokenizer is not None
        llm.session.head.observe(totals.on_event)
        watch = None if args.no_live else watch_session(llm.session, llm.tokenizer.decode, keeps=True)
        if watch is not None:
            stack.callback(watch.close)
            notes.watch = watch

        def more(service: Service) -> list[Route]:
            return [] if watch is None else [*page_routes(), *live_routes(watch, service.stopping.is_set)]

        asyncio.run(
            serve(
                llm,
                bound,
                options=options,
                access=access,
                totals=totals,
                on_ready=ready,
                on_failure=failed,
                more=more,
            )
        )
        hear_signals()  # the loop's end has forgotten them
        if not failures:
            stopped()
    return failures[0].exit_status if failures else 0
