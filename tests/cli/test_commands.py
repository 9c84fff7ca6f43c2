"""`generate`, `chat` and `verify` as people and programs run them: what they report, that answers are those
of the plain model, also of a file of prompts, several at a time, Ctrl-C, and that nothing is left behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from gguf import GGMLQuantizationType
from msgspec import structs

from flowspec.bench import faithfulness
from flowspec.bench.verify import ClusterAnswer, judge
from flowspec.core.protocol.messages import Sampling
from flowspec.model.files import BUNDLED, TOY_TOLD, ModelFiles
from flowspec.model.step_by_step import StepByStep
from flowspec.model.text import Tokenizer
from flowspec.version import __version__
from lab.plain_model import PlainModel
from tests import warm
from tests.checkpoints import make_variant
from tests.cli.running import FLOWSPEC, Run
from tests.ggufs import convert, make

SUM = "What is 17 + 25?"
SMALL = ("--drafter=ngram", "--dtype=float32", "--prompt-token-ids=5,6,7", "--max-new-tokens=9")


def test_a_real_command_reports_all_that_is_promised_and_equals_the_plain_model() -> None:
    asked = ("--temperature", "0.8", "--seed", "4", "--dtype", "float32", SUM)
    command = [*FLOWSPEC, "generate", "--json", "--local", "3", "--layers", "3,1,4", *asked]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)  # cold, as users start it
    found = json.loads(done.stdout)
    files = ModelFiles(BUNDLED)
    tokenizer = Tokenizer(files)
    prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": SUM}]))
    sampling = Sampling(temperature=0.8, seed=4)
    expected = PlainModel(files, "float32").generate(prompt, sampling, 256, frozenset([2]))
    assert found["token_ids"] == [token for token in expected if token != 2]
    assert found["text"] == tokenizer.decode(expected)
    assert (found["finish_reason"], found["world"], found["seed"]) == ("stop", "cluster", 4)
    assert (found["method"], found["drafter"]) == ("continuous", "bundled, ngram")
    assert found["statistics"]["nodes_sent"] > 0
    assert (found["prompt_tokens"], found["new_tokens"]) == (len(prompt), len(found["token_ids"]))
    assert found["tokens_per_s"] == pytest.approx((found["new_tokens"] - 1) / found["decode_s"], rel=1e-2)
    assert found["time_to_first_token_s"] > 0
    assert [stage["layers"] for stage in found["stages"]] == [[0, 3], [3, 4], [4, 8]]
    assert all(stage["memory_bytes"] > stage["weight_bytes"] > 0 for stage in found["stages"])
    assert not any(psutil.pid_exists(stage["pid"]) for stage in found["stages"]), "the daemons have ended"


@pytest.mark.parametrize("is_packed", [False, True])
def test_token_ids_need_no_tokenizer_and_a_gguf_file_is_a_model(
    tmp_path: Path, run: Run, is_packed: bool
) -> None:
    model = make_variant(tmp_path / "model", "qwen3")
    if is_packed:
        model = tmp_path / "model.gguf"
        convert(make(tmp_path / "checkpoint", "llama"), model, GGMLQuantizationType.Q8_0)
    found = run("generate", "--json", "--model", model, "--local=1", *SMALL).json
    plain = PlainModel(ModelFiles(str(model)), "float32")
    expected = plain.generate((5, 6, 7), Sampling(), 9, frozenset([2]))
    assert found["token_ids"] == [token for token in expected if token != 2]
    assert is_packed or found["text"] is None


@pytest.mark.usefixtures("shared")
def test_stops_end_the_answer_where_they_should(run: Run) -> None:
    def ask(*flags: str) -> dict[str, Any]:
        return dict(run("generate", "--json", "--local=1", "--drafter=ngram", *flags, SUM).json)

    whole = ask()
    cut = ask("--stop", "12")
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"].split("12")[0]
    assert cut["token_ids"] == whole["token_ids"][: len(cut["token_ids"])]
    token = whole["token_ids"][6]
    cut = ask("--stop-token-ids", str(token))
    assert cut["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token)]


@pytest.mark.usefixtures("shared")
def test_a_chat_remembers_and_reuses_what_was_said(run: Run) -> None:
    lines = "What is 2 + 3?\nWhat is 4 + 4?\n/reset\nWhat is 2 + 3?\n/quit\n"
    asked = ("chat", "--json", "--local=2", "--no-journal")
    first, second, again = run(*asked, stdin=lines).answers
    assert second["prompt_tokens"] > first["prompt_tokens"]
    assert second["reused_tokens"] >= first["prompt_tokens"]
    assert again["reused_tokens"] == 0
    assert again["token_ids"] == first["token_ids"]
    assert f"({TOY_TOLD})\n" in run("chat", "--local=2", "--no-journal").out, "it greets"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_variant(tmp_path_factory.mktemp("verified") / "model", "llama-grouped")


@pytest.fixture
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read to compare with the reference is a tenth of it."""
    monkeypatch.setattr(faithfulness, "TOKENS", 200)


