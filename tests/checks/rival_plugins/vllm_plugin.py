"""What stands between vLLM's tests of its server and the one that is there: its class that starts a server
finds this one, and modules that are not installed here (vLLM itself is none of them) are there with anything
in them, so that files that ask for them can be read. A test that then uses one of them is skipped, and one
that asks no server is left out."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from unittest.mock import MagicMock

import openai
import pytest
import requests
from records import heard

URL, MODEL = os.environ["RIVALS_URL"].removesuffix("/v1"), os.environ["RIVALS_MODEL"]
ABSENT = (
    *(
        "vllm",
        "torch",
        "transformers",
        "tblib",
        "PIL",
        "cloudpickle",
        "pybase64",
        "safetensors",
        "schemathesis",
    ),
    *("prometheus_client", "huggingface_hub", "msgspec", "lm_eval", "openai_harmony", "mistral_common"),
)


class Absent(MagicMock):
    """Anything that is not there: at import it may be called and decorate, in a test it may not be used."""

    def __call__(self, *args, **named):
        if "(call)" in os.environ.get("PYTEST_CURRENT_TEST", ""):
            pytest.skip("needs vLLM's own code")
        if len(args) == 1 and not named and isinstance(args[0], types.FunctionType):
            return args[0]
        return super().__call__(*args, **named)


class AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith("_ARGS"):  # flags of a server
            found = []
        elif name[:1].isupper():  # a class, which may be a base or stand in annotations
            found = type(name, (), {"__init__": lambda own, *args, **named: Absent()()})
        else:
            found = Absent(name=name)
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last one that is asked."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return AbsentModule(spec.name)

    def exec_module(self, module):
        pass


class RemoteOpenAIServer:
    """As vLLM's, but the server is there; flags for it are not heard."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, vllm_serve_args=(), **named):
        self.host, _, self.port = URL.rpartition("://")[2].partition(":")
        self.url_root = URL

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def url_for(self, *parts):
        return "/".join((URL, *parts))

    def get_client(self, **named):
        return openai.OpenAI(**self._client(named))

    def get_async_client(self, **named):
        return openai.AsyncOpenAI(**self._client(named))

    def _client(self, named):
        return {
            "base_url": f"{URL}/v1",
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 120,
        } | named


def send(session, request, _send=requests.Session.send, **options):
    response = _send(session, request, **options)
    heard(response)
    return response


def pytest_collection_modifyitems(config, items):
    asking = [item for item in items if {"server", "client"} & set(item.fixturenames)]
    config.hook.pytest_deselected(items=[item for item in items if item not in asking])
    items[:] = asking


sys.meta_path.append(Finder())
requests.Session.send = send
utils = AbsentModule("tests.utils")
utils.RemoteOpenAIServer = RemoteOpenAIServer
sys.modules["tests.utils"] = utils
