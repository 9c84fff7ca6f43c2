"""Between text and tokens: the tokenizer, chat templates, streaming text, and stop strings."""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import SAMPLING_FIELDS
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError, first_line
from flowspec.model.accelerator import importing
from flowspec.model.chat_template import HiddenTokens, Rendered, bounded_time, names_in, without_cuts
from flowspec.model.damage import check_inside, read_head, read_json
from flowspec.model.files import ModelFiles
from flowspec.model.gguf.file import GGUF_ONLY
from flowspec.model.reply.form import ReplyForm, Thoughts, is_in_channels, thoughts_of, unfinished
from flowspec.model.reply.parts import Part, Tool

Messages = list[dict[str, Any]]
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "config.json"),
)
"""What a tokenizer is read from, beside further chat templates."""
_UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p", "num_beams"), 1),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("min_length", "min_new_tokens"), 0),
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id")),
    **GGUF_ONLY,
}
"""Features of a generation config that FlowSpec lacks, each with the value that switches it off."""
_RECOMMENDED = {name: kind for name, kind in SAMPLING_FIELDS.items() if name != "seed"}
_END = "\ue000here the last message ends\ue001"
"""Marks where that is in what a chat template makes of a dialogue, whatever stands behind it there."""
UNFINISHED = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece names a byte that is no character of its own."""
_AROUND = {f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")}
"""Tokens that are no special ones in many vocabularies, and do what these do."""
_DECODERS = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}
"""What tokenizers make text with that is the bytes of its tokens, one behind the other."""
ROLES = frozenset(("assistant", "system", "user"))
"""Those that every chat template is given; others it must name itself."""
NO_TEMPLATE = "this model has no chat template; use flowspec generate --raw"
PIECE_CHARS = 1 << 14
"""Of a longer text so much is looked at before it is asked again whether anybody waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A text of more `tokens` is refused, after as little work as that takes, or when nobody wants it."""

    tokens: int
    is_wanted: Callable[[], bool] = lambda: True


class TooLongError(InputError):
    """A text has more tokens than are allowed, `tokens` at least."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"the text has {tokens} tokens at least, which is too long")
        self.tokens = tokens


def check_tokenizer(files: ModelFiles) -> None:
    """Raises `InputError` for a model without a tokenizer."""
    if files.has_tokenizer:
        return
    cure = "put its tokenizer.json there; `flowspec fetch OWNER/NAME` gets the whole model"
    if files.gguf is not None:
        cure = "take another GGUF file of it, whose metadata has one"
    raise InputError(
        f"model {files.model!r} has no tokenizer; {cure}; or use flowspec generate --prompt-token-ids 1,5,9"
    )


def check_chat_template(files: ModelFiles) -> None:
    """Raises `InputError` for a model that no dialogue can be asked of."""
    check_tokenizer(files)
    path = files.find("tokenizer_config.json")
    said = {} if path is None else read_json(path)
    if files.gguf is not None:
        said = {"chat_template": files.gguf_file.metadata.get("tokenizer.chat_template")}
    if not said.get("chat_template") and files.find("chat_template.jinja") is None:
        raise InputError(NO_TEMPLATE)


