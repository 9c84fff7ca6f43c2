"""Which tokens may follow the beginning of a text that a grammar binds.

llguidance says it, and only here. It is a parser over bytes and knows no state but the text, so a mask is a
function of the grammar, the vocabulary and the path, in whatever order it is asked for.

- A token may follow if with it the text is still the beginning of one that the grammar allows, however it is
  cut into tokens (`no_forcing`). One without text may follow only as a mark that a reply's grammar names.
- Those that end the answer may follow exactly where the text is whole; and where nothing else may: behind a
  wrong guess, where the vocabulary cannot write what is due, and where the library gives up at a limit
  (`is_whole` tells the API).
- Between the parts of a JSON document is at most one space behind a comma or a colon: a small model that may
  write any white space writes nothing else.
- The library does not say how large a grammar a JSON schema comes to, which can be a million times its text:
  each item up to `maxItems` is a rule of its own, and what is put together (`allOf`, `$ref` and more
  beside it) is written out wherever that is. So its size is counted first (`size_of`).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from msgspec import structs

from flowspec.core.protocol import limits
from flowspec.core.protocol.messages import Grammar
from flowspec.core.protocol.token_bytes import TokenBytes
from flowspec.errors import InputError
from flowspec.extras import how_to_get

Mask = npt.NDArray[np.bool_]

LEXER_STATES_MAX = 20_000
"""Of one request, each of one or two KB. It is what bounds a step: the library's other bound counts the
states that a step makes anew, and so depends on what was asked before."""
_NO_BOUND = 1 << 62
_NEVER_IN_UTF8 = 0xFF
"""The library marks special tokens with it."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_JSON_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*|#[^\n]*')
_PLACED_BYTES_MAX = 1 << 14
"""In schemas up to this the place of a fault is looked for, which takes some times as long as to find it."""
_JSON_IN_LARK = re.compile(r"%json\s*")
_REFUSED_IN_LARK = (
    (re.compile(r"%llguidance\b"), "options of the library (%llguidance)"),
    (re.compile(r"[\w\-]\s*\["), "attributes of rules (name[...])"),
    (re.compile(r"<[\[|\w]"), "special tokens (<...>)"),
    (re.compile(r"@"), "other grammars (@name)"),
)


@lru_cache(maxsize=1)
def library_version() -> str:
    """The library and its version, as devices tell it; empty where it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        return ""
    return f"llguidance {version(library.__name__)}"


def check_library() -> None:
    """Raises `InputError` where there is no library on this device."""
    if not library_version():
        raise InputError(f"structured output needs llguidance here; {how_to_get('grammars')}")


def schema_text(schema: Any) -> str:
    """A JSON schema as a `Grammar` has it: an object, true, or the text of either."""
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"json_schema: expected what JSON can hold, got another object ({error!s:.80})"
        ) from None


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON document that the schema allows, within a grammar of the form of Lark. Raises `InputError`."""
    if "x-guidance" in schema:
        raise InputError("json_schema: options of the library (x-guidance) are not taken")
    check_size(size_of(schema))
    return f"%json {schema_text({**schema, 'x-guidance': _JSON_SPACES})}"


def rule_of(kind: str, text: str) -> str:
    """A text that a grammar of this kind allows, within another one; raises `InputError`."""
    check_library()
    if kind == "json_schema":
        return json_rule(_schema(text))
    if kind == "regex":
        import llguidance

        wrapped = json.loads(llguidance.LLMatcher.grammar_from_regex(text))
        return str(wrapped["grammars"][0]["lark_grammar"]).removeprefix("start: ")
    raise InputError("a grammar cannot be a part of a reply with calls or channels")


@lru_cache(maxsize=256)
def check_grammar(kind: str, text: str, marks: int = 0) -> None:
    """Raises `InputError` for what the library cannot do, and what no text satisfies as far as can be told at
    its beginning. Takes a second at most, however large the grammar is, which names so many `marks`."""
    check_library()
    try:
        size, most = len(text.encode()), limits.GRAMMAR_BYTES_MAX
    except UnicodeEncodeError:
        raise InputError(f"{kind}: expected text in UTF-8, got half a character") from None
    if size > most:
        advice = "; offer fewer or smaller tools" if kind == "reply" else ""
        raise InputError(f"{kind}: expected at most {most} bytes, got {size}{advice}")
    if reason := _refusal(kind, text, _BYTE_MARKS[:marks]):

        def is_refused(schema: Mapping[str, Any]) -> bool:
            with contextlib.suppress(InputError):
                return _refusal("json_schema", schema_text(schema)) == reason
            return False

        is_placed = kind == "json_schema" and size <= _PLACED_BYTES_MAX
        place = place_of_fault(_schema(text), is_refused) if is_placed else ""
        raise InputError(f"{kind}{place}: {reason}")


