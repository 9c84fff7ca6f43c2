"""Chat with a model that is spread over devices (by default four local processes).

Type /help for the commands. Ctrl-C stops the answer, not the chat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from flowspec.cli import answer_report as report
from flowspec.cli.answer import (
    LAST,
    add_answer_arguments,
    add_good_part,
    ask,
    check_model,
    check_recording,
    journal_folder,
    open_journal,
    open_llm,
    record_answer,
    setting_of,
)
from flowspec.cli.console import PlainConsole, note_child_lines, show_answer
from flowspec.cli.options import sampling_params
from flowspec.cli.terminal import TypedInterrupt, note, visible
from flowspec.core.cluster.membership import WAITING
from flowspec.errors import ClusterError, InputError, PeerError, counted
from flowspec.folders import state_folder
from flowspec.llm import LLM
from flowspec.model.files import BUNDLED, TOY_TOLD, ModelFiles
from flowspec.model.text import Messages, Tokenizer, check_chat_template
from flowspec.runtime.answer import Answer
from flowspec.runtime.journal.file import Journal, new_path
from flowspec.runtime.journal.lines import Entry, Setting
from flowspec.runtime.question import Question
from flowspec.runtime.session import RecoveryOptions
from flowspec.runtime.watching import Notes, watch_session
from flowspec.watch.state import WatchState

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
LEGEND = (
    "a bar for each device, the higher the busier; guesses alive: not checked yet; tokens a step: so many "
    "each result settles, where plain decoding has 1"
)
BARS, DIGITS = "▁▂▃▄▅▆▇█", "0123456789"
STAGES_SHOWN = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--system", metavar="TEXT", help="a system text before the dialogue")
    add("--json", action="store_true", help="print one JSON object per answer instead of the text")
    text = (
        "go on with the last dialogue, or that of a journal, and with the answer in which it was interrupted"
    )
    add("--resume", nargs="?", type=Path, const=LAST, metavar="FILE", help=text)
    add_good_part(parser)
    text = "keep neither the dialogue, for --resume, nor what is typed, for the arrow keys"
    add("--no-journal", action="store_true", help=text)
    add_answer_arguments(parser)


def run(args: argparse.Namespace) -> int:
    with note_child_lines(), typed_lines(args) as read, contextlib.closing(Chat(args, read)) as chat:
        chat.begin()
        chat.loop()
        return 1 if chat.has_failed else 0


def show_note(text: str) -> None:
    """What happens to the devices, in a line, and how not to wait for them, which has no limit here."""
    note(f"({text}; Ctrl-C gives the answer up)" if WAITING in text else f"({text})")


@contextlib.contextmanager
def typed_lines(args: argparse.Namespace) -> Iterator[Callable[[], str]]:
    """Gives what reads a line: edited where a person sits at a terminal, else as it comes. It raises
    `EOFError` after the last one, and `TypedInterrupt`."""
    if args.json or not sys.stdin.isatty() or not sys.stdout.isatty():
        yield partial(plain_line, PROMPT if sys.stdin.isatty() and not args.json else "")
        return
    from flowspec.cli.line_editor import line_editor  # only here: it takes a while to import

    history = None if args.no_journal else state_folder() / "history"
    with line_editor(PROMPT, {name: takes for name, (takes, _) in COMMANDS.items()}, history) as read:
        yield read


def plain_line(prompt: str) -> str:
    """A line as it comes; nothing is drawn for it but the prompt."""
    try:
        return input(prompt)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # behind ^C
        raise TypedInterrupt from None


def path_of(text: str, example: str) -> Path:
    """The file that a command is given; raises `InputError`."""
    if not text:
        raise InputError(f"expected a file: {example}")
    return Path(os.path.expanduser(text))


class Chat:
    """A dialogue at the terminal. `messages` is what the model sees; the head reuses what it shares with the
    last turn.

    Every question is asked as the `settings` say. When the cluster is lost the dialogue stays, and the next
    question connects again.
    """

    llm: LLM | None = None
    tokenizer: Tokenizer
    settings: Question
    drafters: Sequence[str]
    request: int
    journal: Journal | None = None
    """Of this dialogue; a new one begins with its first question."""
    setting: Setting | None = None
    """What all answers share: as the resumed journal says, then as the model was opened."""
    last: Answer | None = None
    has_failed = False
    """Whether a question could not be answered that nobody typed, who would have seen it."""
    is_watching = False
    record_to: Path | None = None

    def __init__(self, args: argparse.Namespace, read: Callable[[], str]) -> None:
        self.args = args
        self.read = read
        self.is_kept = not args.no_journal
        self.system = args.system or ""
        self.messages: Messages = []
        self.explained: set[str] = set()
        """For which reasons it was told that the forecast was wrong."""
        self.console = PlainConsole(highlight=False, stderr=args.json)
        self.say = self.console.message
        self.notes = Notes(show_note)
        self.opened = contextlib.ExitStack()

    def close(self) -> None:
        self.opened.close()
        self.close_journal()

    # ------------------------------------------------------------------------------------- the beginning

    def begin(self) -> None:
        """Opens the model, greets, and goes on with what a journal has."""
        last = self.take_up()
        params = sampling_params(self.args)
        llm = self.connect()
        llm.encode([{"role": "user", "content": "?"}])  # refuses a template that is none before a question
        self.settings = llm.question_of((), params) if last is None else replace(last.question, answered=())
        if not self.args.json:
            self.greet(llm)
        if last is not None and not last.end:
            if not self.args.json:
                self.say(f"{PROMPT}{last.user}")
            self.attempt(partial(self.follow, llm, last))

    def take_up(self) -> Entry | None:
        """Opens the journal that `--resume` means, if there is one, to go on in it; its last question."""
        if self.args.no_journal and self.args.resume is not None:
            raise InputError("--resume goes on in its journal; leave out --no-journal")
        if (opened := open_journal(self.args, show_note)) is None:
            return None
        self.journal, content = opened
        self.setting, self.messages = content.setting, content.messages()
        self.system = "" if content.last is None else content.last.system
        return content.last

    def connect(self) -> LLM:
        """The cluster as the flags say; what was open is closed, and its arithmetic kept."""
        self.opened.close()
        arithmetic = "" if self.setting is None else self.setting.arithmetic
        recovery_options = RecoveryOptions(on_note=self.notes, arithmetic=arithmetic)
        llm = self.opened.enter_context(open_llm(self.args, recovery_options, self.check))
        assert llm.tokenizer is not None
        self.llm, self.tokenizer, self.request = llm, llm.tokenizer, llm.session.head.new_request()
        self.setting, self.drafters = setting_of(self.args, llm.session), llm.session.drafters
        return llm

    def check(self, files: ModelFiles) -> None:
        check_chat_template(files)
        check_model(self.setting, files)

    def greet(self, llm: LLM) -> None:
        session, sampling = llm.session, self.settings.sampling
        plan = session.head.plan
        stages = counted(len(plan.stages), "stage")
        self.say(f"{Path(plan.model).name} in {plan.dtype}, {plan.layer_count} layers on {stages}:", "bold")
        if plan.model == BUNDLED:
            self.say(f"({TOY_TOLD})")
        for stage in session.stages_report():
            self.say(f"  {stage['name']}  {report.held(stage)}")
        for line in () if session.chosen is None else session.chosen.lines(plan.stages):
            self.say(line)
        self.say(f"method {session.decoding.method}, drafter {session.drafter}")
        for line in report.drafter_lines(session):
            self.say(f"  {line}")
        drawn = f"seed {sampling.seed}" if sampling.temperature > 0 else "always the likeliest token"
        self.say(f"temperature {sampling.temperature:g}, {drawn}")
        if self.messages:
            count = counted(len(self.messages) // 2, "answer")
            self.say(f"(the dialogue goes on after {count}; /reset begins a new one)")
        self.say("Type /help for the commands, /quit to leave.\n")

    # ------------------------------------------------------------------------------------- lines

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
                if sys.stdin.isatty() and not self.args.json:
                    self.say()
                return
            except TypedInterrupt:
                self.say("(/quit or Ctrl-D leaves)")

    def attempt(self, answer: Callable[[], None]) -> None:
        """Has a question answered; one that cannot be is told, and is no part of the dialogue."""
        try:
            answer()
        except (InputError, ClusterError, PeerError) as error:
            is_lost, is_typed = not isinstance(error, InputError), sys.stdin.isatty()
            if is_lost and not is_typed:
                raise
            self.say(str(error), "red")
            if is_lost:
                self.llm = None
                self.say("(the dialogue is kept: ask again to connect again, or /save FILE)\n")
            elif not is_typed:
                self.has_failed = True

    def command(self, line: str) -> bool:
        """Runs a slash command; False ends the chat."""
        name, _, rest = line.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        try:
            if name not in COMMANDS:
                raise InputError(f"no command {name}; /help lists them")
            getattr(self, f"do_{name[1:]}")(rest.strip())
        except InputError as error:
            self.say(str(error), "red")
        return True

    def do_help(self, text: str) -> None:
        commands = {f"{name} {takes}": what for name, (takes, what) in COMMANDS.items()}
        for key, what in {**commands, **KEYS}.items():
            self.say(f"{key:15} {what}")

    def do_reset(self, text: str) -> None:
        self.messages.clear()
        self.last = None
        self.close_journal()
        if self.llm is not None:
            head = self.llm.session.head
            head.forget(self.request)
            self.request = head.new_request()
        self.say("(a new dialogue)")

    def do_system(self, text: str) -> None:
        self.system = text
        self.say("(system text set)" if text else "(system text removed)")

    def do_save(self, text: str) -> None:
        content = {"system": self.system, "messages": self.messages}
        document = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        try:
            path_of(text, "/save dialogue.json").write_text(document, "utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(f"expected a file that can be written, got {text} ({why})") from None
        self.say(f"(saved {counted(len(self.messages), 'message')} to {text})")

    def do_record(self, text: str) -> None:
        """The next answer is recorded."""
        check_recording(path := path_of(text, "/record answer.json"))
        self.record_to = path
        self.say(f"(the next answer is recorded in {text})")

    def do_watch(self, text: str) -> None:
        if self.args.json or not self.console.is_terminal:
            self.say("(/watch draws in a terminal, which this output is not; nothing is shown)")
            return
        if text not in ("", "on", "off"):
            raise InputError(f"expected /watch, /watch on or /watch off, got {text:.40}")
        self.is_watching = text == "on" if text else not self.is_watching
        self.say(f"(a live line under answers: {f'on; {LEGEND}' if self.is_watching else 'off'})")

    def do_stats(self, text: str) -> None:
        if text not in ("", "all"):
            raise InputError(f"expected /stats or /stats all, got {text:.40}")
        answer, session = self.last, None if self.llm is None else self.llm.session
        if answer is not None:
            self.say(report.summary(answer))
        if not text:
            has = "Nothing was answered yet" if answer is None else report.prompt_summary(answer)
            self.say(f"{has}; /stats all tells more.")
            return
        if answer is None:
            self.say("Nothing was answered yet; these are the stages.")
        else:
            prompt = counted(answer.prompt_tokens, "token")
            self.say(f"prompt     {prompt}, {answer.reused_tokens} known before")
            self.say(f"answer     {report.figures(answer, session)}")
            self.say(f"arithmetic {answer.arithmetic}")
            for line in report.statistics_lines(answer.statistics, self.drafters):
                self.say(line)
        if session is None:
            self.say("(no cluster: it was lost)")
            return
        self.console.print(report.stages_table(session))
        self.say(
            f"memory: of the whole process; means over {len(session.head.hops)} segments (passes of tokens "
            "through all stages); waiting: behind other segments; own work: FlowSpec's, without computing",
            "dim",
        )
        if (known := report.expertise_table(session, self.tokenizer)) is not None:
            self.console.print(known)

    # ------------------------------------------------------------------------------------- answers

    def answer(self, line: str) -> None:
        if self.llm is not None and (failure := self.llm.session.head.failure) is not None:
            note(f"({failure}; connecting again)")
            self.llm = None
        llm = self.llm or self.connect()
        system = [{"role": "system", "content": self.system}] if self.system else []
        dialogue = [*system, *self.messages, {"role": "user", "content": line}]
        question = replace(self.settings, prompt=self.tokenizer.encode_chat(dialogue))
        entry = Entry(question=question, user=line, system=self.system)
        self.keep(entry)
        self.follow(llm, entry)

    def keep(self, entry: Entry) -> None:
        """Writes a question to the journal. Where none can be, that is told once, and the chat goes on."""
        if self.journal is None and self.is_kept:
            try:
                assert self.setting is not None
                self.journal = Journal.start(new_path(journal_folder()), self.setting, show_note)
            except (OSError, InputError) as error:
                self.is_kept = False
                note(f"(the dialogue is not kept: {error})")
        if self.journal is not None:
            self.journal.ask(entry)

    def close_journal(self) -> None:
        """The dialogue is over; another question begins another one."""
        if self.journal is not None:
            self.journal.close()
        self.journal = None

    def follow(self, llm: LLM, entry: Entry) -> None:
        """Shows an answer up to its end."""
        if (head := llm.session.head).is_waiting:
            lost = " or ".join(head.lost)
            note(
                "(this waits for a device to come back, as long as it takes; start the daemon of "
                f"{lost} again; Ctrl-C gives the answer up)"
            )
        path, self.record_to = self.record_to, None
        recording = record_answer(llm, path, self.notes, partial(self.say, style="red"))
        with recording, contextlib.ExitStack() as stack:
            showing = show_answer(self.status(llm, stack), quiet=self.args.json)
            piece = stack.enter_context(showing)
            answer = ask(llm, entry.question, self.request, piece, self.journal)
        if self.journal is not None:
            self.journal.end(answer.finish_reason, answer.text)
        self.last = answer
        for role, text in (("user", entry.user), ("assistant", answer.text)):
            self.messages.append({"role": role, "content": text})
        if self.args.json:
            print(json.dumps(report.record(llm, entry.question, answer)), flush=True)
            return
        self.console.print(f"{report.figures(answer, llm.session)}\n", style="dim")
        why, kinds = report.explain_forecast(llm.session, answer)
        if not kinds <= self.explained:
            self.explained |= kinds
            self.say(f"({why or 'the forecast does not hold here; why is not known'})\n")

    def status(self, llm: LLM, stack: contextlib.ExitStack) -> Callable[[], str] | None:
        """What stands on a live line under an answer, if one is wanted."""
        if not self.is_watching:
            return None
        watch = stack.enter_context(contextlib.closing(watch_session(llm.session, self.tokenizer.decode)))
        watch.join(reads=False)
        levels = BARS if self.console.encoding.lower().startswith("utf") else DIGITS
        return lambda: live_line(watch.present, levels)


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
