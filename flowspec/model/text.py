"""Between text and tokens: the tokenizer, chat templates, streaming text, and stop strings."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import SAMPLING_FIELDS, Sampling
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError, first_line
from flowspec.model.chat_template import (
    HiddenTokens,
    Rendered,
    SpanningTokenError,
    TemplateNames,
    bounded_time,
    names_in,
    without_cuts,
)
from flowspec.model.damage import advice_for_json, check_inside, read_head
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import GGUF_ONLY
from flowspec.model.imports import IMPORTING
from flowspec.model.json_files import read_json
from flowspec.model.reply.form import (
    CallFormat,
    ReplyForm,
    Thoughts,
    form_of,
    format_of,
    is_in_channels,
    thoughts_of,
)
from flowspec.model.reply.parts import Part, Tool

Messages = list[dict[str, Any]]
_READ = (
    *(
        "tokenizer*",
        "vocab*",
        "merges*",
        "added_tokens*",
        "special_tokens_map*",
        "chat_template*",
        "chat_templates/*",
        "additional_chat_templates/*",
    ),
    *("*.model", "*.tiktoken", "tekken.json", "config.json", "processor_config.json"),
    *("*.codes", "*.spm", "*.tokenizer", "*_vocab.json", "byte_maps.json", "dict.txt", "emoji.json"),
    *("normalizer.json", "word_*.json"),
)
"""What transformers may read for a tokenizer of the folder that it is in."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "merges.txt", "chat_template.jinja")
_UNSUPPORTED: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "typical_p": 1.0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    **GGUF_ONLY,
}
"""Features of a generation config that FlowSpec lacks, each with the value that switches it off."""
_RECOMMENDED = {name: kind for name, kind in SAMPLING_FIELDS.items() if name != "seed"}
_END = "\ue000here the last message ends\ue001"
"""Marks where that is in what a chat template makes of a dialogue, whatever stands behind it there."""
UNFINISHED = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece names a byte that is no character of its own."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): bytes([byte]) for byte in _PRINTABLE} | {
    chr(0x100 + place): bytes([byte])
    for place, byte in enumerate(byte for byte in range(0x100) if byte not in _PRINTABLE)
}
"""The characters by which byte-level BPE writes bytes: those that can be seen for themselves, the others from
U+0100 on."""