def is_whole(grammar: Grammar, tokens: TokenBytes, answer: Sequence[int]) -> bool:
    """Whether an answer is a text that the grammar allows, however it was cut into tokens."""
    text = [each for token in answer for each in in_bytes(grammar, tokens, token)]
    return GrammarMasks(over_bytes(grammar), single_bytes()).is_whole(text)


def over_bytes(grammar: Grammar) -> Grammar:
    """The same grammar for the vocabulary of `single_bytes`."""
    return structs.replace(grammar, marks=_BYTE_MARKS[: len(grammar.marks)])


def in_bytes(grammar: Grammar, tokens: TokenBytes, token: int) -> Sequence[int]:
    """A token in the vocabulary of `single_bytes`; nothing for one without text that is no mark either."""
    if token in grammar.marks:
        return (_BYTE_MARKS[grammar.marks.index(token)],)
    return tokens.texts[token] if token < len(tokens.texts) else b""


def common_beginning(first: list[int], second: list[int]) -> int:
    """How many tokens both begin with. Lists are compared as wholes, which takes microseconds."""
    same, end = 0, min(len(first), len(second))
    if first[:end] == second[:end]:
        return end
    while end - same > 1:  # they differ before `end`
        middle = (same + end) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            end = middle
    return same


class _Wrapper:
    """What the library asks of a tokenizer: bytes, and one more token for where a text may end."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.tokens = [b"" if _NEVER_IN_UTF8 in text else text for text in texts] + [b""]
        self.eos_token_id = len(texts)
        self.special_token_ids = [len(texts)]

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("nothing is forced, so no text is cut into tokens")


class GrammarVocabulary:
    """A model's vocabulary as the library holds it, for the masks of any number of requests."""

    def __init__(self, tokens: TokenBytes) -> None:
        import llguidance

        self.tokens = tokens
        wrapper: Any = _Wrapper(tokens.texts)
        self.library = llguidance.LLTokenizer(wrapper, slices=[])  # they take longer to make than they save
        spaced = [text.startswith(b" ") for text in tokens.texts] if tokens.drops_first_space else []
        self.spaced: Mask = np.array(spaced, dtype=np.bool_)


BYTES_COUNT = 256
_BYTE_MARKS = tuple(range(BYTES_COUNT, BYTES_COUNT + limits.GRAMMAR_MARKS_MAX))
"""Where a vocabulary of single bytes has marks."""


@lru_cache(maxsize=1)
def single_bytes() -> GrammarVocabulary:
    """A vocabulary of single bytes and marks, by which a grammar speaks of texts and not of tokens."""
    texts = [bytes([byte]) for byte in range(BYTES_COUNT)] + [b"" for _ in _BYTE_MARKS]
    return GrammarVocabulary(TokenBytes(tuple(texts)))


