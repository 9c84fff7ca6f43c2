"""What is said of an answer: its figures in a line, as JSON, and as statistics for a terminal 80 columns wide
in the terms of docs/methods.md; what each drafter was worth, and why a forecast was wrong."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from flowspec.cli.terminal import visible
from flowspec.core.cluster.slowing import why_slow
from flowspec.core.head.hop_sums import DEAD, reported
from flowspec.core.protocol.messages import HOP_ROWS, HOP_SECONDS
from flowspec.errors import counted
from flowspec.llm import LLM
from flowspec.model.text import Tokenizer
from flowspec.plan.memory import mib
from flowspec.rounding import rounded
from flowspec.runtime.answer import Answer
from flowspec.runtime.device.links import machine_of
from flowspec.runtime.forecast_check import Measured, causes, is_wrong
from flowspec.runtime.question import Question
from flowspec.runtime.session import Session
from flowspec.validation import as_dict

WIDTH = 79
STATISTICS = """\
segments   {segments} after the prompt, of which {committing_segments} gave tokens; window {window:.1f}
tokens     {tokens_per_commit:.2f} at a time (S), {acceptance_length:.2f} per segment; \
{share_in_flight:.0%} were in flight (rho)
nodes      {nodes_drafted} drafted, {nodes_sent} sent, {dropped_alive} given up alive
rows       {ran}; {rows_dropped} dropped dead: {dead}
stages     busy {busy}
drafter    {draft_passes} passes, {draft_rows} rows, {draft_s:.2f} s; calibration error \
{calibration_error:.3f}
seconds    first token {prefill_s:.2f}, the rest {decode_s:.2f}; all stages: {spent}; \
links {link_s:.2f}, head {head_s:.2f}
"""
LOST = (
    "lost       devices {times}: {recovery_detect_s:.2f} s of silence, {recovery_load_s:.2f} loading, "
    "{recovery_prefill_s:.2f} prefill"
)
CHAINS_SHOWN = 4
EXAMPLE_CHARS = 32
"""Of a prompt of the domain: its end."""
WAIT_TOLD_S = 1.0
"""That an answer had waited for a token when it was stopped."""
WAITED_SHOWN_S = 0.01
"""A wait for room that is told."""


def held(each: dict[str, Any]) -> str:
    """Layers and weights of a stage or drafter, what of them the head had to send, and its process."""
    first, end = each.get("layers", (0, 0))
    layers = f"layers {first} to {end - 1}, " if end else ""
    sent = f" ({mib(each['received_bytes'])} of them just sent)" if each["received_bytes"] else ""
    return f"{layers}{mib(each['weight_bytes'])} of weights{sent}, pid {each['pid']}"


def drafter_lines(session: Session) -> list[str]:
    """A line for each drafter that runs on a device of its own."""
    return [
        f"{each['device']}: drafter {each['name']}, {held(each)} at {each['address']}"
        + ("" if each["is_there"] else " (lost)")
        for each in session.drafters_report()
        if each["address"]
    ]


def figures(answer: Answer, session: Session | None) -> str:
    """Speed, where it can be told, and how an answer ended where that is not of itself, in one line."""
    count, timing = counted(answer.new_tokens, "token"), answer.timing
    if answer.resumed_tokens:
        count += f" ({answer.resumed_tokens} taken over)"
    at_once = "" if answer.new_tokens else ": the model ended the answer at once"
    endings = {"stop": at_once, "length": ", stopped at the token limit", "cancelled": ", stopped"}
    ending = endings.get(answer.finish_reason, "")
    if session is not None and answer.finish_reason == "length":
        context, most = session.head.plan.context, session.spec.context_max
        if answer.prompt_tokens + answer.new_tokens >= context:
            more = f"; --context takes up to {most}" if most > context else ""
            ending = f", stopped: the context of {context} tokens is full{more}"
    if answer.finish_reason == "cancelled" and timing.ended_s - timing.last_s >= WAIT_TOLD_S:
        ending += f" after {rounded(timing.ended_s - timing.last_s)} s without a token"  # no rate knows of it
    if answer.new_tokens == answer.resumed_tokens:
        return f"{count}{ending}"
    rate = f"{timing.tokens_per_s:.1f} tokens/s, " if timing.tokens_per_s else ""
    return f"{count}, {rate}first after {timing.first_s:.2f} s{ending}"


def record(llm: LLM, question: Question, answer: Answer) -> dict[str, Any]:
    """An answer as `--json` prints it."""
    session, timing, plan = llm.session, answer.timing, llm.session.head.plan
    return {
        "token_ids": list(answer.token_ids),
        "text": None if llm.tokenizer is None else answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "reused_tokens": answer.reused_tokens,
        "new_tokens": answer.new_tokens,
        "resumed": answer.resumed_tokens,
        "time_to_first_token_s": round(timing.first_s, 6),
        "decode_s": round(timing.decode_s, 6),
        "tokens_per_s": round(timing.tokens_per_s, 3),
        "method": session.decoding.method,
        "drafter": session.drafter,
        "world": "cluster",
        "model": plan.model,
        "dtype": plan.dtype,
        "cache": plan.cache,
        "arithmetic": answer.arithmetic,
        "context": plan.context,
        **as_dict(question.sampling),
        "statistics": answer.statistics,
        "stages": session.stages_report(),
        "drafters": session.drafters_report(),
        "expertise": session.expertise_report(),
        "plan": None if session.chosen is None else session.chosen.report(),
    }


# ------------------------------------------------------------------------------------------------- statistics


def summary(answer: Answer) -> str:
    """What an answer's statistics come to."""
    guessed, rate = answer.statistics["share_in_flight"], answer.timing.tokens_per_s
    count = counted(answer.new_tokens, "token")
    if not rate:
        return f"The last answer had {count}, too few for a rate."
    share = f"{100 * guessed:.0f}%" if guessed else "none"
    return f"The last answer came at {rate:.1f} tokens/s; {share} of its {count} were guessed."


