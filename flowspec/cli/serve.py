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
    add = parser.add_argument_group("server").add_argument
    text = "address to listen on (default: %(default)s, this machine only)"
    add("--host", default="127.0.0.1", metavar="NAME", help=text)
    text = "(default: %(default)s; 0 takes a free one)"
    add("--port", type=port_number, default=8000, metavar="N", help=text)
    text = "file with the API keys, one in each line; or set FLOWSPEC_API_KEY (needed beyond this machine)"
    add("--api-key-file", type=Path, metavar="FILE", help=text)
    text = Rare("let web pages of this origin use the API; may be repeated (default: none)")
    add("--cors", action="append", default=[], type=origin, metavar="ORIGIN", help=text)
    text = "answers at a time (default: %(default)s)"
    add("--parallel", type=positive, default=8, metavar="N", help=text)
    text = Rare("answers that wait; others are told to try later (default: %(default)s)")
    add("--queue", type=count, default=32, metavar="N", help=text)
    text = f"longest answer of a chat that names no length (default: {UNTIL_ITS_END})"
    add("--max-new-tokens", type=positive, metavar="N", help=text)
    text = Rare("what clients call the model (default: its own name)")
    add("--model-name", default="", metavar="NAME", help=text)
    text = Rare("no page and no live view, which show every prompt and answer to whoever has a key")
    add("--no-live", action="store_true", help=text)
    text = Rare(
        f"allow drafters that remember the texts of all users ({', '.join(SHARING)}): how fast an answer "
        "comes then tells of others' texts"
    )
    add("--share-texts", action="store_true", help=text)
    add("--json", action="store_true", help="print the address as a JSON object")
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
    totals, failures = Totals(), list[FlowSpecError]()

    def on_note(text: str) -> None:
        note(f"({text})")
        totals.note(text)

    def on_failure(error: FlowSpecError) -> None:
        failures.append(error)
        totals.note(f"failed: {error}")
        note(f"flowspec serve: failed: {error}; nothing is answered any more, so stop it and start it again")

    def on_ready(service: Service, stop: Callable[[], None]) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        url, plan = url_of(args.host, bound), llm.session.head.plan
        if not args.json and plan.model == BUNDLED:
            note(f"({TOY_TOLD})")
        if not args.json and llm.session.chosen is not None:
            for line in llm.session.chosen.lines(plan.stages):
                note(f"({line})")
        shown = f"serving {service.model} at {url}{' (with an API key)' if keys else ''}"
        shown += "" if page is None else f", live view at {page}"
        document = {"url": url, "page": page, "model": service.model, "needs_key": bool(keys)}
        print(json.dumps(document) if args.json else shown, flush=True)

    notes = Notes(on_note)
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
        except KeyboardInterrupt:  # a server that was stopped, as it is later
            if not args.json:
                note("(stopped)")
            return 0
        assert llm.tokenizer is not None
        llm.session.head.observe(totals.on_event)
        watch = None if args.no_live else watch_session(llm.session, llm.tokenizer.decode, keeps=True)
        if watch is not None:
            stack.callback(watch.close)
            notes.watch = watch

        def more(service: Service) -> list[Route]:
            return [] if watch is None else [*page_routes(), *live_routes(watch, service.stopping.is_set)]

        given = {"options": options, "access": access, "totals": totals, "more": more}
        asyncio.run(serve(llm, bound, **given, on_ready=on_ready, on_failure=on_failure))
        hear_signals()  # the loop's end has forgotten them
        if not (failures or args.json):
            note("(stopped)")
    return failures[0].exit_status if failures else 0