_LOOKED_FOR = (
    r"""(?:split|startswith|endswith|find|index|replace)\(\s*['"]{mark}|['"]{mark}['"]\s+(?:not\s+)?in\b"""
)
"""How a template looks for a text."""
_AROUND = {f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")}
"""Tokens that are no special ones in many vocabularies, and do what these do."""
_ROLE_TOOL = re.compile(r"""role['"]?[\])]*\s*(?:[!=]=|(?:not\s+)?in\b)\s*[^%}]{0,80}?['"]tool['"]""")
"""Where a template asks whether a message is a tool's."""

ROLES = frozenset(("assistant", "system", "user"))
"""Those that every chat template is given; others it must name itself."""
PIECE_CHARS = 1 << 14
"""Of a longer text so much is looked at before it is asked again whether anybody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A text of more than so many `tokens` is refused, with as little work as that takes; work ends when
    nobody wants it."""

    tokens: int
    is_wanted: Callable[[], bool] = lambda: True


class TooLongError(InputError):
    """A text has more tokens than are allowed, `tokens` at least."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens at least, which is too long")
        self.tokens = tokens


def check_tokenizer(files: ModelFiles) -> None:
    """Raises `InputError` for a model without a tokenizer."""
    if files.gguf is not None:
        if files.has_tokenizer:
            return
        cure = "take another GGUF file of it, whose metadata has one"
    else:
        if any(files.find(name) is not None for name in _TOKENIZER_FILES):
            return
        cure = "put its tokenizer.json there; `flowspec fetch OWNER/NAME` gets the whole model"
    raise InputError(
        f"model {files.model!r} has no tokenizer; {cure}; or use flowspec generate --prompt-token-ids 1,5,9"
    )


class Tokenizer:
    """A model's tokenizer, loaded with transformers."""

    def __init__(self, files: ModelFiles) -> None:
        with IMPORTING:
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

        check_tokenizer(files)
        found = [
            path for name in (*_TOKENIZER_FILES, *_OTHER_FILES) if (path := files.find(name)) is not None
        ]
        if files.gguf is None:
            files.path("config.json")
            _check_files(found[0].parent)
        self._model = files.model
        with self._used():
            try:
                if files.gguf is not None:
                    from flowspec.model.gguf.tokenizer import load

                    self._tokenizer: Any = load(files.gguf_file)
                else:
                    # tokenizer.json as it stands: classes of transformers may build another tokenizer. Llama
                    # 2's loses a space that a text begins with, or has none behind special tokens.
                    kind = PreTrainedTokenizerFast if found[0].name == "tokenizer.json" else AutoTokenizer
                    with _plain_folder(found[0].parent) as folder:
                        self._tokenizer = kind.from_pretrained(
                            folder, local_files_only=True, trust_remote_code=False
                        )
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - both libraries raise anything for a broken file
                text = " ".join(str(error).split())
                known = (advice_for_json(path) for path in found if files.gguf is None)
                why = next(filter(None, known), f"{text:.200}")
                raise InputError(f"cannot read the tokenizer of {files.model!r}: {why}") from None
        self._names: dict[str, TemplateNames] = {}
        self._takes_tools = False
        self._tokenizer.model_max_length = (
            limits.ID_MAX
        )  # only compared with a text's length, to warn; the context is checked by the head

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def eos_id(self) -> int | None:
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    def encode(self, text: str, bound: Bound | None = None) -> list[int]:
        """A plain prompt, with the special tokens that the model's tokenizer adds."""
        return self._ids(text, bound, add_special_tokens=True)

    def encode_chat(
        self, messages: Messages, bound: Bound | None = None, *, continues: bool = False
    ) -> list[int]:
        """A dialogue in the model's chat template, as `render_chat` has it."""
        return self.encode_rendered(self.render_chat(messages, continues=continues), bound)

    def encode_rendered(self, rendered: Rendered, bound: Bound | None = None) -> list[int]:
        """What `render_chat` made. Raises `InputError` for a tokenizer that cannot take a special token's
        text for text, where a message has one."""
        if not rendered.plain:
            return self._ids(rendered.text, bound, add_special_tokens=False)
        text, cutting = rendered.cut()
        check_utf8(text)
        with self._used():
            if bound is not None:
                self._check_length(text, bound)
            try:
                found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
                return without_cuts(found["input_ids"], found["offset_mapping"], text, cutting)
            except (NotImplementedError, SpanningTokenError):
                (mark, *_) = rendered.plain.values()
                raise InputError(
                    f"{mark!r:.80} is a special token of this model, and its tokenizer cannot take it for "
                    "text; write it in another way"
                ) from None

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> Rendered:
        """A dialogue in the model's chat template, up to where the assistant speaks; or up to the end of the
        text of its last message, which the answer `continues`. `tools` may be called, and the template is
        given `variables`; it need not look at either (`takes_tools`, `template_names`). Special tokens come
        from the template alone (`chat_template.py`)."""
        if not self.has_chat_template:
            raise InputError("this model has no chat template; use flowspec generate --raw")
        self._check_roles(messages, tools)
        documents = [tool.document for tool in tools]
        hidden = HiddenTokens(self._marks(tools), [messages, documents, variables])
        around = self._marks_of_thoughts(tools)
        messages = [
            {**hidden.hide(message), **_thoughts_left(message, hidden, *around)} for message in messages
        ]
        if continues:
            last = {**messages[-1], "content": messages[-1]["content"] + _END}
            messages = [*messages[:-1], last]
        try:
            with bounded_time():
                text = str(
                    self._tokenizer.apply_chat_template(
                        self._with_thoughts(messages, tools),
                        tools=hidden.hide(documents) or None,
                        tokenize=False,
                        add_generation_prompt=not continues,
                        **hidden.hide(variables or {}),
                    )
                )
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            raise InputError(
                f"the model's chat template refuses this dialogue: {first_line(error)}"
            ) from None
        if continues:
            text, *rest = text.split(_END)
            if len(rest) != 1:
                raise InputError(
                    "continue_final_message: expected a chat template that shows the last message once, this "
                    f"model's shows it {len(rest)} times"
                )
        if len(text) > limits.PROMPT_CHARS_MAX:
            raise InputError(
                f"the model's chat template makes {len(text)} characters of this dialogue, expected at most "
                f"{limits.PROMPT_CHARS_MAX}"
            )
        return hidden.rendered(text)

    def _marks(self, tools: Sequence[Tool]) -> list[str]:
        """The texts of tokens that a template may write and nobody else: special tokens, and others that were
        added to the vocabulary and that it names, or that stand around thoughts, calls and results."""
        template, known = self.template(tools), self._specials | _AROUND
        return [text for text in self.added_tokens if text.strip() and (text in known or text in template)]

    def _marks_of_thoughts(self, tools: Sequence[Tool]) -> tuple[list[str], list[str]]:
        """Those at the beginning and at the end of thoughts, which the template looks for in an assistant's
        messages, to tell them from text."""
        template = self.template(tools)
        found = thoughts_of(template) or Thoughts("", "")
        marks = [
            mark
            for mark in self._marks(tools)
            if re.search(_LOOKED_FOR.format(mark=re.escape(mark)), template)
        ]
        return [mark for mark in marks if mark in found.begin], [mark for mark in marks if mark in found.end]

    def template(self, tools: Sequence[Tool] = ()) -> str:
        """The chat template, of which a model may have another one for tools; empty without one."""
        if not self.has_chat_template:
            return ""
        try:
            documents = [tool.document for tool in tools] or None
            return str(self._tokenizer.get_chat_template(tools=documents))
        except Exception as error:  # noqa: BLE001 - whatever transformers meets in a broken file
            raise InputError(f"the model's chat template cannot be used: {first_line(error)}") from None

    def template_names(self, tools: Sequence[Tool] = ()) -> TemplateNames:
        """What that template looks at."""
        template = self.template(tools)
        if template not in self._names:
            self._names[template] = names_in(template)
        return self._names[template]

    def takes_tools(self, messages: Messages, tools: Sequence[Tool], variables: Mapping[str, Any]) -> bool:
        """Whether the template tells of tools, which it need not do though it looks at them."""
        if not self._takes_tools and "tools" in self.template_names(tools).variables:
            with_tools = self.render_chat(messages, tools, variables)
            without = self.render_chat(messages, (), variables)
            self._takes_tools = with_tools.readable() != without.readable()
        return self._takes_tools

    def call_format(self, tools: Sequence[Tool]) -> CallFormat | None:
        """How the model writes calls; None: that is not known."""
        return format_of(self.template(tools), self.added_tokens)

    def can_think(self, tools: Sequence[Tool] = ()) -> bool:
        """Whether the model may write thoughts."""
        return self.is_in_channels or thoughts_of(self.template(tools)) is not None

    def reply_form(
        self, prompt: str, tools: Sequence[Tool] = (), *, is_single: bool = False
    ) -> ReplyForm | None:
        """The form of the reply to a rendered dialogue: with thoughts, and calls of tools. None for a model
        that writes nothing but text."""
        known = {tool.name: tool for tool in tools}
        return form_of(self.template(tools), self.added_tokens, prompt, known, is_single=is_single)

    def marks(self, texts: Sequence[str]) -> dict[int, str]:
        """Those of the texts that are tokens of their own, which `decode` may leave out."""
        added = self.added_tokens
        return {added[text]: text for text in texts if text in added}

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that were added to the vocabulary, special ones among them, by their names."""
        return {str(text): token for token, text in self._tokenizer.added_tokens_decoder.items()}

    @property
    def _specials(self) -> frozenset[str]:
        """The texts of special tokens."""
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(map(str, filter(lambda token: token.special, added)))

    def takes_calls(self, tools: Sequence[Tool] = ()) -> bool:
        """Whether the template has a place for calls in messages."""
        names = self.template_names(tools)
        return "tool_calls" in names.fields | names.variables

    def _with_thoughts(self, messages: Messages, tools: Sequence[Tool]) -> Messages:
        """Messages whose thoughts go by the name that the template has for them.

        One with the name `thinking` takes either thoughts or a text beside calls, and raises for both.
        """
        if not any("reasoning_content" in message for message in messages):
            return messages
        fields = self.template_names(tools).fields
        if "reasoning_content" in fields or "thinking" not in fields:
            return messages
        found = []
        for message in messages:
            rest = {name: value for name, value in message.items() if name != "reasoning_content"}
            if len(rest) < len(message) and not (rest.get("tool_calls") and rest["content"]):
                rest["thinking"] = message["reasoning_content"]
            found.append(rest)
        return found

    def _check_roles(self, messages: Messages, tools: Sequence[Tool] = ()) -> None:
        """Raises `InputError` for a role that the template does not name: it would be left out, or be one
        that the model never saw."""
        template = self.template(tools)
        for role in {message["role"] for message in messages} - ROLES:
            is_named = f"'{role}'" in template or f'"{role}"' in template
            if role == "tool" and "tool_responses" in self.template_names(tools).fields:
                is_named = _ROLE_TOOL.search(template) is not None  # else results stand with the calls
            if not is_named:
                raise InputError(
                    f"role: expected {', '.join(sorted(ROLES))}, got {role!r:.80}, which this model's chat "
                    "template does not have"
                )

    def encode_dialogue(
        self, messages: Messages, *, system: str | None = None, is_raw: bool = False
    ) -> list[int]:
        """A dialogue in the chat template; without one, or raw, its texts as they are, one behind the
        other."""
        if is_raw or not self.has_chat_template:
            if system:
                raise InputError(
                    "--system needs a chat template, which this model lacks or --raw switched off"
                )
            return self.encode("".join(message["content"] for message in messages))
        before = [{"role": "system", "content": system}] if system else []
        return self.encode_chat([*before, *messages])

    def _ids(self, text: str, bound: Bound | None, *, add_special_tokens: bool) -> list[int]:
        check_utf8(text)
        with self._used():
            if bound is not None:
                self._check_length(text, bound)
            return [
                int(token)
                for token in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            ]

    def _check_length(self, text: str, bound: Bound) -> None:
        """Raises `TooLongError` for a text that has more tokens than the bound says, having looked at no more
        than that takes.

        A piece of the text has the tokens that it has in the whole, but for a few at its ends.
        """
        size = len(text.encode())
        if size > bound.tokens * self.longest_bytes:
            raise TooLongError(size // self.longest_bytes)
        count = 0
        for begin in range(0, len(text), PIECE_CHARS) if len(text) > PIECE_CHARS else ():
            if not bound.is_wanted():
                raise InputError("nobody waits for these tokens any more")
            piece = text[begin : begin + PIECE_CHARS]
            count += max(
                0, len(self._tokenizer(piece, add_special_tokens=False)["input_ids"]) - 2 * self.longest_bytes
            )
            if count > bound.tokens:
                raise TooLongError(count)

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of text that a token stands for at most."""
        is_bytes = "ByteLevel" in self._decoders
        pieces = self._tokenizer.get_vocab()
        return max((len(piece) if is_bytes else len(piece.encode()) for piece in pieces), default=1)

    @property
    def is_in_channels(self) -> bool:
        """Whether the model writes messages in channels."""
        return is_in_channels(self.added_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of new tokens, special ones left out."""
        with self._used():
            return str(
                self._tokenizer.decode(
                    list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
                )
            )

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text's UTF-8; a special one its name, an id that stands for nothing no
        bytes.

        A character may take several tokens, so the bytes of one need be no text.
        """
        with self._used():
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if piece is None:
                return b""
            if token in self._tokenizer.added_tokens_decoder:
                return str(piece).encode()
            return self._piece_bytes(token, str(piece))

    def _piece_bytes(self, token: int, piece: str) -> bytes:
        """What a token that was not added to the vocabulary stands for, by how that writes it."""
        if "ByteLevel" in self._decoders:
            return b"".join(
                _BYTES[character] if character in _BYTES else character.encode() for character in piece
            )
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(found[1])
        if self._decoders:
            return piece.replace("\u2581", " ").encode()
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False)).encode()

    def token_bytes_of_all(self, count: int, stop_ids: Collection[int]) -> TokenBytes:
        """What each id below `count` adds to a text that a grammar binds. Tokens that were added to the
        vocabulary are marks of the model's own, and in no such text unless they are white space.

        Raises `InputError` for a vocabulary that cannot be one.
        """
        with self._used():
            texts = [b""] * count
            added = self._tokenizer.added_tokens_decoder
            special = {*stop_ids, *self._tokenizer.all_special_ids}
            spaced = None
            for piece, token in self._tokenizer.get_vocab().items():
                if not 0 <= token < count or token in special:
                    continue
                if token in added:
                    found = b"" if str(piece).strip() else str(piece).encode()
                else:
                    found = self._piece_bytes(token, str(piece))
                if len(found) <= limits.TOKEN_BYTES_MAX:
                    texts[token] = found
                if spaced is None and len(found) > 1 and found[0] == 0x20 and found[1:2].isalpha():
                    spaced = token
        drops = spaced is not None and not self.decode([spaced]).startswith(" ")
        try:
            return TokenBytes(tuple(texts), drops)
        except ValueError as error:
            raise InputError(f"the tokenizer of {self._model!r}: {error}") from None

    @cached_property
    def _decoders(self) -> set[str]:
        """The kinds of the steps by which the tokenizers library makes text of tokens; none for a tokenizer
        of another library."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        return {str(step.get("type")) for step in [state, *state.get("decoders", ())] if step}

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Has a tokenizer that fails in the tokenizers library, whose parts may not fit each other, be one
        line.

        The library raises `Exception` itself, or where its Rust code panics (which it also tells on stderr)
        an exception beside all others, whose class nobody can import.
        """
        try:
            yield
        except BaseException as error:
            if type(error) is not Exception and type(error).__module__ != "pyo3_runtime":
                raise
            raise InputError(f"the tokenizer of {self._model!r} is broken: {first_line(error)}") from None


