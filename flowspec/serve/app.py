"""The routes of the API."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flowspec.errors import ALIKE, FlowSpecError
from flowspec.model.reply.parts import new_call_id
from flowspec.runtime.answer import Answer, Piece
from flowspec.runtime.question import Question
from flowspec.serve import metrics, sse
from flowspec.serve.answers import Answers
from flowspec.serve.calls import CallDeltas
from flowspec.serve.completion_request import CompletionRequest, chat_wanted, completion_wanted
from flowspec.serve.documents import Choice, Form, Usage, usage_of
from flowspec.serve.fields import parse
from flowspec.serve.guard import Counted, Guard, read_body, refused, while_there
from flowspec.serve.refusals import SERVER, STOPPING, ApiError, of_error, unavailable
from flowspec.serve.responses.form import ResponseForm
from flowspec.serve.responses.pages import page_of
from flowspec.serve.responses.request import ResponseRequest, response_wanted
from flowspec.serve.responses.store import ResponseStore
from flowspec.serve.service import Service

KEEP_ALIVE_S = 10.0
"""How often a stream that has nothing to say says so."""
_PATH_CHARS_MAX = 120
"""Of an unknown path, what is compared with those that are there."""
_PLACE = re.compile(r"{[^}]*}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Who may come in: API keys, else the names by which this server is called (none: any), and the origins
    of web pages that may.

    `free` are paths that need no key, as `Guard` takes them.
    """

    keys: Sequence[bytes] = ()
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    free: Sequence[str] = ()


def rules_of(access: AccessRules) -> list[Middleware]:
    """Around an app, lets in who may."""
    guard = Middleware(Guard, keys=access.keys, names=access.names, free=access.free, origins=access.origins)
    if not access.origins:
        return [guard]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(access.origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After"],
    )
    return [cors, guard]


class AnswerForm(Protocol):
    """How the answers to one request are told: as one document, or as the frames of a stream, in this order:
    `opening`, then `said` and `over` for each choice, then `closing`, or `failed` instead of what is left."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...
    def opening(self, choices: Sequence[Choice]) -> bytes: ...
    def said(self, index: int, piece: Piece, calls: Sequence[dict[str, Any]]) -> bytes: ...
    def over(self, index: int, answer: Answer) -> bytes: ...
    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...


Wanted = TypeVar("Wanted", bound=CompletionRequest)


class AnswerRoute(Generic[Wanted]):
    """`/v1/chat/completions` and its like, an ASGI app: `read` says what a body wants, `form_of` how that is
    told."""

    def __init__(
        self,
        service: Service,
        read: Callable[[dict[str, Any]], Wanted],
        form_of: Callable[[Wanted, list[Question]], AnswerForm],
    ) -> None:
        self._service = service
        self._read = read
        self._form_of = form_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked_s = time.monotonic()
        try:
            body = await read_body(Request(scope, receive))
        except ClientDisconnect:
            return
        wanted = await self._service.reading(lambda: self._read(parse(body)))
        self._service.check_alive()
        await while_there(receive, self._answer(wanted, asked_s, scope, receive, send))

    async def _answer(
        self, wanted: Wanted, asked_s: float, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            questions = await self._service.questions(wanted)
        except ApiError as error:
            raise wanted.named(error) from None
        choices = _choices(wanted, questions, await self._service.echoed(wanted, questions))
        form = self._form_of(wanted, questions)
        async with self._asked(questions, asked_s) as asking:
            if wanted.is_streamed:
                await self._stream(wanted, questions, choices, asking, form, send)
            else:
                found = await self._whole(wanted, questions, choices, await asking, form)
                await JSONResponse(found)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _asked(
        self, questions: list[Question], asked_s: float
    ) -> AsyncIterator[asyncio.Future[Answers]]:
        """The answers, once there is room for them; at the end nobody waits for them any more."""
        asking = asyncio.ensure_future(self._service.ask(questions, asked_s))
        try:
            yield asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled() and asking.exception() is None:
                asking.result().close()

    async def _whole(
        self,
        wanted: Wanted,
        questions: list[Question],
        choices: list[Choice],
        answers: Answers,
        form: AnswerForm,
    ) -> dict[str, Any]:
        async for item in answers.events(KEEP_ALIVE_S):
            if item is not None:
                place, event = item
                choices[place].add(self._checked(event))
        return form.whole(choices, usage_of(_lengths(wanted, questions), choices))

    async def _stream(
        self,
        wanted: Wanted,
        questions: list[Question],
        choices: list[Choice],
        asking: asyncio.Future[Answers],
        form: AnswerForm,
        send: Send,
    ) -> None:
        """Events as they come. What goes wrong before there is anything to say is refused with a status,
        later with an event."""
        calls = [CallDeltas(choice.new_id) for choice in choices]
        has_begun = False

        async def say(frame: Callable[..., bytes], *of: Any) -> None:
            """Sends a frame, which is made behind those that a stream begins with."""
            nonlocal has_begun
            opening = b""
            if not has_begun:
                has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
                opening = form.opening(choices)
            await send({"type": "http.response.body", "body": opening + frame(*of), "more_body": True})

        try:
            while not (await asyncio.wait([asking], timeout=KEEP_ALIVE_S))[0]:
                await say(sse.keep_alive)
            async for item in asking.result().events(KEEP_ALIVE_S):
                if item is None:
                    await say(sse.keep_alive)
                    continue
                place, found = item
                event = self._checked(found)
                if isinstance(event, Answer):
                    choices[place].add(event)
                    await say(form.over, place, event)
                else:
                    await say(form.said, place, event, calls[place].add(event.parts))
        except ApiError as error:
            if not has_begun:
                raise
            await say(form.failed, error)
        else:
            await say(form.closing, choices, usage_of(_lengths(wanted, questions), choices))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _checked(self, event: Any) -> Any:
        """The event; raises `ApiError` for an error, and for an answer that the server's end cut off."""
        if isinstance(event, FlowSpecError):
            raise of_error(event)
        if isinstance(event, Answer) and event.finish_reason == "cancelled":
            raise unavailable(STOPPING)
        return event


