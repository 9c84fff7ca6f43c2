"""The model behind the API: turns what requests want into questions, and knows how the cluster is."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.errors import InputError
from flowspec.llm import LLM
from flowspec.model.chat_template import names_in
from flowspec.model.grammar import check_grammar, check_library, library_version, rule_of
from flowspec.model.reply.bound import BoundReply, bound_reply, may_think_first
from flowspec.model.reply.form import ReplyForm, form_of, format_of, thoughts_of
from flowspec.model.reply.parts import Tool, new_call_id
from flowspec.model.text import Bound, Messages, Tokenizer, TooLongError
from flowspec.runtime.question import Question
from flowspec.serve.answers import Answers, RequestQueue
from flowspec.serve.completion_form import Choice, fingerprint_of
from flowspec.serve.completion_request import CompletionRequest, Prompt
from flowspec.serve.documents import STOPPING, ApiError, invalid, of_error, unsupported
from flowspec.serve.messages import ToolUse, forbids_thoughts, variables_of
from flowspec.serve.metrics import Metrics, Totals
from flowspec.version import __version__

log = logging.getLogger("flowspec.serve")

Found = TypeVar("Found")
QUEUE_MAX = 4096
THREADS = 2
"""That read requests; as many turn short prompts into tokens, and as many long ones, so that none of these
waits for another kind."""
LONG_CHARS = 1 << 16
"""From so many characters on a prompt is long: its tokens take longer than a tenth of a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """How much is answered at once, how long answers get that name no length (None: until their end), and by
    what name the model goes (empty: its own)."""

    parallel: int = 8
    queue: int = 32
    new_tokens: int | None = None
    model_name: str = ""


def _chars(prompt: Prompt, tools: Sequence[Tool]) -> int:
    """Characters of a prompt's texts, about; none of one that has its tokens."""
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, list):
        return 0
    said = sum(len(str(value)) for message in prompt for value in message.values())
    return said + sum(len(str(tool.parameters)) + len(tool.description) for tool in tools)


def name_of(model: str) -> str:
    """What clients call the model: a hub id as it is, a folder or file by its last name."""
    return Path(model).name if Path(model).is_absolute() else model