def _read_files(folder: Path) -> list[Path]:
    """What transformers may read for a tokenizer."""
    return sorted({path for pattern in _READ for path in folder.glob(pattern)})


def _check_files(folder: Path) -> None:
    """Raises `InputError` for a file that is a link out of the folder, or so large that reading it, which
    takes a hundred times its size, could take all memory."""
    for path in _read_files(folder):
        try:
            size = path.stat().st_size
        except OSError:
            continue  # a link to nowhere, which nobody reads either
        if size > limits.JSON_BYTES_MAX and path.is_file():
            raise InputError(
                f"{path}: expected at most {limits.JSON_BYTES_MAX >> 20} MiB, got {-(-size >> 20)}"
            )
        check_inside(path, folder)
    config = folder / "tokenizer_config.json"
    names = read_json(config).get("fast_tokenizer_files") if config.is_file() else None
    if isinstance(names, list) and any(Path(str(name)).name != name for name in names):
        raise InputError(
            f"{config}: fast_tokenizer_files: expected names of files beside it, got {names!r:.80}"
        )


@contextlib.contextmanager
def _plain_folder(folder: Path) -> Iterator[Path]:
    """The folder of a tokenizer; where files begin with a byte order mark, which libraries stumble over, a
    copy without."""
    files = [path for path in _read_files(folder) if path.is_file()]
    if not any(read_head(path).startswith(codecs.BOM_UTF8) for path in files):
        yield folder
        return
    with tempfile.TemporaryDirectory() as room:
        for path in files:
            copy = Path(room, path.relative_to(folder))
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        yield Path(room)