def _choices(wanted: CompletionRequest, questions: list[Question], echoed: list[str]) -> list[Choice]:
    """The choices where nothing of them is there yet but what is `echoed`."""
    calls = [None if question.form is None else question.form.calls for question in questions]
    return [
        Choice(place // wanted.count, partial(new_call_id, 0 if found is None else found.id_chars), text)
        for place, (found, text) in enumerate(zip(calls, echoed, strict=True))
    ]


def _lengths(wanted: CompletionRequest, questions: list[Question]) -> list[int]:
    return [len(question.prompt) for question in questions[:: wanted.count]]


def response_routes(service: Service) -> list[Route]:
    """The Responses API, with what it keeps."""
    store = ResponseStore()

    def form(wanted: ResponseRequest, questions: list[Question]) -> ResponseForm:
        return ResponseForm(service.model, wanted, questions[0].sampling, store.keep)

    async def kept(request: Request) -> Response:
        name = request.path_params["name"]
        for field in request.query_params:
            text = f"{field!r:.80}: expected no query, a response is as it was given"
            raise ApiError(400, text, field[:80], "unknown_parameter")
        is_told = request.method != "DELETE"
        found = store.find(name) if is_told else None
        if found is None and (is_told or not store.forget(name)):
            raise store.missing(name, None, "response_not_found")
        if found is None:
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        return Response(found.document, media_type="application/json")

    async def input_items(request: Request) -> Response:
        name = request.path_params["name"]
        found = store.find(name)
        if found is None:
            raise store.missing(name, None, "response_not_found")
        return JSONResponse(page_of(found.input_items, request.query_params.multi_items()))

    return [
        Route("/v1/responses", AnswerRoute(service, partial(response_wanted, store), form), methods=["POST"]),
        Route("/v1/responses/{name}", kept, methods=["GET", "DELETE"]),
        Route("/v1/responses/{name}/input_items", input_items),
    ]


def build_app(service: Service, access: AccessRules, more: Sequence[BaseRoute] = ()) -> ASGIApp:
    """The whole server; `more` are routes beside the API's."""

    def form(wanted: CompletionRequest, *, is_chat: bool) -> Form:
        return Form(
            service.model,
            service.fingerprint,
            is_chat=is_chat,
            has_logprobs=wanted.params.logprobs is not None,
            has_usage=wanted.includes_usage,
        )

    def chat_form(wanted: CompletionRequest, questions: list[Question]) -> Form:
        return form(wanted, is_chat=True)

    def text_form(wanted: CompletionRequest, questions: list[Question]) -> Form:
        return form(wanted, is_chat=False)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": service.models()})

    async def model(request: Request) -> Response:
        found = next((each for each in service.models() if each["id"] == request.path_params["name"]), None)
        if found is None:
            name = request.path_params["name"]
            raise ApiError(
                404,
                f"the model {name!r:.120} does not exist here; this server has {service.model!r}",
                "model",
                "model_not_found",
            )
        return JSONResponse(found)

    async def health(request: Request) -> Response:
        status, found = service.health()
        return JSONResponse(found, status)

    async def cluster(request: Request) -> Response:
        return JSONResponse(service.cluster())

    async def measured(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    routes = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/chat/completions", AnswerRoute(service, chat_wanted, chat_form), methods=["POST"]),
        Route("/v1/completions", AnswerRoute(service, completion_wanted, text_form), methods=["POST"]),
        *response_routes(service),
        Route("/v1/cluster", cluster),
        Route("/health", health),
        Route("/metrics", measured),
    ]
    slashed = [Route(f"{route.path}/", route.endpoint, methods=route.methods) for route in routes]
    paths = [str(getattr(route, "path", "")) for route in (*routes, *more)]
    known = frozenset(paths)

    def route_of(path: str) -> str:
        path = path if path in known else path.rstrip("/")
        if path in known:
            return path
        if path.startswith("/v1/responses/") and path.endswith("/input_items"):
            return "/v1/responses/{name}/input_items"
        for named in ("/v1/models/", "/v1/responses/"):
            if path.startswith(named):
                return f"{named}{{name}}"
        return "other"

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _refused_http(request, error, paths)

    app = Starlette(
        routes=[*slashed, *routes, *more],  # first, for a name may be any path
        middleware=rules_of(access),
        exception_handlers={ApiError: _refuse, HTTPException: refuse_http, Exception: _fail},
    )
    app.router.redirect_slashes = False  # what is not there is told of, with what is
    return Counted(
        app, route_of, service.metrics.requested
    )  # around all else, so that it sees what a mistake of ours is answered with


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refused(error)


def _refused_http(request: Request, error: HTTPException, paths: Sequence[str]) -> Response:
    """What Starlette refuses by itself: unknown paths, which are told those that are there, and methods."""
    path, headers = request.url.path, dict(error.headers or {})
    allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
    if error.status_code == 405:
        headers["Allow"] = allowed
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    told = {
        404: f"there is no {path!r:.120} here; {_there_is(path, paths)}",
        405: f"{request.method} is not a method of {path!r:.120}; expected {allowed}",
    }
    return refused(ApiError(error.status_code, told.get(error.status_code, error.detail), headers=headers))


def _there_is(path: str, paths: Sequence[str]) -> str:
    """All paths as documents write them: first those that this one may be meant for, the most alike before
    others and asked after, then the rest in their own order."""
    asked = path[:_PATH_CHARS_MAX].rstrip("/")

    def likeness(known: str) -> float:
        found = SequenceMatcher(None, asked, known, autojunk=False).ratio()
        if asked and known.endswith(asked):  # all but /v1 is there
            return 1 + found
        return found if found >= ALIKE else 0

    ordered = sorted(paths, key=likeness, reverse=True)  # keeps the order of equals
    meant, *others = (_PLACE.sub("NAME", each) for each in ordered)
    if likeness(ordered[0]):
        return f"did you mean {meant}? There is also {', '.join(others)}"
    return f"there is {', '.join((meant, *others))}"


async def _fail(request: Request, error: Exception) -> Response:
    """A mistake of ours; the server logs it."""
    return refused(ApiError(500, "the server failed; its log tells why", kind=SERVER))
