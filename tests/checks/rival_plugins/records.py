"""A pytest plugin: tells what each test met, as a line of JSON in `RIVALS_RESULTS`. Runs beside the tests of
another server, whose own plugin puts what the server refused into `refusals`."""

from __future__ import annotations

import json
import os

import pytest

refusals: list[list[object]] = []
"""Status and words of what was refused since the test began."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if call.when == "setup":
        refusals.clear()
    if call.when == "call" or (report.outcome != "passed" and call.when == "setup"):
        error = None if call.excinfo is None else call.excinfo.value
        status = getattr(error, "status_code", None)
        if status is not None:
            body = getattr(error, "body", None)
            refusals.append([status, body.get("message") if isinstance(body, dict) else None])
        found = {"test": item.nodeid, "outcome": report.outcome, "refusals": list(refusals)}
        found["why"] = "" if error is None else f"{type(error).__name__}: {str(error)[:400]}"
        with open(os.environ["RIVALS_RESULTS"], "a") as file:
            file.write(json.dumps(found) + "\n")


def heard(response) -> None:
    """Notes what a server refused."""
    if response.status_code >= 400:
        try:
            refusals.append([response.status_code, response.json()["error"]["message"]])
        except (ValueError, KeyError, TypeError):
            refusals.append([response.status_code, None])
