"""Chat with a model that is spread over devices (by default four local processes).

Type /help for the commands. Ctrl-C stops the answer, not the chat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from flowspec.cli import resume, statistics
from flowspec.cli.answer import (
    NotRecordedError,
    ask,
    check_recording,
    drafter_lines,
    explain_forecast,
    figures,
    from_head,
    open_llm,
    record,
    record_answer,
)
from flowspec.cli.console import PlainConsole
from flowspec.cli.options import (
    add_decoding_arguments,
    add_model_arguments,
    add_sampling_arguments,
    sampling_params,
)
from flowspec.cli.streaming import show_answer
from flowspec.cli.terminal import TypedInterrupt, note, terminal_size, visible
from flowspec.core.cluster.membership import WAITING
from flowspec.core.protocol.messages import HOP_SECONDS
from flowspec.errors import ClusterError, InputError, PeerError, counted
from flowspec.folders import state_folder
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, TOY_TOLD, ModelFiles
from flowspec.model.text import Messages, Tokenizer, check_chat_template
from flowspec.plan.memory import mib
from flowspec.runtime.answer import Answer
from flowspec.runtime.journal.file import Journal, new_path, newest
from flowspec.runtime.journal.lines import Entry, JournalContent, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions, Session
from flowspec.runtime.watching import Notes, watch_session
from flowspec.watch.state import WatchState

LAST = Path()
"""What `--resume` without a file means."""
PROMPT = "you> "
COMMANDS = {
    "/help": ("", "show this"),
    "/reset": ("", "forget the dialogue and begin again"),
    "/system": ("[TEXT]", "set the system text; without TEXT, remove it"),
    "/stats": ("[all]", "what the last answer came to; all: every figure, and the stages"),
    "/watch": ("", "show a live line of the stages under answers; again: off"),
    "/record": ("FILE", "record the next answer, for the page of flowspec serve"),
    "/save": ("FILE", "write the dialogue to FILE as JSON"),
    "/quit": ("", "leave (Ctrl-D does, too)"),
}
"""What each takes, and does."""
KEYS = {
    "Alt-Enter": "begin another line (or Esc, then Enter); a paste is one prompt",
    "Tab, arrows": "complete a command; recall what was typed (Ctrl-R finds it)",
    "Ctrl-C": "stop the answer, or drop what is typed",
}
HELP = "\n".join(
    f"{key:15} {what}"
    for key, what in [*((f"{name} {takes}", what) for name, (takes, what) in COMMANDS.items()), *KEYS.items()]
)

LEGEND = (
    "a bar for each device, the higher the busier; guesses alive: not checked yet; tokens a step: so many "
    "each result settles, where plain decoding has 1"
)
BARS, DIGITS = "▁▂▃▄▅▆▇█", "0123456789"
STAGES_SHOWN = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system text before the dialogue")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per answer instead of the text"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=Path,
        const=LAST,
        metavar="FILE",
        help=(
            "go on with the last dialogue, or that of a journal, and with the answer in which it was "
            "interrupted"
        ),
    )
    resume.add_good_part(parser)
    parser.add_argument(
        "--no-journal",
        action="store_true",
        help="keep neither the dialogue, for --resume, nor what is typed, for the arrow keys",
    )
    add_model_arguments(parser)
    add_decoding_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(model=None)  # a journal names its own


def run(args: argparse.Namespace) -> int:
    journal = ChatJournal(setting=partial(resume.setting_of, args), is_kept=not args.no_journal)
    with typed_lines(args) as read, contextlib.closing(journal), contextlib.ExitStack() as stack:
        resume.check_good_part(args)
        content = None if args.resume is None else take_up(args, journal)
        last = None if content is None else content.last
        params = sampling_params(args)
        arithmetic = "" if content is None else content.setting.arithmetic
        notes = Notes(show_note)

        def check(files: ModelFiles) -> None:
            check_chat_template(files)
            if content is not None:
                resume.check_model(files, content.setting)

        def connect() -> LLM:
            """The cluster as the flags say; what was open is closed, and its arithmetic kept."""
            nonlocal arithmetic
            stack.close()
            recovery_options = RecoveryOptions(on_note=notes, arithmetic=arithmetic)
            llm = stack.enter_context(open_llm(args, recovery_options, check))
            arithmetic = llm.session.head.arithmetic
            return llm

        llm = connect()
        # a template that is none is refused here, not after a question
        llm.encode([{"role": "user", "content": "?"}])
        assert llm.tokenizer is not None
        chat = Chat(
            read=read,
            connect=connect,
            llm=llm,
            tokenizer=llm.tokenizer,
            settings=llm.question_of((), params) if last is None else replace(last.question, answered=()),
            console=PlainConsole(highlight=False, stderr=args.json),
            system=(args.system or "") if last is None else last.system,
            is_json=args.json,
            request=llm.session.head.new_request(),
            journal=journal,
            notes=notes,
            messages=[] if content is None else content.messages(),
        )
        if not args.json:
            chat.greet()
        if last is not None and not last.end:
            chat.attempt(partial(chat.go_on, last))
        chat.loop()
        return 1 if chat.has_failed else 0


def show_note(text: str) -> None:
    """What happens to the devices, in a line, and how not to wait for them, which has no limit here."""
    note(f"({text}; Ctrl-C gives the answer up)" if WAITING in text else f"({text})")


def take_up(args: argparse.Namespace, journal: ChatJournal) -> JournalContent:
    """The journal that `--resume` means; the flags follow it from now on."""
    if args.no_journal:
        raise InputError("--resume goes on in its journal; leave out --no-journal")
    resume.refuse_fixed(args)
    content = journal.take_up(None if args.resume == LAST else args.resume, good_part=args.good_part)
    if content.damage:
        note(f"({content.damage}; the dialogue goes on from before it)")
    resume.follow_setting(args, content.setting)
    if told := resume.place_told(args, content.setting):
        note(f"({told})")
    return content


@contextlib.contextmanager
def typed_lines(args: argparse.Namespace) -> Iterator[Callable[[], str]]:
    """Gives what reads a line: edited where a person sits at a terminal, else as it comes."""
    if args.json or not sys.stdin.isatty() or not sys.stdout.isatty():
        yield partial(plain_line, PROMPT if sys.stdin.isatty() and not args.json else "")
        return
    from flowspec.cli.line_editor import line_editor  # only here: it takes a while to import

    history = None if args.no_journal else state_folder() / "history"
    takes = {name: each for name, (each, _) in COMMANDS.items()}
    with line_editor(PROMPT, takes, history) as read:
        yield read


def plain_line(prompt: str) -> str:
    """A line as it comes; nothing is drawn for it but the prompt."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # behind ^C
        raise TypedInterrupt from None


