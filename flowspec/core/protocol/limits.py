"""Every limit of what is taken from others, peers or files, by name and in one place."""

from __future__ import annotations

STAGES_MAX = 256
LAYERS_MAX = 1024
"""Of a model: eight times the deepest known. A layer's modules take a daemon 34 KiB and 2 ms before anything
of it is loaded."""
NODES_PER_SEGMENT_MAX = 512
"""Rows of one segment; prefill chunks and draft trees both stay below."""
PARTS_PER_SEGMENT_MAX = 64
REQUESTS_MAX = 256
"""Requests whose cache a stage keeps at once."""
CONVERSATIONS_MAX = 128
"""Conversations that a head keeps at once: half of what a stage keeps, for a Release may come later than the
next Open."""
FEATURES_ROWS_MAX = 128
"""Nodes of one message of features. With eight states of each, of 16,384 numbers of 4 bytes, that is the
largest payload."""
COMMIT_PATH_MAX = 4096
"""Nodes that one Commit names: those since the last Commit that every stage is known to have."""
LIST_MAX = 4096
"""Entries of any list in a header: the longest that a message holds is a Commit's path."""
TREE_NODES_MAX = 256
"""Uncommitted nodes of one request that may hold slots at a stage; reserved on top of the context."""
DRAFT_NODES_MAX = 1024
"""Living uncommitted nodes of one request at the head, and so the slots that a drafter reserves on top of the
context."""
CACHE_BLOCK_SLOTS = 256
"""By so many slots a cache grows."""
DRAFTERS_MAX = 16
"""Models beside the target that a head makes use of."""
DRAFT_WIDTH_MAX = 64
"""Children that a drafter proposes for one node."""
TOP_LOGPROBS_MAX = 20
"""Likeliest tokens whose log-probabilities come with a token."""
SUPPRESS_TOKENS_MAX = 1024
"""Tokens that an answer may not have. So many, and as many biases, of each part of a segment fit into a
header."""
LOGIT_BIAS_MAX = 512
"""Tokens whose logits a request adds something to."""
BIAS_MAX = 100.0
"""What is added to a logit, or taken off."""
PENALTY_MAX = 2.0
"""Of presence and of each time: what is taken off the logit of a token that the answer has already."""
REPETITION_PENALTY_MIN = 0.01
REPETITION_PENALTY_MAX = 100.0
"""By which logits of tokens of the text are divided or multiplied."""
GRAMMAR_BYTES_MAX = 1 << 16
"""Of a schema, a regular expression or a grammar, in UTF-8. As many as a segment has parts fit into a header.
"""
GRAMMAR_ENDS_MAX = 256
"""Tokens that end an answer which a grammar binds."""
GRAMMAR_MARKS_MAX = 64
"""Tokens without text that a grammar names."""
TOKEN_BYTES_MAX = 1024
"""That one token adds to a text, where grammars are concerned."""
TOKEN_TABLE_BYTES_MAX = 64 << 20
"""Of what all tokens of a model add to a text."""
ARITHMETICS_MAX = 16
"""Arithmetics of one precision that a device has."""
CAPTURES_MAX = 8
"""Hidden states that a drafter may want of one node."""
CONTEXT_MAX = 1 << 20
QUEUED_SEGMENTS_MAX = 1024
"""Segments that wait at one stage; the head has four for each stage on their way at most."""
QUEUED_BYTES_MAX = 512 << 20
"""Payloads that wait at one stage: sixty times a prompt's chunk of a model as wide as 16384, in float32."""
TEMPERATURE_MIN = 1e-3
"""Below this, log-probabilities leave the range in which single precision tells them apart; 0 is argmax."""
TEMPERATURE_MAX = 100.0
VOCABULARY_MAX = 1 << 22
ID_MAX = (1 << 62) - 1
THREADS_MAX = 1 << 16
"""Threads of a daemon, and cores of a machine."""
CELSIUS_RANGE = (-100.0, 300.0)
"""Degrees that a device may have; what a sensor says beyond is none."""
CLOCK_MHZ_MAX = 1e6
NAME_CHARS_MAX = 200
TEXT_CHARS_MAX = 4096
HEADER_BYTES_MAX = 6 << 20
PAYLOAD_BYTES_MAX = 64 << 20

CONNECTIONS_MAX = 512
"""TCP connections to a daemon's port: below the 1024 files that a process may commonly have open."""
PEERS_MAX = 256
"""Connections to a daemon that have said Hello."""
BANNED_MAX = 1024
"""Connections that a daemon remembers not to listen to."""
QUESTIONS_MAX = 16
"""Questions for facts that wait at a daemon."""
MESSAGES_PER_TURN_MAX = 64
"""Messages that a device takes from its sockets before it looks after its deadlines and results again."""
WORK_QUEUED_MAX = 1 << 16
"""Pieces of work (caches to open, clear and close, jobs) that wait for a daemon's compute thread."""
FRAMES_QUEUED_MAX = 4096
"""Messages that wait to leave on one connection."""
FRAMES_UNREAD_MAX = 256
"""Messages that have come on one connection and wait to be read; beyond, the sender waits."""

CONFIG_CHARS_MAX = 1 << 17
TENSORS_MAX = 1 << 17
"""Tensors of a model that a head offers."""
TENSORS_LISTED_MAX = 1024
"""Tensors in one message."""
TENSOR_AXES_MAX = 8
TENSOR_BYTES_MAX = 1 << 36
DIGEST_CHARS = 64
WEIGHT_CHUNK_BYTES = 1 << 20
"""Most bytes of weights that one message brings."""
TOKEN_CHUNK_BYTES = 1 << 18
"""Most bytes of a table of tokens that one message brings: pings stand behind it."""
WEIGHT_WINDOW = 8
"""Questions about weights that a daemon may have open: with 8 MiB on their way a gigabit link is busy for 60
ms."""

PREFILL_CHUNK = 128
"""Prompt tokens per segment: enough rows to be compute-bound, few enough to fill the pipeline early."""

JSON_BYTES_MAX = 64 << 20
"""Of a model's JSON file: the index of a thousand shards has a few."""
TENSOR_HEADER_BYTES_MAX = 100_000_000
"""Of a safetensors file; the format's own limit."""
GGUF_ENTRIES_MAX = 1 << 16
GGUF_TEXT_BYTES_MAX = 1 << 24
TOML_BYTES_MAX = 1 << 20
PROMPTS_BYTES_MAX = 256 << 20
PROMPT_CHARS_MAX = 1 << 24
"""Of one turn: more than the longest context holds at sixteen characters a token."""