class Tokenizer:
    def __init__(self, files: ModelFiles) -> None:
        check_tokenizer(files)
        self._model = files.model
        with self._used():
            self._tokenizer = _load(files)
            decoder = self._tokenizer.backend_tokenizer.decoder
            steps = re.findall(r'"type":"(\w+)"', decoder.__getstate__().decode() if decoder else "")
            if not steps or set(steps) - _DECODERS:
                raise InputError(
                    f"the tokenizer of {self._model!r}: decoder: expected {', '.join(sorted(_DECODERS))}, "
                    f"got {', '.join(steps) or 'none':.80}"
                )
        with importing():
            from transformers.convert_slow_tokenizer import bytes_to_unicode
        written = bytes_to_unicode() if "ByteLevel" in steps else {}
        self._bytes = {sign: bytes([byte]) for byte, sign in written.items()}
        """By the characters that byte-level BPE writes bytes with; empty for any other tokenizer."""
        self._takes_tools = False
        # Only compared with a text's length, to warn; the head checks the context.
        self._tokenizer.model_max_length = limits.ID_MAX

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def eos_id(self) -> int | None:
        found = self._tokenizer.eos_token_id
        return None if found is None else int(found)

    def encode(self, text: str, bound: Bound | None = None) -> list[int]:
        """A plain prompt, with the special tokens that the model's tokenizer adds."""
        return list(self._encoded(text, bound)["input_ids"])

    def encode_chat(self, messages: Messages, bound: Bound | None = None) -> list[int]:
        """A dialogue in the model's chat template, as `render_chat` has it."""
        return self.encode_rendered(self.render_chat(messages), bound)

    def encode_rendered(self, rendered: Rendered, bound: Bound | None = None) -> list[int]:
        """What `render_chat` made. Raises `InputError` for a tokenizer that cannot take a special token's
        text for text, where a message has one."""
        if not rendered.plain:
            return list(self._encoded(rendered.text, bound, add_special_tokens=False)["input_ids"])
        text, cutting = rendered.cut()
        found = self._encoded(text, bound, add_special_tokens=False, return_offsets_mapping=True)
        return without_cuts(found["input_ids"], found["offset_mapping"], text, cutting)

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
        given `variables`; it need not look at either (`takes_tools`, `names_in`). Special tokens come from
        the template alone (`chat_template.py`)."""
        if not self.has_chat_template:
            raise InputError(NO_TEMPLATE)
        template, documents = self.template(tools), [tool.document for tool in tools]
        for role in {message["role"] for message in messages} - ROLES:
            is_named = f"'{role}'" in template or f'"{role}"' in template  # else it may leave this out
            if not is_named or (role == "tool" and "tool_responses" in names_in(template).fields):
                lacking = f"{role!r:.80}, which this model's chat template does not have"
                raise InputError(f"role: expected {', '.join(sorted(ROLES))}, got {lacking}")
        marks = [  # texts that a template may write and nobody else
            text
            for text, token in self.added_tokens.items()
            if text.strip() and (token in self.special_ids or text in _AROUND or text in template)
        ]
        around = thoughts_of(template) or Thoughts("", "")
        both = f"{around.begin} {around.end}"
        kept = {mark for mark in marks if mark in both and _is_looked_for(mark, template)}
        end = around.end if around.end in kept else ""
        hidden = HiddenTokens(marks, [messages, documents, variables])
        shown = [_hide_in(message, hidden, end, kept) for message in messages]
        if any("reasoning_content" in message for message in messages):
            fields = names_in(template).fields
            if "thinking" in fields and "reasoning_content" not in fields:
                shown = list(map(_as_thinking, shown))
        if continues:
            shown[-1] = {**shown[-1], "content": shown[-1]["content"] + _END}
        try:
            with bounded_time():
                text = str(
                    self._tokenizer.apply_chat_template(
                        shown,
                        tools=hidden.hide(documents) or None,
                        tokenize=False,
                        add_generation_prompt=not continues,
                        **hidden.hide(variables or {}),
                    )
                )
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            why = first_line(error)
            raise InputError(f"the model's chat template refuses this dialogue: {why}") from None
        if continues:
            text, *rest = text.split(_END)
            if len(rest) != 1:
                times = f"this model's shows it {len(rest)} times"
                wanted = f"expected a chat template that shows the last message once, {times}"
                raise InputError(f"continue_final_message: {wanted}")
        if len(text) > (most := limits.PROMPT_CHARS_MAX):
            made = f"{len(text)} characters of this dialogue, expected at most {most}"
            raise InputError(f"the model's chat template makes {made}")
        return hidden.rendered(text)

    def template(self, tools: Sequence[Tool] = ()) -> str:
        """The chat template, of which a model may have another one for tools; empty without one."""
        if not self.has_chat_template:
            return ""
        try:
            documents = [tool.document for tool in tools] or None
            return str(self._tokenizer.get_chat_template(tools=documents))
        except Exception as error:  # noqa: BLE001 - whatever transformers meets in a broken file
            raise InputError(f"the model's chat template cannot be used: {first_line(error)}") from None

    def takes_tools(self, messages: Messages, tools: Sequence[Tool], variables: Mapping[str, Any]) -> bool:
        """Whether the template tells of tools, which it need not do though it looks at them."""
        if not self._takes_tools and "tools" in names_in(self.template(tools)).variables:
            with_tools = self.render_chat(messages, tools, variables)
            without = self.render_chat(messages, (), variables)
            self._takes_tools = with_tools.readable() != without.readable()
        return self._takes_tools

    @property
    def is_in_channels(self) -> bool:
        """Whether the model writes messages in channels."""
        return is_in_channels(self.added_tokens)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """Tokens that were added to the vocabulary, special ones among them, by their names."""
        return {str(text): token for token, text in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` leaves out."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(token for token, text in added if text.special)

    def encode_dialogue(
        self, messages: Messages, *, system: str | None = None, is_raw: bool = False
    ) -> list[int]:
        """A dialogue in the chat template; without one, or raw, its texts one behind the other."""
        if is_raw or not self.has_chat_template:
            if system:
                raise InputError(
                    "--system needs a chat template, which this model lacks or --raw switched off"
                )
            return self.encode("".join(message["content"] for message in messages))
        before = [{"role": "system", "content": system}] if system else []
        return self.encode_chat([*before, *messages])

    def _encoded(self, text: str, bound: Bound | None, **options: bool) -> Any:
        check_utf8(text)
        with self._used():
            if bound is not None:
                self._check_length(text, bound)
            return self._tokenizer(text, **options)

    def _check_length(self, text: str, bound: Bound) -> None:
        """Raises `TooLongError` for a text of more tokens, having looked at no more than that takes: a piece
        of it has the tokens that it has in the whole, but for a few at its ends."""
        size, count = len(text.encode()), 0
        if size > bound.tokens * self.longest_bytes:
            raise TooLongError(size // self.longest_bytes)
        for begin in range(0, len(text), PIECE_CHARS) if len(text) > PIECE_CHARS else ():
            if not bound.is_wanted():
                raise InputError("nobody waits for these tokens any more")
            piece = text[begin : begin + PIECE_CHARS]
            found = len(self._tokenizer(piece, add_special_tokens=False)["input_ids"])
            count += max(0, found - 2 * self.longest_bytes)
            if count > bound.tokens:
                raise TooLongError(count)

    @cached_property
    def longest_bytes(self) -> int:
        """Bytes of text that a token stands for at most."""
        pieces = self._tokenizer.get_vocab()
        return max(map(len, pieces if self._bytes else map(str.encode, pieces)), default=1)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of new tokens, special ones left out."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        with self._used():
            return str(self._tokenizer.decode(list(tokens), **options))

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the text's UTF-8, maybe part of a character; a special one adds its name."""
        with self._used():
            piece = self._tokenizer.convert_ids_to_tokens(token)
            return b"" if piece is None else self._piece_bytes(piece)

    def _piece_bytes(self, piece: str) -> bytes:
        """What a token stands for, by how the vocabulary writes it; byte-level ones have other names, too."""
        if self._bytes:
            is_name = any(sign not in self._bytes for sign in piece)
            return piece.encode() if is_name else b"".join(self._bytes[sign] for sign in piece)
        if found := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(found[1])
        return piece.replace("\u2581", " ").encode()

    def token_bytes_of_all(self, count: int, stop_ids: Collection[int]) -> TokenBytes:
        """What each id below `count` adds to a text that a grammar binds; nothing what was added to the
        vocabulary, unless it is white space. Raises `InputError` for a vocabulary that cannot be one."""
        with self._used():
            texts = [b""] * count
            special = {*stop_ids, *self._tokenizer.all_special_ids}
            for piece, token in self._tokenizer.get_vocab().items():
                if not 0 <= token < count or token in special:
                    continue
                if piece in self.added_tokens:
                    found = b"" if piece.strip() else piece.encode()
                else:
                    found = self._piece_bytes(piece)
                if len(found) <= limits.TOKEN_BYTES_MAX:
                    texts[token] = found
        spaced = (token for token, text in enumerate(texts) if text[:1] == b" " and text[1:2].isalpha())
        first = next(spaced, None)
        drops = first is not None and not self.decode([first]).startswith(" ")
        try:
            return TokenBytes(tuple(texts), drops)
        except ValueError as error:
            raise InputError(f"the tokenizer of {self._model!r}: {error}") from None

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Has a tokenizer whose parts do not fit each other be one line. The tokenizers library raises
        `Exception` itself then, or where its Rust code panics one whose class nobody can import."""
        try:
            yield
        except BaseException as error:
            if type(error) is not Exception and type(error).__module__ != "pyo3_runtime":
                raise
            raise InputError(f"the tokenizer of {self._model!r} is broken: {first_line(error)}") from None


def _load(files: ModelFiles) -> Any:
    """A tokenizer in transformers' form. tokenizer.json is taken as it stands: classes of transformers may
    build another one. Llama 2's loses a space that a text begins with, or has none behind special tokens."""
    with importing():
        from transformers import PreTrainedTokenizerFast

    paths = [path for name in _FILES if (path := files.find(name)) is not None]
    try:
        if files.gguf is not None:
            from flowspec.model.gguf.tokenizer import load

            return load(files.gguf_file)
        with _plain_folder(paths) as folder:
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - both libraries raise anything for a broken file
        for path in paths:
            if path.suffix == ".json":
                read_json(path)  # says better what is wrong with it
        text = " ".join(str(error).split())
        raise InputError(f"cannot read the tokenizer of {files.model!r}: {text:.200}") from None