def check_utf8(text: str) -> None:
    """Raises `InputError` for a text that came from bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("expected text in UTF-8, got bytes that are none") from None


def _marks_at_end(text: str) -> int:
    return len(text) - len(text.rstrip(UNFINISHED))


class TextStream:
    """Turns tokens into text as they come: never half a character, never the beginning of a stop string. Of
    an answer in channels only what is for the user is text.

    With a `form` the text is what the answer has beside thoughts and calls, which are `parts`; stop strings
    are looked for in the text alone.
    """

    WINDOW = 24

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), form: ReplyForm | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._has_parts = form is not None
        if form is None and tokenizer.is_in_channels:
            form = ReplyForm(is_in_channels=True)
        self._reader = None if form is None else form.reader()
        self._marks = {} if form is None else tokenizer.marks(form.marks)
        self._is_single = form is not None and form.is_single
        self._parts: list[Part] = []
        self.thought_tokens = 0
        """Tokens of thoughts, with the marks around them."""
        self._pending: list[int] = []
        self._context: list[int] = []
        self._text = ""
        self._shown = 0
        self.is_stopped = False
        """Nothing of what comes is read any more."""
        self.is_cut = False
        """The text ended before a stop string, which is no part of it."""

    @property
    def text(self) -> str:
        """All text so far, cut before a stop string."""
        return self._text

    def push(self, tokens: Sequence[int]) -> str:
        """Takes new tokens, returns the text that can be shown now."""
        for token in tokens:
            was_thinking = self._reader is not None and self._reader.is_thinking
            if token in self._marks:
                self._flush()
                self._read(self._marks[token], is_mark=True)
            else:
                self._pending.append(token)
                fresh = self._fresh()
                if not fresh.endswith(UNFINISHED):
                    self._append(fresh)
            if self._reader is not None and self._has_parts:
                self.thought_tokens += was_thinking or self._reader.is_thinking
        hold = max((self._overlap(stop) for stop in self._stops), default=0)
        return self._show(len(self._text) - hold)

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        self._flush()
        if self._reader is not None and not self.is_stopped:
            self._sort(self._reader.finish())
        return self._show(len(self._text))

    def take_parts(self) -> tuple[Part, ...]:
        """What there is of thoughts and calls since the last time."""
        found, self._parts = tuple(self._parts), []
        return found

    def _flush(self) -> None:
        """What is pending; the bytes of half a character at its end are no text."""
        if self._pending:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            shown = filter(lambda token: self._tokenizer.decode([token]), self._pending)
            whole = decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown)))
            half, fresh = decoder.getstate()[0], self._fresh()
            if half.decode(errors="replace") == UNFINISHED:  # the decoder holds half a surrogate, too
                # Most tokenizers show half a character as one mark, as Python does, and some each byte of it.
                is_one = _marks_at_end(fresh) == _marks_at_end(whole) + 1
                fresh = fresh[: -1 if is_one else -len(half)]
            self._append(fresh)

    def _fresh(self) -> str:
        """Text of the pending tokens, decoded with those before them so that spaces come out right."""
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._pending)[len(before) :]

    def _append(self, fresh: str) -> None:
        self._context = (self._context + self._pending)[-self.WINDOW :]
        self._pending = []
        self._read(fresh)

    def _read(self, fresh: str, *, is_mark: bool = False) -> None:
        if self.is_stopped:
            return
        if self._reader is None:
            self._grow(fresh)
        else:
            self._sort(self._reader.push(fresh, is_mark=is_mark))

    def _sort(self, parts: Sequence[Part]) -> None:
        """Text to the text, and the others beside it, up to a stop string, or the end of the only call."""
        for part in parts:
            if part.kind == "content":
                self._grow(part.text)
            elif self._has_parts:
                self._parts.append(part)
                self.is_stopped |= self._is_single and part.kind == "end"
            if self.is_stopped:
                return

    def _grow(self, fresh: str) -> None:
        searched = max(0, len(self._text) - max((len(stop) for stop in self._stops), default=0))
        self._text += fresh
        found = [at for stop in self._stops if (at := self._text.find(stop, searched)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.is_stopped = self.is_cut = True

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the text that may become the stop string."""
        return max((n for n in range(1, len(stop)) if self._text.endswith(stop[:n])), default=0)

    def _show(self, end: int) -> str:
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