def prompt_summary(answer: Answer) -> str:
    """Of its prompt, how much was computed already; without a full stop."""
    known = f"{answer.reused_tokens} of them were" if answer.reused_tokens else "none was"
    return f"Its prompt had {counted(answer.prompt_tokens, 'token')}, {known} known before"


def statistics_lines(found: dict[str, Any], models: Sequence[str] = ()) -> list[str]:
    """`core.head.statistics.Statistics.report()` as a few lines of text; `models` are the names of those
    beside the target."""
    if not found["segments"]:
        return ["no segments were sent after the prompt"]
    rows = {name: f"{found[reported(name)]} {told}" for name, told in HOP_ROWS.items()}
    text = STATISTICS.format(
        **found,
        ran=", ".join(text for name, text in rows.items() if not name.startswith(DEAD)),
        dead=", ".join(text for name, text in rows.items() if name.startswith(DEAD)),
        busy=" ".join(f"{share:.0%}" for share in found["stage_busy"]),
        spent=", ".join(f"{told} {found[reported(name)]:.2f}" for name, told in HOP_SECONDS.items()),
    )
    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (16 if line.startswith("stages") else 11)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent)
    for place, (token, _, chain, reason) in enumerate(found["chains"][-CHAINS_SHOWN:]):
        names = " > ".join([*(models[model] for model in chain), "target"])
        lines.append(f"{'' if place else 'chain':10} from token {token}: {names} ({reason})")
    if found["waited_s"] >= WAITED_SHOWN_S:
        lines.append(f"waited     {found['waited_s']:.2f} s until the devices had memory for it")
    if found["recoveries"]:
        lines.append(LOST.format(**found, times=counted(found["recoveries"], "time")))
    return lines


def stages_table(session: Session) -> Table:
    """What each stage has, and what a segment took there on average."""
    table = Table("stage", "layers", "weights", "memory", *HOP_SECONDS.values(), box=None)
    for index, stage in enumerate(session.stages_report()):
        hops = [segment[index] for segment in session.head.hops if index < len(segment)]
        first, end = stage["layers"]
        table.add_row(
            *(escape(stage["name"]), f"{first}-{end - 1}"),
            *(mib(stage[name]) for name in ("weight_bytes", "memory_bytes")),
            *(
                f"{1000 * sum(getattr(hop, name) for hop in hops) / len(hops):.2f} ms" if hops else "-"
                for name in HOP_SECONDS
            ),
        )
    return table


def expertise_table(session: Session, tokenizer: Tokenizer | None) -> Table | None:
    """What each drafter was worth by what prompts are about, the best in bold; None while nothing is
    known."""
    found = [domain for domain in session.expertise_report() if domain["answers"]]
    if not found:
        return None
    table = Table("prompts like", "answers", *session.drafters, box=None)
    for domain in found:
        if not domain["example"]:
            text = "(in earlier runs)"  # of their prompts no text is kept
        elif tokenizer is None:
            text = " ".join(map(str, domain["example"]))
        else:
            text = " ".join(tokenizer.decode(domain["example"]).split())
        worth = [
            f"[bold]{value:.2f}[/]" if name == domain["best"] else f"{value:.2f}"
            for name, value in domain["worth"].items()
        ]
        table.add_row(escape(visible(text[-EXAMPLE_CHARS:])), str(domain["answers"]), *worth)
    return table


# ------------------------------------------------------------------------------------------------- forecasts


def explain_forecast(session: Session, answer: Answer) -> tuple[str, frozenset[str]]:
    """Why the forecast was wrong by more than a factor of two, and the kinds of these reasons, whatever the
    figures: both are empty where it was right or nothing was forecast, and the text where that is not
    known."""
    if session.chosen is None:
        return "", frozenset()
    plan, found, stages = session.chosen.plan, answer.statistics, session.head.stages
    measured = Measured(
        tokens_per_s=answer.timing.tokens_per_s,
        new_tokens=answer.new_tokens - answer.resumed_tokens,
        hops=list(session.head.hops)[-max(1, found["segments"]) :],
        links_s=found["link_s"] / max(1, found["segments"]),
        missed=1 - found["share_in_flight"],
        why_slow={
            stage.plan.name: why_slow(stage.pong)
            for stage in stages
            if stage.pong is not None and stage.pong.is_throttled
        },
        hosts={stage.plan.name: machine_of(stage.plan.address) for stage in stages},
        in_use=session.chosen.survey.in_use,
        returning=session.head.returning,
        runs={each.name: each.end - each.first for each in session.head.plan.stages},
        recoveries=found["recoveries"],
        recovery_s=sum(found[f"recovery_{part}_s"] for part in ("detect", "load", "prefill")),
    )
    if not is_wrong(plan, measured):
        return "", frozenset()
    reasons = causes(session.chosen.request, plan, measured)
    why = "; ".join(cause.text for cause in reasons)
    forecast, was = rounded(plan.forecast.tokens_per_s), rounded(measured.tokens_per_s)
    text = f"forecast {forecast} tokens/s, measured {was}: {why}" if why else ""
    return text, frozenset(cause.kind for cause in reasons) or frozenset(("unknown",))