class Service:
    """What the routes stand on. Made in the event loop; `totals` counts what the head is told of."""

    def __init__(self, llm: LLM, options: ServiceOptions, totals: Totals) -> None:
        session, plan = llm.session, llm.session.head.plan
        self.session = session
        self.options = options
        self.totals = totals
        self.model = options.model_name or name_of(plan.model)
        self.context = plan.context
        self.created = int(time.time())
        self.gate = RequestQueue(options.parallel, options.queue)
        self.metrics = Metrics(self.model, session.head, totals, self.gate.loads)
        self._open: set[Answers] = set()
        self.stopping = asyncio.Event()
        assert llm.tokenizer is not None
        self._llm = llm
        self._tokenizer: Tokenizer = llm.tokenizer
        self._unheeded: set[str] = set()
        self._readers, self._short, self._long = (
            ThreadPoolExecutor(THREADS, name) for name in ("read", "short", "long")
        )

    @property
    def fingerprint(self) -> str:
        head = self.session.head
        return fingerprint_of(head.plan, head.arithmetic, library_version())

    # ------------------------------------------------------------------------------------------- requests

    async def choices(self, wanted: CompletionRequest[Any]) -> list[Choice]:
        """The answers that a request wants: all choices of its first prompt, then those of the next."""
        self.check_name(wanted.body.model or self.model)  # some clients send an empty one
        for field, why in wanted.body.unheeded.items():
            if field not in self._unheeded:  # each once
                self._unheeded.add(field)
                log.warning("requests have the field %s, which is taken and does nothing: %s", field, why)
        found, gone = [], threading.Event()
        bound = Bound(tokens=self.context, is_wanted=lambda: not gone.is_set())
        try:
            for place, prompt in enumerate(wanted.prompts):
                is_long = await self.reading(partial(_chars, prompt, wanted.tool_use.tools)) >= LONG_CHARS
                work = partial(self._choices, place, wanted, bound)
                threads = self._long if is_long else self._short
                found += await asyncio.get_running_loop().run_in_executor(threads, work)
        finally:
            gone.set()  # the client may be
        return found

    async def reading(self, work: Callable[[], Found]) -> Found:
        """Reads a request, in a thread: what takes long where it is long."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def ask(self, choices: Sequence[Choice], asked_s: float) -> Answers:
        """Has them answered; raises `ApiError` where the server cannot now."""
        self.check_alive()
        answers = Answers(self._llm, self.gate, self.metrics, choices, asked_s)
        self._open.add(answers)
        answers.task.add_done_callback(lambda _: self._open.discard(answers))
        return answers

    def check_name(self, name: str) -> None:
        """Raises `ApiError` for another model than the one that is served."""
        if name != self.model:
            message = f"the model {name!r:.120} does not exist here; this server has {self.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def check_alive(self) -> None:
        """Raises `ApiError` when nothing can be answered any more."""
        if self.stopping.is_set():
            raise of_error(STOPPING)
        if self.session.head.failure is not None:
            raise of_error(str(self.session.head.failure))

    def _choices(self, place: int, wanted: CompletionRequest[Any], bound: Bound) -> list[Choice]:
        """All choices of a prompt, which begin with its text where that is echoed."""
        prompt, echoed = wanted.prompts[place], ""
        question = self._question(prompt, wanted, bound)
        if not isinstance(prompt, list) and wanted.body.echo:
            echoed = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        calls = None if question.form is None else question.form.calls
        new_id = partial(new_call_id, 0 if calls is None else calls.id_chars)
        first, sampling = place * wanted.body.count, question.sampling
        found = []
        for number in range(wanted.body.count):
            drawn = replace(question, sampling=structs.replace(sampling, seed=sampling.seed + number))
            found.append(Choice(drawn, first + number, place, new_id, echoed))
        return found

    def _question(self, prompt: Prompt, wanted: CompletionRequest[Any], bound: Bound) -> Question:
        form, reply, param = None, None, "messages" if isinstance(prompt, list) else "prompt"
        try:
            if isinstance(prompt, str):
                ids = tuple(self._tokenizer.encode(prompt, bound))
            elif isinstance(prompt, list):
                ids, form, reply = self._encode_chat(prompt, wanted, bound)
            else:
                ids = prompt
                self._check_tokens("prompt", ids)
        except TooLongError as error:
            raise self._too_long(param, f"at least {error.tokens}") from None
        except InputError as error:
            raise ApiError(400, str(error), param) from None
        if not ids:
            raise ApiError(400, "prompt: expected at least one token, got none", "prompt")
        if len(ids) >= self.context:
            raise self._too_long(param, f"{len(ids)}")
        left = self.context - len(ids)
        most = min(wanted.params.max_new_tokens or self.options.new_tokens or left, left)
        try:
            question = self._llm.question_of(ids, replace(wanted.params, max_new_tokens=most), form, reply)
        except InputError as error:
            param = "tools" if reply is not None else wanted.bound_by or "temperature"
            raise ApiError(400, str(error), param) from None
        self._check_tokens("logit_bias", [token for token, _ in question.sampling.logit_bias])
        self._check_tokens("stop_token_ids", wanted.params.stop_token_ids)
        return question

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        size = self.session.spec.vocabulary
        if wrong := [token for token in tokens if token >= size]:
            raise invalid(name, f"token ids from 0 to {size - 1}", wrong[0])

    def _too_long(self, param: str, count: str) -> ApiError:
        most = min(self.session.spec.context_max, limits.CONTEXT_MAX)
        larger = f", or start the server with --context, {most} at most" if most > self.context else ""
        text = f"the context holds {self.context} tokens with the answer, but the prompt has {count}; "
        return ApiError(400, f"{text}shorten it{larger}", param, "context_length_exceeded")

    def _encode_chat(
        self, messages: Messages, wanted: CompletionRequest[Any], bound: Bound
    ) -> tuple[tuple[int, ...], ReplyForm | None, BoundReply | None]:
        """The tokens of a dialogue with its tools, the form of the answer, and what binds its calls."""
        tokenizer, use, tools = self._tokenizer, wanted.tool_use, wanted.tool_use.tools
        if not tokenizer.has_chat_template:
            return tuple(tokenizer.encode_chat(messages, bound)), None, None
        template = tokenizer.template(tools)
        names = names_in(template)
        can_think = tokenizer.is_in_channels or thoughts_of(template) is not None
        body, continues = wanted.body, bool(wanted.body.continue_final_message)
        named = body.chat_template_kwargs or {}
        variables = variables_of(named, body.enable_thinking, wanted.effort, names, can_think=can_think)
        for place, message in enumerate(messages):
            if "tool_calls" in message and "tool_calls" not in names.fields | names.variables:
                text = "this model's chat template has no calls; expected nothing"
                raise unsupported(f"messages[{place}].tool_calls", text)
        lack = ""
        if tools and not tokenizer.takes_tools(messages, tools, variables):
            lack = "this model's chat template has no place for tools"
        elif tools and format_of(template, tokenizer.added_tokens) is None:
            lack = "how this model writes calls of tools is not known here"
        if lack:
            raise unsupported("tools", f"{lack}; expected nothing, or tool_choice none")
        rendered = tokenizer.render_chat(messages, tools, variables, continues=continues)
        ids = tuple(tokenizer.encode_rendered(rendered, bound))
        form = form_of(template, tokenizer.added_tokens, rendered.text, tools, is_single=use.is_single)
        if form is None:
            return ids, None, None
        is_closed = continues or (
            form.thoughts is not None and rendered.text.rstrip().endswith(form.thoughts.end)
        )
        may_think = not is_closed and not forbids_thoughts(variables)
        if wanted.params.bound is not None:  # a text and no calls, which `question_of` binds by its form
            has_parts = may_think_first(form, *wanted.params.bound, may_think=may_think)
            return ids, form if has_parts else None, None
        if use.bound is None:
            return ids, form, None
        is_either = use.bound.answer is not None and not use.bound.is_required
        form = replace(form, is_bound=True, is_either=is_either)
        return ids, form, self._bound(form, use, wanted.bound_by, may_think=may_think)

    def _bound(self, form: ReplyForm, use: ToolUse, bound_by: str, *, may_think: bool) -> BoundReply:
        """What binds a reply with calls; the field `bound_by` says which text there may be instead."""
        assert use.bound is not None
        added, count = self._tokenizer.added_tokens, self.session.spec.vocabulary
        tokens = {name: token for name, token in added.items() if token < count}
        param = bound_by or "tools"
        try:
            check_library()
            if use.bound.answer is not None:
                check_grammar(*use.bound.answer)
                rule_of(*use.bound.answer)
            param = "tools"
            found = bound_reply(form, use.bound, tokens, may_think=may_think)
            check_grammar("reply", found.text, len(found.marks))
        except InputError as error:
            raise ApiError(400, f"{param}: {str(error).removeprefix('reply: ')}", param) from None
        return found

    # --------------------------------------------------------------------------------------------- the end

    def stop(self) -> None:
        """Takes no requests any more, nor lets in those that wait; what is being answered goes on."""
        self.stopping.set()
        self.gate.close(of_error(STOPPING))

    def cancel_all(self) -> None:
        for answers in self._open:
            answers.cancel()

    async def close(self) -> None:
        """Ends all answers, and waits until they are over."""
        self.stop()
        self.cancel_all()
        while self._open:
            await asyncio.wait([answers.task for answers in self._open])
        for threads in (self._readers, self._short, self._long):
            threads.shutdown(cancel_futures=True)

    # ---------------------------------------------------------------------------------------------- how it is

    def health(self) -> tuple[dict[str, Any], int]:
        """Document and status, 200 while prompts can be answered, if only when the pipeline is formed anew.
        It is told to anybody, so it names no device, model or number."""
        head = self.session.head
        state, reason = "ok", None
        if head.failure is not None:
            state, reason = "failed", "the cluster has failed; /v1/cluster tells why"
        elif self.stopping.is_set():
            state, reason = "stopping", STOPPING
        elif not head.is_formed:
            state, reason = "reforming", "the pipeline is being formed anew; answers go on when it is there"
        return {"status": state, "reason": reason}, 503 if state in ("failed", "stopping") else 200

    def cluster(self) -> dict[str, Any]:
        session, plan, failure = self.session, self.session.head.plan, self.session.head.failure
        return {
            "version": __version__,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "dtype": plan.dtype,
            "cache": plan.cache,
            "arithmetic": session.head.arithmetic,
            "context": plan.context,
            "layers": plan.layer_count,
            "state": self.health()[0]["status"],
            "failure": None if failure is None else str(failure),
            "running": self.gate.running,
            "waiting": self.gate.waiting,
            "method": session.decoding.method,
            "stages": session.stages_report(),
            "drafters": session.drafters_report(),
            "plan": None if session.chosen is None else session.chosen.report(),
            "losses": self.totals.losses,
            "notes": list(self.totals.notes),
        }

    def listing(self) -> dict[str, Any]:
        """The one model."""
        own = {"created": self.created, "owned_by": "flowspec", "context_length": self.context}
        return {"id": self.model, "object": "model", **own}