@contextlib.contextmanager
def _plain_folder(paths: Sequence[Path]) -> Iterator[Path]:
    """That of a tokenizer's files, and chat templates beside them; where some begin with a byte order mark,
    which transformers stumbles over, a copy without. Raises `InputError` for a link out of the folder, and
    for a file so large that reading it, which takes a hundred times its size, could take all memory."""
    folder = paths[0].parent
    paths = (*paths, *folder.glob("additional_chat_templates/*.jinja"))
    for path in paths:
        size, most = path.stat().st_size, limits.JSON_BYTES_MAX
        if size > most:
            raise InputError(f"{path}: expected at most {most >> 20} MiB, got {-(-size >> 20)}")
        check_inside(path, folder)
        if path.name == "tokenizer_config.json" and "fast_tokenizer_files" in read_json(path):
            raise InputError(f"{path}: fast_tokenizer_files: expected none, since tokenizer.json is read")
    if not any(read_head(path).startswith(codecs.BOM_UTF8) for path in paths):
        yield folder
        return
    with tempfile.TemporaryDirectory() as room:
        for path in paths:
            copy = Path(room, path.relative_to(folder))
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(path.read_bytes().removeprefix(codecs.BOM_UTF8))
        yield Path(room)


def _hide_in(
    message: dict[str, Any], hidden: HiddenTokens, end: str, kept: Collection[str]
) -> dict[str, Any]:
    """A message without the texts of special tokens. In an assistant's, up to the `end` of thoughts, those
    around thoughts are `kept`: the template looks for them, to tell thoughts from text."""
    found, text = hidden.hide(message), message.get("content")
    if message["role"] == "assistant" and isinstance(text, str) and end and end in text:
        begin, mark, rest = text.rpartition(end)
        found["content"] = hidden.hide(begin + mark, kept) + hidden.hide(rest)
    return dict(found)