@dataclass(slots=True)
class ChatJournal:
    """Keeps the dialogue; a file is made with its first question. Where none can be, that is told once, and
    the chat goes on."""

    setting: Callable[[Session], Setting]
    """What a new one begins with."""
    is_kept: bool = True
    journal: Journal | None = None

    def take_up(self, path: Path | None, *, good_part: bool) -> JournalContent:
        """Opens an earlier dialogue, the last one if none is named, to go on with it. Raises `InputError`."""
        place = path or newest(resume.journal_folder())
        self.journal, content = Journal.open(place, show_note, good_part=good_part)
        return content

    def ask(self, session: Session, question: Question, *, user: str, system: str) -> None:
        """A question is about to be asked."""
        if self.journal is None and self.is_kept:
            self.journal = self._begin(session)
        if self.journal is not None:
            self.journal.ask(Entry(question=question, user=user, system=system))

    def end(self, answer: Answer) -> None:
        if self.journal is not None:
            self.journal.end(answer.finish_reason, answer.text)

    def close(self) -> None:
        """The dialogue is over; another question begins another one."""
        if self.journal is not None:
            self.journal.close()
        self.journal = None

    def _begin(self, session: Session) -> Journal | None:
        try:
            path = new_path(resume.journal_folder())
            return Journal.start(path, self.setting(session), show_note)
        except (OSError, InputError) as error:
            self.is_kept = False
            note(f"(the dialogue is not kept: {error})")
            return None