class GrammarMasks:
    """The masks of one request, by the tokens of its answer so far. One thread at a time uses it."""

    def __init__(self, grammar: Grammar, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._count = len(vocabulary.tokens.texts)
        self._ends = np.array([end for end in grammar.ends if end < self._count], dtype=np.int64)
        self._grammar = grammar
        self._marks = frozenset(mark for mark in grammar.marks if mark < self._count)
        self._start_anew()

    def allowed(self, answer: Sequence[int]) -> Mask:
        """Which tokens may follow `[vocabulary]`; at least those that end the answer may."""
        bits = self._asked(answer, self._bits)
        mask = np.zeros(self._count, dtype=np.bool_) if bits is None else bits[: self._count]
        if not answer and len(self._vocabulary.spaced):
            mask[self._vocabulary.spaced] = False
        mask[self._ends] = bits is None or bits[self._count]
        if not mask.any():
            mask[self._ends] = True
        return mask

    def _bits(self) -> Mask:
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=self._count + 1, bitorder="little").astype(np.bool_)

    def is_whole(self, answer: Sequence[int]) -> bool:
        """Whether the answer, without the token that ends it, is a text that the grammar allows."""
        return bool(self._asked(answer, lambda: self._matcher.is_accepting()))

    def forced(self, answer: Sequence[int], most: int) -> list[int]:
        """The tokens that alone can follow behind the answer, one behind the other, `most` of them; the
        library would say all at once, which for `a{1000000}` takes seconds."""
        return self._asked(answer, lambda: self._alone(most)) or []

    def _alone(self, most: int) -> list[int]:
        found: list[int] = []
        every = (1 << (self._count + 1)) - 1
        while len(found) < most:
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little") & every
            if allowed.bit_count() != 1 or allowed >> self._count:
                break
            found.append(allowed.bit_length() - 1)
            self._matcher.consume_token(found[-1])
        if found and not self._matcher.is_error():
            self._matcher.rollback(len(found))
        return found

    def may_go_on(self, answer: Sequence[int], more: Sequence[int]) -> bool:
        """Whether these tokens may follow, one behind the other."""
        found = self._asked(answer, lambda: self._matcher.validate_tokens(list(more)))
        return found is not None and int(found) == len(more)

    def _asked(self, answer: Sequence[int], ask: Callable[[], Any]) -> Any:
        """What the matcher says behind the answer; None where it cannot be there, or gives up. States of
        other paths count against its limit, so it is asked once more from the beginning, without them."""
        for _ in range(2):
            found = ask() if self._moved(answer) else None
            if not self._matcher.is_error():
                return found
            self._start_anew()
        return None

    def _moved(self, answer: Sequence[int]) -> bool:
        """Has the matcher stand behind the answer, if it can; it goes back to where its path leaves that."""
        common = common_beginning(self._at, list(answer))
        if common < len(self._at):
            self._matcher.rollback(len(self._at) - common)
            del self._at[common:]
        if self._matcher.is_error():
            self._start_anew()
            common = 0
        more = [int(token) for token in answer[common:]]
        if not all(map(self._is_text, more)):
            return False
        taken = self._matcher.try_consume_tokens(more) if more else 0
        self._at += more[:taken]
        return taken == len(more)

    def _is_text(self, token: int) -> bool:
        """Whether a token may be in the text of the answer."""
        return token in self._marks or (token < self._count and bool(self._vocabulary.tokens.texts[token]))

    def _start_anew(self) -> None:
        """With a matcher that has no states yet, which a copy of one would have."""
        grammar = self._grammar
        self._at: list[int] = []
        self._matcher = _matcher(grammar.kind, grammar.text, grammar.marks, self._vocabulary.library)


def _matcher(kind: str, text: str, marks: Sequence[int], tokenizer: Any) -> Any:
    """One that has read nothing; in an error where the grammar cannot be used."""
    import llguidance

    bounds = llguidance.LLParserLimits(
        max_lexer_states=LEXER_STATES_MAX, step_lexer_fuel=_NO_BOUND, verbose_errors=False
    )
    return llguidance.LLMatcher(tokenizer, _lark(kind, text, marks), log_level=0, limits=bounds)


def _refusal(kind: str, text: str, marks: Sequence[int] = ()) -> str:
    """Why this grammar cannot be used, by the library; empty where it can."""
    matcher = _matcher(kind, text, marks, single_bytes().library)
    matcher.compute_bitmask()
    if matcher.is_error():
        return _reason(matcher.get_error())
    warnings = matcher.get_grammar_warnings()
    return _reason(str(warnings[0])) if warnings else ""


def _reason(error: str) -> str:
    """What the library says, as one line of people's words."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    found = lines[0] if lines else ""
    if found in ("", "NoExtensionBias", "NoExtension"):
        return "expected what some text satisfies, got what none does"
    if (cause := next((line for line in lines if line.startswith("error: ")), None)) is not None:
        found = f"{found.partition(': regex parse error')[0]}: {cause.removeprefix('error: ')}"
    found = re.sub(r"^at \d+\(\d+\): ", "", found)
    found = found.removeprefix("failed to compile JSON schema: ").partition(". Enable '")[0]
    return f"llguidance refuses it: {found:.200}"


def _lark(kind: str, text: str, marks: Sequence[int]) -> str:
    """The grammar as the library takes it. Raises `InputError` for what it would take and not obey."""
    if kind == "reply":
        named = "".join(f"\nmark_{place}: <[{mark}]>" for place, mark in enumerate(marks))
        return f"{_NO_FORCING}{text}{named}"
    if kind == "lark":
        if "x-guidance" in text:
            raise InputError("lark: options of the library (x-guidance) are not taken")
        bare = _LITERAL.sub('""', text)
        for pattern, name in _REFUSED_IN_LARK:
            if pattern.search(bare):
                raise InputError(f"lark: {name} are not taken")
        check_size(sum(map(size_of, _schemas_in(text))), "lark: %json")
        return f"{_NO_FORCING}{text}"
    return f"{_NO_FORCING}start: {rule_of(kind, text)}"


def _schemas_in(text: str) -> Iterator[Any]:
    """The schemas within a grammar of the form of Lark."""
    for found in _JSON_IN_LARK.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise InputError("lark: expected a JSON schema behind %json") from None
        yield schema


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"json_schema: expected an object, got text that is no JSON document ({error!s:.80})"
        ) from None
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise InputError(f"json_schema: expected an object, or true, got {schema!r:.80}")
    return schema


SIZE_MAX = 1 << 14
"""Schemas and items in all; llguidance takes about a second and 150 MB for as many."""
TRIES_MAX = 32
"""Schemas that are tried alone where the place of a fault is looked for."""
CHARS_MAX = 120
"""Of a place; names in a schema may be of any length."""
DESCRIBING = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id")
)
"""Words that say nothing of a value."""
NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Words that hold schemas by names."""
_VALUES = frozenset(("enum", "const", "default", "examples"))
_BESIDE = DESCRIBING | {"$defs", "definitions"}