def _is_looked_for(mark: str, template: str) -> bool:
    quoted = f"""['"]{re.escape(mark)}"""
    call = rf"(?:split|startswith|endswith|find|index|replace)\(\s*{quoted}"
    return re.search(rf"""{call}|{quoted}['"]\s+(?:not\s+)?in\b""", template) is not None


def _as_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a template that calls thoughts `thinking`, and takes them or a text beside calls."""
    found = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "reasoning_content" in message and not (found.get("tool_calls") and found["content"]):
        found["thinking"] = message["reasoning_content"]
    return found


def check_utf8(text: str) -> None:
    """Raises `InputError` for a text that came from bytes of another encoding."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError("expected text in UTF-8, got bytes that are none") from None


class TextStream:
    """Turns tokens into text as they come: never half a character, never the beginning of a stop string. Text
    is what an answer in channels has for the user, and one with a `form` beside thoughts and calls."""

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), form: ReplyForm | None = None
    ) -> None:
        self._tokenizer, self._stops, self._has_parts = tokenizer, tuple(stop_strings), form is not None
        self._form = form or ReplyForm(is_in_channels=tokenizer.is_in_channels)
        self._reader, ids = self._form.reader(), tokenizer.added_tokens
        self._marks = {ids[text]: text for text in self._form.marks if text in ids}
        self._parts: list[Part] = []
        self.thought_tokens = 0
        """Tokens of thoughts, with the marks around them."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = self._shown = 0
        self._has_begun = False
        self.text = ""
        """All text so far, cut before a stop string."""
        self.is_stopped = False
        """Nothing of what comes is read any more."""
        self.is_cut = False
        """The text ended before a stop string, which is no part of it."""

    def push(self, tokens: Sequence[int]) -> str:
        """Takes new tokens, returns the text that can be shown now."""
        self._count += len(tokens)
        for token in tokens:
            was_thinking = self._reader.is_thinking
            if token in self._marks:
                self._flush()
                self._read(self._marks[token], is_mark=True)
            else:
                self._read(self._decoder.decode(self._bytes(token)))
            if self._has_parts:
                self.thought_tokens += was_thinking or self._reader.is_thinking
        return self._show(len(self.text) - unfinished(self.text, self._stops))

    def stops_at(self, tokens: Sequence[int]) -> bool:
        """As a `StopRule` of the core, which pushes nothing itself."""
        self.push(tokens[self._count :])
        return self.is_stopped

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        self._flush()
        if not self.is_stopped:
            self._sort(self._reader.finish())
        return self._show(len(self.text))

    def take_parts(self) -> tuple[Part, ...]:
        """What there is of thoughts and calls since the last time."""
        found, self._parts = tuple(self._parts), []
        return found

    def _bytes(self, token: int) -> bytes:
        """What a token adds to the text; the first may lose a space that it begins with."""
        if token in self._tokenizer.special_ids:
            return b""
        own, is_first, self._has_begun = self._tokenizer.token_bytes(token), not self._has_begun, True
        if is_first and own.startswith(b" "):
            text = self._tokenizer.decode([token])
            return own if UNFINISHED in text else text.encode()
        return own

    def _flush(self) -> None:
        """What is pending; the bytes of half a character at its end are no text."""
        rest = self._decoder.decode(b"", final=True)
        if rest not in ("", UNFINISHED):  # the decoder holds half a surrogate, too
            self._read(rest)

    def _read(self, fresh: str, *, is_mark: bool = False) -> None:
        if not self.is_stopped:
            self._sort(self._reader.push(fresh, is_mark=is_mark))

    def _sort(self, parts: Sequence[Part]) -> None:
        """Text to the text, and the others beside it, up to a stop string, or the end of the only call."""
        for part in parts:
            if part.kind == "content":
                self._grow(part.text)
            elif self._has_parts:
                self._parts.append(part)
                self.is_stopped |= self._form.is_single and part.kind == "end"
            if self.is_stopped:
                return

    def _grow(self, fresh: str) -> None:
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += fresh
        found = [at for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.is_stopped = self.is_cut = True

    def _show(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommended:
    """What a model's files say: its stop tokens; those that are never to be drawn; fields of `Sampling`, a
    temperature among them where the model samples, else penalties alone; and features that FlowSpec lacks,
    which callers that follow the recommendation refuse."""

    stop_ids: frozenset[int]
    sampling: Mapping[str, float] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    unsupported: tuple[str, ...] = ()


def recommended(files: ModelFiles, config: Any) -> Recommended:
    """Reads generation_config.json, or what stands for it in a GGUF file, and the config's stop tokens.
    Raises `InputError` for fields that are not what they should be."""
    path, raw = files.find("generation_config.json"), dict[str, Any]()
    if files.gguf is not None:
        raw = files.gguf_file.generation_config()
    elif path is not None:
        raw = read_json(path)
    said = {name: raw[name] for name in _RECOMMENDED if raw.get(name) is not None}
    for name, value in said.items():
        if type(value) not in (int, _RECOMMENDED[name]) or not -math.inf < value < math.inf:
            raise InputError(f"{path}: {name}: expected a number, got {value!r:.80}")
    stops = raw.get("eos_token_id", getattr(config, "eos_token_id", None))
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(stop) is int for stop in stops):
        raise InputError(f"{path}: eos_token_id: expected a token id or a list of them, got {stops!r:.80}")
    suppressed = _token_ids(f"{path}: suppress_tokens", raw.get("suppress_tokens"))
    if files.gguf is not None:
        from flowspec.model.gguf import tokenizer

        stops = [*stops, *tokenizer.stop_ids(files.gguf_file)]
        key = "tokenizer.ggml.suppress_tokens"
        suppressed |= _token_ids(f"{files.gguf}: {key}", files.gguf_file.metadata.get(key))
    penalties = {name: value for name, value in said.items() if name.endswith("_penalty")}
    return Recommended(
        stop_ids=frozenset(stops),
        sampling={"temperature": 1.0, **said} if raw.get("do_sample") else penalties,
        suppress_tokens=tuple(sorted(suppressed)),
        unsupported=tuple(name for name, off in _UNSUPPORTED.items() if raw.get(name) not in (None, off)),
    )


def _token_ids(name: str, value: Any) -> set[int]:
    """Those of a list that a file may have; raises `InputError` for anything else."""
    found = [] if value is None else value
    if not isinstance(found, list) or not all(
        type(token) is int and 0 <= token <= limits.VOCABULARY_MAX for token in found
    ):
        raise InputError(f"{name}: expected a list of token ids, got {value!r:.80}")
    if len(found) > limits.SUPPRESS_TOKENS_MAX:
        raise InputError(f"{name}: expected at most {limits.SUPPRESS_TOKENS_MAX} token ids, got {len(found)}")
    return set(found)