@dataclass(slots=True)
class StopStrings:
    """A `StopRule` of the core: the answer ends with the token that completes a stop string."""

    stream: TextStream
    _seen: int = 0

    def stops_at(self, tokens: Sequence[int]) -> bool:
        self.stream.push(tokens[self._seen :])
        self._seen = len(tokens)
        return self.stream.is_stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """What a model's files say: its stop tokens, those that are never to be drawn, however an answer is
    sampled, and, where it samples, how.

    `sampling` holds fields of `Sampling`: a temperature among them where the model samples, else penalties
    alone, by which the likeliest token may be another one. `unsupported` names features it asks for that
    FlowSpec lacks; callers that follow the recommendation refuse them.
    """

    stop_ids: frozenset[int]
    sampling: Mapping[str, float] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    unsupported: tuple[str, ...] = ()

    def with_suppressed(self, sampling: Sampling) -> Sampling:
        """The same sampling, but that it never draws those tokens."""
        return replace(sampling, suppress_tokens=self.suppress_tokens)


def recommended(files: ModelFiles, config: Any) -> Recommended:
    """Reads generation_config.json or what stands for it in a GGUF file (all of it optional), the config's
    stop tokens, and what a GGUF file says of its vocabulary. Raises `InputError` for fields that are not what
    they should be."""
    path = files.find("generation_config.json")
    if files.gguf is not None:
        raw = files.gguf_file.generation_config()
    else:
        raw = {} if path is None else _read_generation_config(path)
    stops = raw.get("eos_token_id", getattr(config, "eos_token_id", None))
    stop_ids = frozenset([stops] if isinstance(stops, int) else stops or [])
    suppressed = _token_ids(f"{path}: suppress_tokens", raw.get("suppress_tokens"))
    if files.gguf is not None:
        from flowspec.model.gguf import tokenizer

        stop_ids |= tokenizer.stop_ids(files.gguf_file)
        key = "tokenizer.ggml.suppress_tokens"
        suppressed |= _token_ids(f"{files.gguf}: {key}", files.gguf_file.metadata.get(key))
    unsupported = tuple(
        name for name, off in _UNSUPPORTED.items() if raw.get(name) is not None and raw[name] != off
    )
    said = {name: raw[name] for name in _RECOMMENDED if raw.get(name) is not None}
    penalties = {name: value for name, value in said.items() if name.endswith("_penalty")}
    return Recommended(
        stop_ids=stop_ids,
        sampling={"temperature": 1.0, **said} if raw.get("do_sample") else penalties,
        suppress_tokens=tuple(sorted(suppressed)),
        unsupported=unsupported,
    )