TWO = ("--prompt-token-ids=5,6,7", "--prompt-token-ids=9,9,9,9", "--temperatures=0,1", "--seeds=1,2")


@pytest.mark.usefixtures("short_text")
def test_verify_finds_all_exact(grouped: Path, run: Run) -> None:
    asked = ("verify", "--json", *TWO, f"--model={grouped}", "--local=2", "--max-new-tokens=8")
    report = run(*asked).json
    exact, faithful = report["exact"], report["faithful"]
    assert (exact["is_exact"], exact["exact"], exact["wrong"], len(exact["answers"])) == (True, 6, 0, 6)
    assert (faithful["is_faithful"], faithful["tokens"], faithful["faults"]) == (True, 200, [])


@pytest.mark.usefixtures("short_text")
def test_verify_fails_where_the_model_is_not_faithful_and_finds_a_wrong_token(
    grouped: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process computes with other weights than the cluster has."""
    load = StepByStep.load

    def other(*given: Any, **named: Any) -> StepByStep:
        found = load(*given, **named)
        found.part.parts[3]["mlp.down_proj"].matrices[0].weights[:] *= 1.5  # type: ignore[union-attr]
        return found

    few = ["--prompt-token-ids=5,6,7", "--temperatures=0", "--max-new-tokens=4", "--local=1", "--method=ar"]
    with monkeypatch.context() as patch:  # exact, and not faithful
        patch.setattr(faithfulness, "PERPLEXITY_LIMIT", 0.0)
        told = run("verify", f"--model={grouped}", *few, status=1).out
    assert "faithful: NO, perplexity is" in told
    monkeypatch.setattr(StepByStep, "load", other)
    flags = ("--method=ar", f"--model={grouped}", "--local=1", "--max-new-tokens=24")
    report = run("verify", "--json", *TWO, *flags, status=1).json
    exact, faithful = report["exact"], report["faithful"]
    assert not exact["is_exact"]
    wrong = next(answer for answer in exact["answers"] if answer["verdict"] == "wrong")
    assert wrong["difference"]["expected"] != wrong["difference"]["found"]
    assert wrong["difference"]["margin"] > 0
    assert not faithful["is_faithful"]
    assert faithful["matrix"]["matrix"] == "layers.3.mlp.down_proj.weight"


@pytest.mark.usefixtures("short_text")
def test_verify_checks_answers_that_a_schema_binds(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another schema step by step than on the devices gives other tokens."""
    pytest.importorskip("llguidance")
    true = judge

    def judged(plain: StepByStep, found: ClusterAnswer, stop_ids: frozenset[int]) -> dict[str, Any]:
        grammar = found.case.sampling.grammar
        if grammar is None:
            return true(plain, found, stop_ids)
        other = structs.replace(grammar, text='{"type": "integer"}')
        case = replace(found.case, sampling=structs.replace(found.case.sampling, grammar=other))
        assert true(plain, found, stop_ids)["verdict"] == "exact"
        return true(plain, replace(found, case=case), stop_ids)

    monkeypatch.setattr("flowspec.cli.verify.judge", judged)
    few = ["--limit=1", "--temperatures=0", "--max-new-tokens=12", "--local=1", "--method=continuous"]
    lines = run("verify", *few, status=1).out.splitlines()
    assert "exact: NO, 1 of 2 answers are wrong" in lines
    assert lines[-1] == "structured output: 1 of the answers were bound by a schema"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_command_that_is_ended_leaves_no_process_behind(number: signal.Signals) -> None:
    asked = ["--local=2", "--ignore-eos", "--max-new-tokens=900", "Tell me a story."]
    command = [*FLOWSPEC, "generate", *asked]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read(10), "the answer has begun"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 3, "the pool and two daemons"
        process.send_signal(number)
        process.stdout.read()
        status = process.wait(timeout=30)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_daemon_command_ends_cleanly(number: signal.Signals) -> None:
    command = [*FLOWSPEC, "daemon", "--port=0", "--name=here"]
    with warm.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "here listens on 127.0.0.1:" in process.stderr.readline()
        process.send_signal(number)
        rest = process.stderr.read()
    assert process.returncode == 0
    assert f"stopped ({number.name})" in rest
    assert "Traceback" not in rest


def test_the_package_and_the_console_script_run() -> None:
    scripts = Path(sys.executable).parent / "flowspec"
    for command in ([sys.executable, "-m", "flowspec"], [str(scripts)]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == f"flowspec {__version__}\n"


DIALOGUES = [
    {"question_id": "plays", "turns": ["Tell me a story.", "And what came then?"]},
    {"question_id": "sum", "turns": ["What is 17 + 25?"]},
    {"question_id": "sums", "turns": ["What is 2 + 3?", "What is 4 + 4?"]},
    {"question_id": "hi", "turns": ["hi"]},
]
COMMON = ("--local=1", "--dtype=float32", "--temperature=0.8", "--seed=5", "--max-new-tokens=24")


@pytest.mark.usefixtures("shared")
def test_three_at_a_time_give_what_plain_decoding_gives_one_by_one(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DIALOGUES))
    asked = ("generate", f"--prompts={file}", "--json", *COMMON)
    plain, found = run(*asked, "--method=ar").answers, run(*asked, "--parallel=3").answers
    order = [(str(row["question_id"]), turn) for row in DIALOGUES for turn in range(len(row["turns"]))]
    assert [(answer["prompt"], answer["turn"]) for answer in found] == order
    assert {(answer["method"], answer["drafter"]) for answer in found} == {("continuous", "bundled, ngram")}
    assert {(answer["method"], answer["drafter"]) for answer in plain} == {("ar", "none")}
    for name in ("token_ids", "text"):
        assert [answer[name] for answer in found] == [answer[name] for answer in plain]
    assert all(answer["statistics"]["segments"] > 0 for answer in found if answer["new_tokens"] > 1)
    before: dict[str, Any] = {}
    for answer in plain:
        if answer["turn"]:  # it reuses the dialogue so far
            assert before["prompt_tokens"] <= answer["reused_tokens"] < answer["prompt_tokens"]
        else:
            assert answer["reused_tokens"] == 0
        before = answer


@pytest.mark.usefixtures("shared")
def test_text_comes_in_the_order_of_the_file_with_a_line_of_figures_each(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("Tell me a long story.\n\nWhat is 2 + 3?\nhi\n")
    ended = run("generate", f"--prompts={path}", "--parallel=3", *COMMON)
    heads = [line.split("]")[0] for line in ended.out.splitlines() if line.startswith("[")]
    assert heads == ["[1", "[3", "[4"], "lines are named by their numbers"
    assert ["tokens/s, first after" in line for line in ended.told] == [True] * 3


def test_ctrl_c_prints_what_is_there_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("hi\n" + "Tell me a story.\n" * 8)
    flags = ["--parallel=2", "--json", "--local=2", "--ignore-eos", "--max-new-tokens=100"]
    command = [*FLOWSPEC, "generate", f"--prompts={path}", *flags]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = [json.loads(line) for line in process.stdout]
        said = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert (first["prompt"], first["finish_reason"]) == ("1", "length")
    assert {answer["finish_reason"] for answer in rest} <= {"cancelled", "length"}
    assert len(rest) < 8
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