@dataclass(slots=True)
class Chat:
    """A dialogue at the terminal. `messages` is what the model sees; the head reuses what it shares with the
    last turn.

    Every question is asked as the `settings` say. When the cluster is lost the dialogue stays, and the next
    question connects again.
    """

    read: Callable[[], str]
    """A line that is typed; raises `EOFError` after the last one, and `TypedInterrupt`."""
    connect: Callable[[], LLM]
    llm: LLM | None
    tokenizer: Tokenizer
    settings: Question
    console: PlainConsole
    system: str
    is_json: bool
    request: int
    journal: ChatJournal
    notes: Notes
    messages: Messages = field(default_factory=list)
    last: Answer | None = None
    has_failed: bool = False
    """Whether a question could not be answered that nobody typed, who would have seen it."""
    is_watching: bool = False
    record_to: Path | None = None
    forecasts_explained: set[str] = field(default_factory=set)
    """For which reasons it was told that the forecast was wrong."""

    def greet(self) -> None:
        assert self.llm is not None
        session = self.llm.session
        plan = session.head.plan
        self.console.print(
            f"[bold]{escape(Path(plan.model).name)}[/] in {plan.dtype}, {plan.layer_count} layers on "
            f"{counted(len(plan.stages), 'stage')}:"
        )
        if plan.model == BUNDLED:
            self.console.message(f"({TOY_TOLD})")
        for stage in session.stages_report():
            first, end = stage["layers"]
            self.console.print(
                f"  {escape(stage['name'])}  layers {first} to {end - 1}, {mib(stage['weight_bytes'])} of "
                f"weights{from_head(stage)}, pid {stage['pid']}"
            )
        if session.chosen is not None:
            for line in session.chosen.lines(session.head.plan.stages):
                self.console.print(line, markup=False)
        self.console.print(f"method {session.decoding.method}, drafter {escape(session.drafter)}")
        for line in drafter_lines(session):
            self.console.print(f"  {line}", markup=False)
        sampling = self.settings.sampling
        drawn = f"seed {sampling.seed}" if sampling.temperature > 0 else "always the likeliest token"
        self.console.print(f"temperature {sampling.temperature:g}, {drawn}")
        if self.messages:
            count = counted(len(self.messages) // 2, "answer")
            self.console.print(f"(the dialogue goes on after {count}; /reset begins a new one)")
        self.console.print("Type /help for the commands, /quit to leave.\n")

    def loop(self) -> None:
        while True:
            try:
                line = self.read().strip()
                if line.startswith("/"):
                    if not self.command(line):
                        return
                elif line:
                    self.attempt(partial(self.answer, line))
            except EOFError:
                if sys.stdin.isatty() and not self.is_json:
                    self.console.print()
                return
            except TypedInterrupt:
                if len(self.messages) % 2:
                    self.messages.pop()  # it has no answer
                self.console.print("(/quit or Ctrl-D leaves)")

    def attempt(self, answer: Callable[[], None]) -> None:
        """Has a question answered; one that cannot be is told, and is no part of the dialogue."""
        before = len(self.messages)
        try:
            answer()
        except InputError as error:
            self.has_failed = self.has_failed or not sys.stdin.isatty()
            del self.messages[before:]
            self.console.message(str(error), "red")
        except (ClusterError, PeerError) as error:
            if not sys.stdin.isatty():
                raise
            self.llm = None
            del self.messages[before:]
            self.console.message(str(error), "red")
            self.console.message("(the dialogue is kept: ask again to connect again, or /save FILE)\n")

    def command(self, line: str) -> bool:
        """Runs a slash command; False ends the chat."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name in COMMANDS:
            getattr(self, f"do_{name[1:]}")(rest.strip())
        else:
            self.console.print(f"[red]no command {escape(name)}; /help lists them[/]")
        return True

    def do_help(self, text: str) -> None:
        self.console.print(HELP, markup=False)

    def do_reset(self, text: str) -> None:
        self.messages.clear()
        self.last = None
        self.journal.close()
        if self.llm is not None:
            head = self.llm.session.head
            head.forget(self.request)
            self.request = head.new_request()
        self.console.print("(a new dialogue)")

    def do_system(self, text: str) -> None:
        self.system = text
        self.console.print("(system text set)" if text else "(system text removed)")

    def do_save(self, text: str) -> None:
        if not text:
            self.console.print("[red]expected a file: /save dialogue.json[/]")
            return
        content = {"system": self.system, "messages": self.messages}
        try:
            Path(text).expanduser().write_text(
                json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8"
            )
        except (OSError, ValueError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or error
            self.console.message(f"expected a file that can be written, got {text} ({why})", "red")
            return
        self.console.message(f"(saved {counted(len(self.messages), 'message')} to {text})")

    def do_watch(self, text: str) -> None:
        if self.is_json or not self.console.is_terminal:
            self.console.print("(/watch draws in a terminal, which this output is not; nothing is shown)")
            return
        if text not in ("", "on", "off"):
            self.console.message(f"expected /watch, /watch on or /watch off, got {text:.40}", "red")
            return
        self.is_watching = text == "on" if text else not self.is_watching
        state = f"on; {LEGEND}" if self.is_watching else "off"
        self.console.message(f"(a live line under answers: {state})")

    def do_record(self, text: str) -> None:
        """The next answer is recorded."""
        if not text:
            self.console.print("[red]expected a file: /record answer.json[/]")
            return
        try:
            check_recording(path := Path(text).expanduser())
        except (InputError, RuntimeError) as error:
            self.console.message(str(error), "red")
            return
        self.record_to = path
        self.console.message(f"(the next answer is recorded in {text})")

    def answer(self, line: str) -> None:
        if self.llm is not None and (failure := self.llm.session.head.failure) is not None:
            note(f"({failure}; connecting again)")
            self.llm = None
        if self.llm is None:
            self.llm = self.connect()
            self.request = self.llm.session.head.new_request()
        self.messages.append({"role": "user", "content": line})
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = replace(self.settings, prompt=self.tokenizer.encode_chat([*system, *self.messages]))
        self.journal.ask(self.llm.session, question, user=line, system=self.system)
        self.follow(self.llm, question)

    def go_on(self, entry: Entry) -> None:
        """Goes on with an answer in which an earlier chat was interrupted."""
        assert self.llm is not None
        if not self.is_json:
            self.console.print(f"{PROMPT}{entry.user}", markup=False)
        self.messages.append({"role": "user", "content": entry.user})
        self.follow(self.llm, entry.question)

    def follow(self, llm: LLM, question: Question) -> None:
        """Shows an answer up to its end."""
        if (head := llm.session.head).is_waiting:
            lost = " or ".join(head.lost)
            note(
                "(this waits for a device to come back, as long as it takes; start the daemon of "
                f"{lost} again; Ctrl-C gives the answer up)"
            )
        path, self.record_to = self.record_to, None
        try:
            with record_answer(llm.session, self.tokenizer, path, self.notes):
                with self.shown(llm.session) as piece:
                    answer, _ = ask(llm, question, self.request, piece, keep=self.journal.journal)
                self.journal.end(answer)
        except NotRecordedError as error:
            self.console.message(str(error), "red")
        self.last = answer
        self.messages.append({"role": "assistant", "content": answer.text})
        if self.is_json:
            print(json.dumps(record(llm, question, answer)), flush=True)
            return
        self.console.print(f"[dim]{figures(answer, llm.session)}[/]\n")
        told = explain_forecast(llm.session, answer)
        if told is not None and not told.kinds <= self.forecasts_explained:
            self.forecasts_explained |= told.kinds
            why = told.text or "the forecast does not hold here; why is not known"
            self.console.print(f"({why})\n", markup=False)

    @contextlib.contextmanager
    def shown(self, session: Session) -> Iterator[Callable[[str], None]]:
        """Gives what shows a piece of an answer, over a live line if one is wanted; when it has ended, the
        cursor is below it."""
        if self.is_json:
            yield lambda text: None
            return
        live = None
        with contextlib.ExitStack() as stack:
            if self.is_watching:
                watch = stack.enter_context(contextlib.closing(watch_session(session, self.tokenizer.decode)))
                watch.join(reads=False)
                levels = BARS if self.console.encoding.lower().startswith("utf") else DIGITS

                def live() -> str:
                    return live_line(watch.present, levels)[: terminal_size().columns - 1]

            yield stack.enter_context(show_answer(live))

    def do_stats(self, text: str) -> None:
        if text not in ("", "all"):
            self.console.message(f"expected /stats or /stats all, got {text:.40}", "red")
            return
        answer = self.last
        if answer is not None:
            self.console.message(statistics.sentence(answer))
        if not text:
            has = "Nothing was answered yet" if answer is None else statistics.prompt_sentence(answer)
            self.console.message(f"{has}; /stats all tells more.")
            return
        if answer is None:
            self.console.message("Nothing was answered yet; these are the stages.")
        else:
            prompt = counted(answer.prompt_tokens, "token")
            self.console.print(f"prompt     {prompt}, {answer.reused_tokens} known before")
            self.console.message(f"answer     {figures(answer, self.llm.session if self.llm else None)}")
            self.console.message(f"arithmetic {answer.arithmetic}")
            drafters = self.llm.session.drafters if self.llm else ()
            for line in statistics.lines(answer.statistics, drafters):
                self.console.print(line, markup=False)
        if self.llm is None:
            self.console.print("(no cluster: it was lost)")
            return
        table = Table("stage", "layers", "weights", "memory", *HOP_SECONDS.values(), box=None)
        session = self.llm.session
        hops = list(session.head.hops)
        for index, stage in enumerate(session.stages_report()):
            own = [segment[index] for segment in hops if index < len(segment)]
            mean = [
                f"{1000 * sum(getattr(hop, name) for hop in own) / len(own):.2f} ms" if own else "-"
                for name in HOP_SECONDS
            ]
            first, end = stage["layers"]
            table.add_row(
                escape(stage["name"]),
                f"{first}-{end - 1}",
                mib(stage["weight_bytes"]),
                mib(stage["memory_bytes"]),
                *mean,
            )
        self.console.print(table)
        self.console.message(
            f"memory: of the whole process; means over {len(hops)} segments (passes of tokens through "
            "all stages); waiting: behind other segments; own work: FlowSpec's, without computing",
            "dim",
        )
        if (known := statistics.expertise_table(session, self.tokenizer)) is not None:
            self.console.print(known)


def live_line(present: WatchState | None, levels: str) -> str:
    """How busy each stage is, and how an answer goes, in a line; `LEGEND` explains it."""
    if present is None:
        return ""
    if present.failed is not None:
        why = " ".join(visible(present.failed["text"]).split())
        return f"(it failed: {why}; nothing is answered any more)"
    if present.lost is not None:
        return "(the pipeline was lost; another is being formed)"
    now = present.figures or {"busy": [0.0] * len(present.stages), "tokens_per_s": 0.0, "S": 0.0}
    busy = "".join(
        levels[min(len(levels) - 1, int(share * len(levels)))] for share in now["busy"][:STAGES_SHOWN]
    )
    return (
        f"busy {busy}  {now['tokens_per_s']:.1f} tokens/s  {counted(present.living, 'guess', 'es')} alive  "
        f"{now['S']:.1f} tokens a step"
    )
