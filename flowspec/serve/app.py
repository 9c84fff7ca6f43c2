"""The routes of the API."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec.errors import ALIKE
from flowspec.runtime.answer import Piece
from flowspec.serve import metrics
from flowspec.serve.answers import Event
from flowspec.serve.completion_form import Choice, CompletionForm
from flowspec.serve.completion_request import CompletionRequest, RequestBody, chat_wanted, completion_wanted
from flowspec.serve.documents import JSON, KEEP_ALIVE, STREAM_HEADERS, ApiError, json_response
from flowspec.serve.guard import AccessRules, Counted, read_body, rules_of, while_there
from flowspec.serve.responses.form import ResponseForm, page_of
from flowspec.serve.responses.request import ResponseBody, named, response_wanted
from flowspec.serve.responses.store import ResponseStore
from flowspec.serve.service import Service

KEEP_ALIVE_S = 10.0  # how often a stream that has nothing to say says so


AnswerForm = CompletionForm | ResponseForm
"""How the answers to one request are told: `whole`, as one document, or as the frames of a stream, in this
order: `begin`, then `say` and `end` for each choice, then `finish`, or `fail` instead of what is left."""


@dataclass(frozen=True, slots=True)
class AnswerRoute:
    """`/v1/chat/completions` and its like: `read` says what a body wants, `form_of` how that is told."""

    service: Service
    read: Callable[[bytes], CompletionRequest[Any]]
    form_of: Callable[[CompletionRequest[Any], list[Choice]], AnswerForm]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_s = time.monotonic()
        try:
            body = await read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        wanted = await self.service.reading(lambda: self.read(body))
        self.service.check_alive()
        await while_there(receive, self._answer(wanted, asked_s, scope, receive, send))

    async def _answer(
        self, wanted: CompletionRequest[Any], asked_s: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            choices = await self.service.choices(wanted)
        except ApiError as error:
            raise named(error, wanted.places) from None
        form = self.form_of(wanted, choices)
        answers = self.service.ask(choices, asked_s)
        events = answers.events(KEEP_ALIVE_S)
        try:
            if wanted.body.stream:
                first = await anext(events)  # what goes wrong before is refused with a status
                frames = _frames(choices, first, events, form)
                response: Response = StreamingResponse(frames, headers=STREAM_HEADERS)
            else:
                async for found in events:
                    if found is not None:
                        choice, event = found
                        choice.add(event)
                response = Response(form.whole(choices), media_type=JSON)
            await response(scope, receive, send)
        finally:
            answers.close()


async def _frames(
    choices: list[Choice], first: Event | None, events: AsyncIterator[Event | None], form: AnswerForm
) -> AsyncIterator[bytes]:
    """What a stream says, as it comes, of which the `first` is there; what goes wrong is said last."""
    yield form.begin(choices) + _frame(first, form)
    try:
        async for found in events:
            yield _frame(found, form)
    except ApiError as error:
        yield form.fail(error)
    else:
        yield form.finish(choices)


def _frame(found: Event | None, form: AnswerForm) -> bytes:
    if found is None:
        return KEEP_ALIVE
    choice, event = found
    if isinstance(event, Piece):
        return form.say(choice, event)
    choice.add(event)
    return form.end(choice)


def response_routes(service: Service) -> list[Route]:
    store = ResponseStore()

    def form(wanted: CompletionRequest[ResponseBody], choices: list[Choice]) -> ResponseForm:
        return ResponseForm(service.model, wanted, choices[0].question.sampling, store.keep)

    async def response(request: Request) -> Response:
        for field in request.query_params:
            text = f"{field!r:.80}: expected no query, a response is as it was given"
            raise ApiError(400, text, field[:80], "unknown_parameter")
        name = request.path_params["name"]
        found = store.get(name, None, "response_not_found")
        if request.method != "DELETE":
            return Response(found.document, media_type=JSON)
        store.forget(name)
        return json_response({"id": name, "object": "response", "deleted": True})

    async def input_items(request: Request) -> Response:
        found = store.get(request.path_params["name"], None, "response_not_found")
        return json_response(page_of(found.input_items, request.query_params.multi_items()))

    return [
        Route("/v1/responses", AnswerRoute(service, partial(response_wanted, store), form), methods=["POST"]),
        Route("/v1/responses/{name}", response, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", input_items),
    ]


def build_app(service: Service, access: AccessRules, more: Sequence[Route] = ()) -> ASGIApp:
    """The whole server; `more` are routes beside the API's."""

    def form(wanted: CompletionRequest[RequestBody], choices: list[Choice]) -> CompletionForm:
        return CompletionForm(service.model, service.fingerprint, wanted)

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [service.listing()]})

    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return json_response(service.listing())

    async def health(request: Request) -> Response:
        return json_response(*service.health())

    async def cluster(request: Request) -> Response:
        return json_response(service.cluster())

    async def measured(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", AnswerRoute(service, chat_wanted, form), methods=["POST"]),
        Route("/v1/completions", AnswerRoute(service, completion_wanted, form), methods=["POST"]),
        *response_routes(service),
        Route("/v1/cluster", cluster),
        Route("/health", health),
        Route("/metrics", measured),
    ]
    slashed = [Route(f"{route.path}/", route.endpoint, methods=route.methods) for route in routes]
    all_routes = [*routes, *more]
    refuse_http = partial(_refuse_http, [route.path for route in all_routes])

    def route_of(path: str) -> str:
        path = path.rstrip("/") or "/"
        return next((route.path_format for route in all_routes if route.path_regex.match(path)), "other")

    app = Starlette(
        routes=[*slashed, *all_routes],  # first, for a name may be any path
        middleware=rules_of(access),
        exception_handlers={HTTPException: refuse_http, ApiError: _refuse, Exception: _refuse},
    )
    app.router.redirect_slashes = False  # what is not there is told of, with what is
    # around all else, so that it sees what a mistake of ours is answered with
    return Counted(app, route_of, service.metrics.requested)


async def _refuse(request: Request, error: Exception) -> Response:
    """What is refused, or a mistake of ours; the server logs it."""
    if not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; its log tells why")
    return error.response


async def _refuse_http(paths: Sequence[str], request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: unknown paths, which are told those that are there, and methods."""
    assert isinstance(error, HTTPException)
    path, headers, text = request.url.path, dict(error.headers or {}), error.detail
    if error.status_code == 404:
        text = f"there is no {path!r:.120} here; {_there_is(path, paths)}"
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        text = f"{request.method} is not a method of {path!r:.120}; expected {headers['Allow']}"
    return ApiError(error.status_code, text, headers=headers).response


def _there_is(path: str, paths: Sequence[str]) -> str:
    """All paths as documents write them, the most alike first, the rest in their own order."""
    asked = path[:120].rstrip("/")

    def likeness(known: str) -> float:
        found = SequenceMatcher(None, asked, known, autojunk=False).ratio()
        if asked and known.endswith(asked):  # all but /v1 is there
            return 1 + found
        return found if found >= ALIKE else 0

    ordered = sorted(paths, key=likeness, reverse=True)  # keeps the order of equals
    meant, *others = (re.sub(r"{[^}]*}", "NAME", each) for each in ordered)
    if likeness(ordered[0]):
        return f"did you mean {meant}? There is also {', '.join(others)}"
    return f"there is {', '.join((meant, *others))}"
