"""Fields of the API and of other servers that this one takes without doing anything for them: they cannot
change an answer, or hold a value by which nothing is asked. And those that have another name here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CACHED = "what a prompt shares with earlier ones is always taken over"
_GUESSED = "how is guessed never changes an answer"
_MADE_ALIKE = "all requests are served alike, first come, first served"
_NOT_KEPT = "nothing is kept of a request"
_NOT_TOLD_APART = "who asks is not told apart"
_STAYS = "the model stays loaded"

HARMLESS: Mapping[str, str] = {
    "user": _NOT_TOLD_APART,
    "safety_identifier": _NOT_TOLD_APART,
    "metadata": _NOT_KEPT,
    "client_metadata": _NOT_KEPT,
    "store": _NOT_KEPT,
    "service_tier": _MADE_ALIKE,
    "priority": _MADE_ALIKE,
    "prompt_cache_key": _CACHED,
    "prompt_cache_retention": _CACHED,
    "prompt_cache_options": _CACHED,
    "cache_prompt": _CACHED,
    "n_cache_reuse": _CACHED,
    "id_slot": _CACHED,
    "keep_alive": _STAYS,
    "ttl": _STAYS,
    "draft_model": _GUESSED,
    "speculative.n_max": _GUESSED,
    "speculative.n_min": _GUESSED,
    "speculative.p_min": _GUESSED,
}
"""Fields that may hold anything, and why nothing is lost by not obeying them: of OpenAI's API, llama.cpp,
vLLM, Ollama and LM Studio. One that asks for another answer, for another form of it, or that others shall not
learn of it (vLLM's `cache_salt`) has no place here."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "min_tokens": (0,),
    "bad_words": ([],),
    "length_penalty": (1,),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "mirostat": (0,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "t_max_predict_ms": (0,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "grammar": ("",),
    "lora": ([],),
}
"""Fields of vLLM and llama.cpp that clients send whether or not anything is asked by them, with the values by
which nothing is; any other value is refused."""

ELSEWHERE: Mapping[str, str] = {
    "json_schema": "response_format of type json_schema",
    "format": "response_format",
    "lark": "structured_outputs.grammar",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "prompt": "messages (a prompt goes to /v1/completions)",
    "messages": "prompt (messages go to /v1/chat/completions)",
}
"""What fields of llama.cpp, Ollama, transformers, older vLLM, our own Python API and the other kind of
request are called here."""
