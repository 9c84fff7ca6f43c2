"""FlowSpec: one language model, sliced over small devices, exact and fast for one user.

    from flowspec import LLM

    with LLM("Qwen/Qwen3-0.6B", cluster="my-cluster.toml") as llm:
        print(llm.generate("Why is the sky blue?").text)

docs/api.md has more. Names are imported when they are first used: transformers takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flowspec.version import __version__

if TYPE_CHECKING:
    from flowspec.errors import (
        ClusterError,
        FlowSpecError,
        InputError,
        NoRoomError,
        PeerError,
        UnexpectedError,
    )
    from flowspec.llm import LLM
    from flowspec.plan.advice import ModelDoesNotFitError
    from flowspec.runtime.answer import Answer, AnswerStream, AsyncAnswerStream, Piece
    from flowspec.runtime.cluster import Device
    from flowspec.runtime.cluster_text import Cluster
    from flowspec.runtime.sampling_params import SamplingParams
    from flowspec.runtime.token_log import TokenLogprob, TopLogprob

__all__ = [
    "LLM",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "Cluster",
    "ClusterError",
    "Device",
    "FlowSpecError",
    "InputError",
    "ModelDoesNotFitError",
    "NoRoomError",
    "PeerError",
    "Piece",
    "SamplingParams",
    "TokenLogprob",
    "TopLogprob",
    "UnexpectedError",
    "__version__",
]

_MODULES = {
    "LLM": "llm",
    **dict.fromkeys(("Answer", "AnswerStream", "AsyncAnswerStream", "Piece"), "runtime.answer"),
    **dict.fromkeys(("TokenLogprob", "TopLogprob"), "runtime.token_log"),
    "Cluster": "runtime.cluster_text",
    "Device": "runtime.cluster",
    "SamplingParams": "runtime.sampling_params",
    "ModelDoesNotFitError": "plan.advice",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