def check_size(size: int, what: str = "json_schema") -> None:
    """Raises `InputError` for what comes to too much."""
    if size > SIZE_MAX:
        raise InputError(
            f"{what}: expected at most {SIZE_MAX} schemas and items (minItems, maxItems), each counted "
            "wherever it is put together with others (allOf, $ref)"
        )


def size_of(root: Any) -> int:
    """Schemas and items that this comes to, if not too many. Raises `InputError` for too deep ones."""
    known: dict[str, int] = {}

    def size(schema: Any, *, is_whole: bool) -> int:
        """With all that it refers to where it `is_whole`, as is what is put together."""
        if not isinstance(schema, Mapping):
            return 1
        is_whole = is_whole or _is_put_together(schema)
        found = 1 + max(_number(schema.get(word)) for word in ("minItems", "maxItems"))
        reference = schema.get("$ref")
        if is_whole and isinstance(reference, str):
            if reference not in known:
                known[reference] = 0  # the library refuses what it would have to write out for ever
                known[reference] = size(_referred(root, reference), is_whole=True)
            found += known[reference]
        for _, inner in inner_schemas(schema):
            found += size(inner, is_whole=is_whole)
            if found > SIZE_MAX:
                break
        return found

    try:
        return size(root, is_whole=False)
    except RecursionError:
        raise InputError("json_schema: expected fewer schemas in schemas") from None


def _referred(root: Any, reference: str) -> Any:
    """What is in a place of a schema; None for nothing."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        raise InputError(
            f"json_schema: expected a $ref to a place here, with more beside it, got {reference!r:.80}"
        )
    found: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        if isinstance(found, list):
            found = {str(at): each for at, each in enumerate(found)}
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _is_put_together(schema: Mapping[str, Any]) -> bool:
    together = schema.get("allOf")
    if isinstance(together, list) and len(together) > 1:
        return True
    said = set(schema) - _BESIDE
    return len(said) > 1 and not said.isdisjoint(("$ref", "allOf", "anyOf", "oneOf"))


def _number(found: Any) -> int:
    return min(found, SIZE_MAX) if type(found) is int and found > 0 else 0


def inner_schemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place there: `.properties.city`, `.anyOf[0]`."""
    for word, said in schema.items():
        if word in NAMED_SCHEMAS and isinstance(said, Mapping):
            yield from ((f".{word}.{name}", each) for name, each in said.items())
        elif word not in _VALUES and isinstance(said, list):
            yield from ((f".{word}[{at}]", each) for at, each in enumerate(said) if isinstance(each, Mapping))
        elif word not in _VALUES and isinstance(said, Mapping):
            yield f".{word}", said


def place_of_fault(schema: Mapping[str, Any], is_faulty: Callable[[Mapping[str, Any]], bool]) -> str:
    """The place of the innermost schema that `TRIES_MAX` tries find faulty alone; empty for the whole."""
    # what it refers to by name is there, and allows anything: a fault in it is found there
    named = {
        word: dict.fromkeys(schema[word], True)
        for word in ("$defs", "definitions")
        if isinstance(schema.get(word), Mapping)
    }
    place, left = "", inner_schemas(schema)
    for _ in range(TRIES_MAX):
        at, inner = next(left, ("", None))
        if not at or len(place) + len(at) > CHARS_MAX:
            break
        if isinstance(inner, Mapping) and is_faulty({**inner, **named}):
            place, left = place + at, inner_schemas(inner)
    return place
