"""What stands between llama.cpp's tests of its server and the one that is there: `start` finds it, and paths
that llama.cpp has with and without `/v1` get it."""

from __future__ import annotations

import os
import sys
import types

import requests
from records import heard

sys.modules.setdefault("wget", types.ModuleType("wget"))
import utils  # noqa: E402 - the suite's, which wants wget

URL, MODEL = os.environ["RIVALS_URL"], os.environ["RIVALS_MODEL"]
HOST, _, PORT = URL.removesuffix("/v1").rpartition("://")[2].partition(":")
SHORT = ("/chat/completions", "/completions", "/models", "/embeddings", "/responses")


def send(session, request, _send=requests.Session.send, **options):
    for path in SHORT:
        if request.path_url == path:
            request.url = URL + path
    response = _send(session, request, **options)
    heard(response)
    return response


def start(server, timeout_seconds=None):
    server.server_host, server.server_port, server.model_alias = HOST, int(PORT), MODEL


requests.Session.send = send
utils.ServerProcess.start = start
utils.ServerProcess.stop = lambda server: None
