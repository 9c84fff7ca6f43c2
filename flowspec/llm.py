"""A language model on a cluster, for programs: prompts in, answers out. The commands and the server stand on
it, too. See docs/api.md."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard, cast, overload

from msgspec import structs

from flowspec.core.head.admission import RESERVED_TOKENS
from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar
from flowspec.core.protocol.precision import ACTIVATIONS, CACHE_AUTO, CACHES
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError, meant
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.grammar import check_grammar, library_version
from flowspec.model.reply.bound import BoundReply, Wanted, bound_reply
from flowspec.model.reply.form import ReplyForm
from flowspec.model.text import Messages, Tokenizer, check_tokenizer, recommended
from flowspec.runtime.answer import Answer, AnswerStream, AsyncAnswerStream
from flowspec.runtime.cluster_text import Cluster
from flowspec.runtime.conversations import Conversations
from flowspec.runtime.decoding import Decoding, choose_decoding, choose_drafter
from flowspec.runtime.head import Head
from flowspec.runtime.pipeline_connections import Progress
from flowspec.runtime.question import Question
from flowspec.runtime.sampling_params import SamplingParams
from flowspec.runtime.session import ClusterOptions, RecoveryOptions, Session, open_session
from flowspec.validation import checked

PARALLEL_MAX = limits.CONVERSATIONS_MAX // 2
"""Answers at once that are sure to find room beside those that just ended."""
CONVERSATIONS_KEPT = limits.CONVERSATIONS_MAX * 3 // 4
"""In use or idle; the others are room for those that are over and whose segments are still in the pipeline.
"""
PARALLEL_DEFAULT = 8
"""Answers at a time where many prompts are asked at once."""
LOCAL_DEFAULT = 4
"""Processes where no cluster is named."""
PROMPTS = "a text, token ids, or messages with role and content"

log = logging.getLogger("flowspec")
_ELSEWHERE = {"lark": "grammar", "schema": "json_schema", "response_format": "json_schema"}
"""What is called otherwise in documents that people come from."""

Prompt = str | list[int] | Messages
"""A text, token ids, or a dialogue of `{"role": ..., "content": ...}`."""


class LLM:
    """A language model whose layers are spread over devices, ready to answer.

    `model`: `bundled` (a small one that comes with FlowSpec), a folder, a GGUF file or a hub id.
    `cluster`: a cluster file, or a `Cluster`, whose devices run it; without one `local` processes on this
    machine do (4).
    `layers`: how many each device runs, in order; None: the planner decides, which leaves a device out where
    answers are faster without it, unless `all_devices` is true.
    `dtype`: `float32`, `bfloat16`, `float16`, `int8`, `int4`, or `gguf` (as a GGUF file packs its matrices);
    None: the checkpoint's, `gguf` for a packed GGUF file.
    `cache`: how keys and values are held: `auto` (in float16; in float32 where that is the dtype),
    `float16`, or `q8_0`, which takes half the memory of 16 bits.
    `context`: tokens of a prompt and its answer together, for which memory is reserved; None: 4096, or the
    model's limit.
    `method`, `drafter` (one name or several; none given: the cluster file's, else `bundled` for the bundled
    model or the best published one that is here, with `ngram` beside it), `chain`: how answers are made, as
    the commands' flags of these names; they change the speed and never an answer.
    `enable_prefix_caching`: whether prompts begin with what the devices have computed of others that begin
    alike.
    `keep_learnt`: whether to begin with what earlier runs with the same models and devices learnt of the
    drafters, and to keep what is learnt; it changes the speed and never an answer.
    `wait_s`: how long answers wait, in seconds, for a device that is needed to come back; None: for ever.
    `on_note`: told in a line of what happens meanwhile, such as a device that is lost; in another thread.
    None: the logger `flowspec` is.
    `on_progress`: told how far the devices have come with their layers, as `(text, share from 0 to 1)`.

    Opening loads the layers: seconds for the bundled model, minutes for large ones. Raises `InputError` for
    what cannot be (a model, a file, a split), `ModelDoesNotFitError` for a model that the devices have no
    room for, and `ClusterError` for devices that do not do their part.

    Close it, or use it as a context manager: local processes end then, at the latest with this process.
    Threads may share it; answers that are asked for at the same time share the pipeline.

    >>> with LLM("bundled", local=1) as llm:
    ...     llm.generate("What is 1 + 2?").text
    '1 + 2 = 3.'
    """

    def __init__(
        self,
        model: str | Path = BUNDLED,
        *,
        cluster: str | Path | Cluster | None = None,
        local: int | None = None,
        layers: Sequence[int] | None = None,
        all_devices: bool = False,
        dtype: str | None = None,
        cache: str = CACHE_AUTO,
        context: int | None = None,
        method: str | None = None,
        drafter: str | Sequence[str] = (),
        chain: str | None = None,
        enable_prefix_caching: bool = True,
        keep_learnt: bool = True,
        wait_s: float | None = None,
        on_note: Callable[[str], None] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        if cluster is not None and local is not None:
            raise InputError("expected a cluster or a number of local processes, got both")
        if local is not None and (type(local) is not int or local < 1):
            raise InputError(f"local: expected a number of processes from 1, got {local!r:.80}")
        if dtype not in (None, *ACTIVATIONS):
            raise InputError(f"dtype: expected one of {', '.join(ACTIVATIONS)}, got {dtype!r:.80}")
        if cache not in CACHES:
            raise InputError(f"cache: expected one of {', '.join(CACHES)}, got {cache!r:.80}")
        options = ClusterOptions(
            model=str(model),
            dtype=dtype,
            cache=cache,
            cluster=None if cluster is None or isinstance(cluster, Cluster) else Path(cluster),
            local=LOCAL_DEFAULT if local is None else local,
            layers=None if layers is None else tuple(layers),
            all_devices=all_devices,
            context=context,
        )
        drafters = (drafter,) if isinstance(drafter, str) else tuple(drafter)
        recovery_options = RecoveryOptions(on_note=on_note or log.warning, wait_s=wait_s)
        with contextlib.ExitStack() as stack:
            if isinstance(cluster, Cluster):
                options = replace(options, cluster=stack.enter_context(cluster.file()))
            decoding = choose_decoding(
                options.cluster,
                method,
                drafters,
                chain,
                prefix_caching=enable_prefix_caching,
                keep_learnt=keep_learnt,
            )
            decoding = choose_drafter(decoding, options.model, options.cluster)
            if decoding.is_default:
                log.info("drafter %s, the best one that is here", decoding.drafters[0])
            self._open(options, decoding, recovery_options, on_progress or (lambda text, share: None), stack)

    @classmethod
    def opened(
        cls,
        options: ClusterOptions,
        decoding: Decoding,
        recovery_options: RecoveryOptions,
        progress: Progress,
        check: Callable[[ModelFiles], None] = lambda files: None,
        *,
        needs_text: bool = False,
    ) -> LLM:
        """For commands, which know more than the constructor takes. `check` looks at the model before
        anything is started; one without a tokenizer is refused if text is needed."""
        self = cls.__new__(cls)
        with contextlib.ExitStack() as stack:
            self._open(options, decoding, recovery_options, progress, stack, check, needs_text=needs_text)
        return self

    def _open(
        self,
        options: ClusterOptions,
        decoding: Decoding,
        recovery_options: RecoveryOptions,
        progress: Progress,
        stack: contextlib.ExitStack,
        check: Callable[[ModelFiles], None] = lambda files: None,
        *,
        needs_text: bool = False,
    ) -> None:
        """What is on the `stack` is closed at the end, as is the session."""
        loaded: list[Tokenizer] = []  # what runs until the end must not hold `self`

        def check_model(files: ModelFiles) -> None:
            check(files)
            if needs_text:
                check_tokenizer(files)

        def meanwhile(files: ModelFiles) -> None:
            if needs_text or files.has_tokenizer:
                loaded.append(Tokenizer(files))

        def tokens(files: ModelFiles, config: Any) -> TokenBytes | None:
            """For answers that grammars bind; nobody gets them where the head could not check a grammar."""
            if not loaded or not library_version():
                return None
            own = set() if loaded[0].eos_id is None else {loaded[0].eos_id}
            stop_ids = own | recommended(files, config).stop_ids
            return loaded[0].token_bytes_of_all(config.vocab_size, stop_ids)

        self.session: Session = stack.enter_context(
            open_session(options, decoding, progress, check_model, meanwhile, recovery_options, tokens)
        )
        self.tokenizer = loaded[0] if loaded else None
        self.recommended = recommended(self.session.files, self.session.config)
        head = self.session.head
        self._conversations = Conversations(
            CONVERSATIONS_KEPT,
            head.new_request,
            partial(_forget, head),
            head.plan.sliding_window,
            head.may_copy,
        )
        self._over: deque[tuple[int, Question, tuple[int, ...] | None]] = deque()
        self._taking = threading.Lock()
        self._closing = weakref.finalize(self, stack.pop_all().close)

    # -------------------------------------------------------------------------------------------- answers

    @overload
    def generate(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        parallel: int = PARALLEL_DEFAULT,
        **sampling: Any,
    ) -> Answer: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[Messages],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        parallel: int = PARALLEL_DEFAULT,
        **sampling: Any,
    ) -> list[Answer]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        parallel: int = PARALLEL_DEFAULT,
        **sampling: Any,
    ) -> Answer | list[Answer]:
        """The whole answer to a prompt, or those to a list of prompts, in their order.

        A prompt is a text (a user's turn in the model's chat template; with `raw`, or where the model has no
        template, the text as it is), a list of token ids, or a dialogue: a list of messages with `role` and
        `content`. `params`, or the same as keywords, say how it is answered. Of a list `parallel` prompts are
        answered at a time (1 to 64). Raises `InputError` for what cannot be answered, before anything is
        asked where that can be seen, and `ClusterError` where the devices cannot go on.

        >>> llm.generate("What is 1 + 2?", max_new_tokens=4).finish_reason
        'length'
        >>> [answer.text for answer in llm.generate(["What is 1 + 2?", "What is 2 + 2?"])]
        ['1 + 2 = 3.', '2 + 2 = 4.']
        """
        if not is_several(prompt):
            with self.stream(cast(Prompt, prompt), params, raw=raw, **sampling) as stream:
                return stream.answer()
        questions = [self.question(each, params, raw=raw, **sampling) for each in prompt]
        streams: list[AnswerStream] = []

        def answer(question: Question) -> Answer:
            stream = self.submit(question)
            streams.append(stream)
            return stream.answer()

        with ThreadPoolExecutor(checked_parallel(parallel)) as pool:
            waiting = [pool.submit(answer, question) for question in questions]
            try:
                return [future.result() for future in waiting]
            except BaseException:  # also Ctrl-C: the other answers are not computed for nobody
                for future in waiting:
                    future.cancel()
                for stream in streams:
                    stream.cancel()
                raise

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> AnswerStream:
        """An answer as it comes; the arguments and errors are those of `generate`.

        Iterate for its pieces; `cancel()` ends it, `answer()` is the whole. It is computed whether it is read
        or not, beside others that are asked for.

        >>> print(*(piece.text for piece in llm.stream("What is 1 + 2?")), sep="")
        1 + 2 = 3.
        """
        return self.submit(self.question(prompt, params, raw=raw, **sampling))

    async def agenerate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> Answer:
        """As `generate` for one prompt, in an event loop; a task that is cancelled cancels its answer."""
        stream = self.astream(prompt, params, raw=raw, **sampling)
        try:
            return await stream.answer()
        finally:
            stream.cancel()

    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **sampling: Any,
    ) -> AsyncAnswerStream:
        """As `stream`, in an event loop: `async for piece in llm.astream(...)`."""
        return AsyncAnswerStream(self.stream(prompt, params, raw=raw, **sampling))

    # ---------------------------------------------------------------------------------------- in two steps

    def question(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False, **sampling: Any
    ) -> Question:
        """What `stream` submits: the prompt's tokens, and how they are answered where nothing is left open
        any more. Raises `InputError`."""
        known = [each.name for each in fields(SamplingParams)]
        for name in sampling:
            if name not in known:  # a mistake in the program, as any other keyword that is not known
                hint = f"; did you mean {_ELSEWHERE[name]}?" if name in _ELSEWHERE else meant(name, known)
                raise TypeError(f"unexpected keyword {name!r}{hint}")
        params = replace(params or SamplingParams(), **sampling)
        if params.stop and self.tokenizer is None:
            raise InputError(
                "stop: the model has no tokenizer, so its answers have no text; use stop_token_ids"
            )
        return self.question_of(self.encode(prompt, raw=raw), params)

    def question_of(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        form: ReplyForm | None = None,
        bound: BoundReply | None = None,
    ) -> Question:
        """The same for a prompt's token ids; with a `form` the answer's thoughts and calls are told apart
        from its text, which then is what the `params` bind; with a `bound` all of it is what that
        allows."""
        eos_id = None if self.tokenizer is None else self.tokenizer.eos_id
        sampling, limits = params.sampling(self.recommended), params.limits(self.recommended, eos_id)
        if params.bound is not None:
            check_grammar(*params.bound)
            told = form
            if told is None and self.tokenizer is not None and self.tokenizer.is_in_channels:
                told = ReplyForm(is_in_channels=True)
            if told is None or self.tokenizer is None:
                sampling = structs.replace(sampling, grammar=self._grammar(*params.bound, limits.stop_ids))
            else:
                added, count = self.tokenizer.added_tokens, self.session.spec.vocabulary
                tokens = {name: token for name, token in added.items() if token < count}
                told, wanted = replace(told, calls=None), Wanted(answer=params.bound)
                bound = bound_reply(told, wanted, tokens, may_think=True)
        if bound is not None:
            check_grammar("reply", bound.text, len(bound.marks))
            grammar = self._grammar("reply", bound.text, limits.stop_ids, bound.marks)
            sampling = structs.replace(sampling, grammar=grammar)
        return Question(
            prompt=ids,
            sampling=sampling,
            limits=limits,
            stops=tuple(params.stop),
            top_logprobs=params.top_logprobs,
            form=form,
        )

    def _grammar(
        self, kind: str, text: str, stop_ids: frozenset[int], marks: tuple[int, ...] = ()
    ) -> Grammar:
        """What binds an answer. Raises `InputError` for what cannot be obeyed with this model."""
        tokens = self.session.head.plan.tokens
        if self.tokenizer is None or tokens is None:
            raise InputError(f"{kind}: the model has no tokenizer, so its answers have no text")
        if wrong := [mark for mark in marks if mark in stop_ids or mark >= len(tokens.texts)]:
            raise InputError(
                f"{kind}: expected no token of calls or thoughts among those that end answers, got {wrong[0]}"
            )
        ends = [token for token in sorted(stop_ids) if token < len(tokens.texts) and not tokens.texts[token]]
        if not ends:
            raise InputError(f"{kind}: expected a token that ends answers, but the model names none")
        try:
            return checked(Grammar(kind=kind, text=str(text), ends=tuple(map(int, ends)), marks=marks))
        except ValueError as error:
            raise InputError(str(error)) from None

    def submit(self, question: Question) -> AnswerStream:
        """Asks it, in a conversation whose beginning the devices have already, if there is one."""
        self._check_open()
        with self._taking:
            self._settle()
            most = min(question.limits.new_tokens_max, RESERVED_TOKENS)
            request = self._conversations.take(question.prompt, most)
        over = partial(self._ended, request, question)
        try:
            return AnswerStream(self.session, question, self.tokenizer, request=request, on_over=over)
        except InputError:
            over(None)
            raise

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """A prompt's token ids, as `generate` has them."""
        if not isinstance(prompt, Sequence):
            raise InputError(f"prompt: expected {PROMPTS}, got {prompt!r:.80}")
        if not isinstance(prompt, str) and all(type(each) is int for each in prompt):
            return [each for each in prompt if isinstance(each, int)]
        if self.tokenizer is None:
            raise InputError(
                f"model {self.session.files.model!r} has no tokenizer; give prompts as token ids"
            )
        if isinstance(prompt, str):
            if not prompt.strip():
                raise InputError("prompt: expected a text, got an empty one")
            return self.tokenizer.encode_dialogue([{"role": "user", "content": prompt}], is_raw=raw)
        messages = [each for each in prompt if is_message(each)]
        if raw or len(messages) < len(prompt):
            raise InputError(f"prompt: expected {'a text' if raw else PROMPTS}, got {prompt!r:.80}")
        return self.tokenizer.encode_chat(messages)

    # -------------------------------------------------------------------------------------------- the end

    @property
    def stages(self) -> list[dict[str, Any]]:
        """What runs where, in the pipeline's order: `name`, `layers` (first and end), `address`, `pid`,
        `weight_bytes`, `memory_bytes` and `received_bytes` of each stage."""
        return self.session.stages_report()

    def close(self) -> None:
        """Ends answers that are under way, lets go of the devices and ends local processes."""
        self._closing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise InputError("the LLM is closed; open another one")

    def _ended(self, request: int, question: Question, held: tuple[int, ...] | None) -> None:
        """An answer is over. Called by any thread at any moment, also by one that is in the middle of
        `submit`: then that, or the next one, hears of it."""
        self._over.append((request, question, held))
        if self._taking.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._taking.release()

    def _settle(self) -> None:
        """Conversations whose answers are over can be used again."""
        while self._over:
            request, question, held = self._over.popleft()
            if held is None:
                self._conversations.drop(request)
            else:
                self._conversations.give_back(request, (*question.prompt, *held))


def is_several(prompt: Any) -> TypeGuard[Sequence[Prompt]]:
    """Whether it is a list of prompts, and not one."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and bool(prompt) and isinstance(prompt[0], str | list | tuple)


def is_message(each: Any) -> TypeGuard[dict[str, str]]:
    """Whether it is a message of a dialogue, as chat templates take it."""
    return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))


def checked_parallel(count: int) -> int:
    """Answers at a time; raises `InputError` for too many."""
    if type(count) is not int or not 1 <= count <= PARALLEL_MAX:
        raise InputError(f"parallel: expected 1 to {PARALLEL_MAX}, got {count!r:.80}")
    return count


def _forget(head: Head, request: int) -> None:
    """Frees a conversation's cache, unless all of them are free."""
    if not head.is_closed:
        head.forget(request)