def _thoughts_left(
    message: Mapping[str, Any], hidden: HiddenTokens, begin: Sequence[str], end: Sequence[str]
) -> dict[str, str]:
    """The content of an assistant's message whose thoughts end, with the marks around them, for the template
    to find, and without any other; nothing of other messages."""
    text = message.get("content")
    if message["role"] != "assistant" or not isinstance(text, str):
        return {}
    place = max((text.rfind(mark) + len(mark) for mark in end if mark in text), default=0)
    return {"content": hidden.hide(text[:place], (*begin, *end)) + hidden.hide(text[place:])}


def _token_ids(name: str, value: Any) -> set[int]:
    """Those of a list that a file may have; raises `InputError` for anything else."""
    found = [] if value is None else value
    most = limits.SUPPRESS_TOKENS_MAX
    if not isinstance(found, list) or not all(
        type(token) is int and 0 <= token <= limits.VOCABULARY_MAX for token in found
    ):
        raise InputError(f"{name}: expected a list of token ids, got {value!r:.80}")
    if len(found) > most:
        raise InputError(f"{name}: expected at most {most} token ids, got {len(found)}")
    return set(found)


def _read_generation_config(path: Path) -> dict[str, Any]:
    """A generation_config.json whose fields that we read are what they should be; raises `InputError`."""
    raw = read_json(path)
    for name, kind in _RECOMMENDED.items():
        value = raw.get(name)
        if value is not None and (type(value) not in (int, kind) or not -math.inf < value < math.inf):
            raise InputError(f"{path}: {name}: expected a number, got {value!r:.80}")
    stops = raw.get("eos_token_id")
    if stops is not None and not all(
        type(stop) is int for stop in (stops if isinstance(stops, list) else [stops])
    ):
        raise InputError(f"{path}: eos_token_id: expected a token id or a list of them, got {stops!r:.80}")
    return raw
