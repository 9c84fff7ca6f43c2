"""Nothing that a model's folder brings is run: no pickle is opened but a draft head's, and that one by words
that call nothing; no module of a repository is imported."""

from __future__ import annotations

import ast
import collections
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flowspec.cli.main import main
from flowspec.draft.registry import find_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.gpu import tensor_of
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer
from flowspec.model.weight_files import PICKLE_BYTES_MAX, Unpickler, mapped, read_pickled
from tests.checkpoints import make_variant

ROOT = Path(__file__).parents[2]
CODE = "import pathlib; pathlib.Path({path!r}).touch()\nclass Mine: pass\n"


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


PICKLED_HEADS = "flowspec/model/weight_files.py"
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def opens_pickles(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        is_named = isinstance(node, ast.Attribute) and node.attr in ("load", "hub")
        is_load = is_named and ast.unparse(node) in ("torch.load", "torch.hub", "torch.jit.load")
        if is_load or {name.split(".")[0] for name in names} & PICKLES:
            return True
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("allow_pickle", "trust_remote_code")
            and ast.unparse(node.value) != "False"
        ):
            return True
    return False


def test_nothing_in_the_product_can_open_a_pickle() -> None:
    """Whoever adds a way in has to come by here."""
    words = re.compile("|".join((*PICKLES, "torch.load", "torch.hub", "torch.jit", "trust_remote_code")))
    sources = {path: path.read_text("utf-8") for path in (ROOT / "flowspec").rglob("*.py")}
    named = {path: source for path, source in sources.items() if words.search(source)}
    trees = {str(path.relative_to(ROOT)): ast.parse(source) for path, source in named.items()}
    assert {path for path, tree in trees.items() if opens_pickles(tree)} == {PICKLED_HEADS}
    for callable_ in (os.system, Path.touch, bytearray, torch.tensor):
        with pytest.raises(ValueError, match="which is no tensor"):
            Unpickler(pickle.dumps(callable_)).load()
    for code in ("from pickle import loads", "import torch\ntorch.load('x')", "f(trust_remote_code=True)"):
        assert opens_pickles(ast.parse(code))


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model-00001-of-00002.bin"])
def test_a_model_that_is_a_pickle_is_refused_in_one_line_and_not_opened(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_variant(tmp_path, "llama-grouped")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps({"model.norm.weight": Bomb(tmp_path / "exploded")}))
    assert main(["generate", "--model", str(folder), "--local", "1", "hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a pickle, which may run code" in line
    with pytest.raises(InputError, match="is a pickle"):
        Reference(ModelFiles(str(folder)), "float32")
    with pytest.raises(InputError, match="is a pickle"):
        find_drafter(str(folder)).open(ModelFiles(BUNDLED), "float32", context=64)
    assert not (tmp_path / "exploded").exists()
    pickle.loads((folder / name).read_bytes())
    assert (tmp_path / "exploded").exists(), "the bomb works"


@pytest.mark.parametrize("family", ["llama", "mine"])
def test_code_of_a_repository_is_never_run(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a family that we know it is not needed; another family is refused by name."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "flowspec/demo/target", folder)
    proof = tmp_path / "ran"
    (folder / "code.py").write_text(CODE.format(path=str(proof)))
    for name, own in (
        ("config.json", {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.Mine", "code.Mine"]}),
    ):
        raw = json.loads((folder / name).read_text("utf-8")) | {"auto_map": own}
        raw |= {"model_type": family} if name == "config.json" else {}
        (folder / name).write_text(json.dumps(raw))
    files = ModelFiles(str(folder))
    if family == "llama":
        files.config()
        Reference(files, "float32")
        Tokenizer(files).encode("hi")
    else:
        assert main(["generate", "--model", str(folder), "--local", "1", "hi"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "'mine'" in line
        with pytest.raises(InputError, match=r"cannot read the config\.json"):
            files.config()
    assert not proof.exists()


def rewritten(path: Path, data: bytes | None = None, how: int = zipfile.ZIP_STORED) -> None:
    """The archive again, with another pickle or packed in another way."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in entries.items():
            archive.writestr(name, data if data is not None and name.endswith("/data.pkl") else content)


def saved(path: Path) -> bytes:
    """A file of two tensors, and its pickle."""
    torch.save({"fc.weight": torch.arange(12.0).reshape(3, 4), "d2t": torch.arange(5)}, path)
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


@pytest.mark.parametrize("wrap", [dict, collections.OrderedDict])
def test_tensors_come_as_they_were_saved(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    tensors = {
        "fc.weight": torch.randn(3, 4),
        "layers.0.x": torch.nn.Parameter(torch.randn(2).half(), requires_grad=False),
        "d2t": torch.arange(5),
        "t2d": torch.tensor([True, False]),
        "part": torch.arange(20.0).reshape(4, 5)[1:3],
    }
    path = tmp_path / "pytorch_model.bin"
    torch.save(wrap(tensors), path)
    found = read_pickled(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        again = tensor_of(mapped(found[name]))
        assert again.dtype == tensor.dtype
        assert torch.equal(again, tensor)
    torch.save({"turned": tensors["part"].T}, path)
    with pytest.raises(InputError, match="does not lie in one piece"):
        read_pickled(path)


class Called:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call[0], self.call[1:]


def with_pickle(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        saved(path)
        rewritten(path, content)

    return make


def patched(*changes: tuple[bytes, bytes]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        data = saved(path)
        for old, new in changes:
            assert old in data
            data = data.replace(old, new, 1)
        rewritten(path, data)

    return make


def nested(depth: int) -> bytes:
    """A name that is a tuple of two tuples, which are one, and so on."""
    return b"\x80\x02})" + b"".join(b"q%ch%c\x86" % (place, place) for place in range(depth)) + b"Ns."


BYTES = pickle.dumps({"a": Called(bytearray, 1 << 40)}, protocol=2)
HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no archive": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "is no zip archive"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "cut short": (
        lambda path: (saved(path), path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
        "not a zip file",
    ),
    "a pickle before an archive": (  # torch would run it, and Python's reader finds the archive behind it
        lambda path: (saved(path), path.write_bytes(BYTES + path.read_bytes())),
        "is no zip archive",
    ),
    "packed": (lambda path: (saved(path), rewritten(path, how=zipfile.ZIP_DEFLATED)), "entries are packed"),
    "a call": (with_pickle(pickle.dumps(Called(os.system, "true"), protocol=2)), "names 'posix system'"),
    "a call by stack": (with_pickle(pickle.dumps(Called(os.system, "true"))), "names 'posix system'"),
    "a call that torch allows": (with_pickle(BYTES), r"names '(__builtin__|builtins) bytearray'"),
    "much that is not there": (with_pickle(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little")), "cannot read"),
    "a high place": (with_pickle(b"\x80\x02}r\xff\xff\xff\xff00."), "cannot read"),
    "tuples of tuples": (with_pickle(nested(60)), "cannot read"),
    "a copy": (with_pickle(pickle.dumps(Called(collections.OrderedDict, {1: 1}), protocol=2)), "cannot read"),
    "a set of a set": (with_pickle(pickle.dumps({frozenset([frozenset()]): 1})), "cannot read"),
    "a long pickle": (
        with_pickle(pickle.dumps("x" * PICKLE_BYTES_MAX, protocol=2)),
        f"a pickle of {PICKLE_BYTES_MAX + 10} bytes",
    ),
    "a pickle that ends early": (with_pickle(b"\x80\x02}q\x00"), "cannot read"),
    "no table": (with_pickle(pickle.dumps([1, 2], protocol=2)), "expected names and tensors"),
    "no tensors": (with_pickle(pickle.dumps({"fc.weight": 3}, protocol=2)), "expected names and tensors"),
    "a shape beyond its storage": (patched((b"K\x03K\x04\x86", b"M\xff\xffK\x04\x86")), "cannot read"),
    "a storage that is not there": (patched((b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x007")), "cannot read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_another_file_gets_one_line(name: str, tmp_path: Path) -> None:
    make, message = HOSTILE[name]
    path = tmp_path / "pytorch_model.bin"
    make(path)
    with pytest.raises(InputError, match=message) as caught:
        read_pickled(path)
    assert "\n" not in str(caught.value)


ELSEWHERE = ("ROOT/DATA.PKL", "ROOT/sub/data.pkl", "other/data.pkl", "ROOT/constants.pkl", "data.pkl")


def test_two_pickles_or_one_elsewhere_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    innocent = saved(tmp_path / "innocent.bin")
    for name in ELSEWHERE:
        entries = [("ROOT/data.pkl", innocent), (name, BYTES)]
        alone = [("ROOT/version", b"3"), (name, BYTES)] if name in ELSEWHERE[:3] else entries
        for each in (entries, entries[::-1], alone):
            with zipfile.ZipFile(path, "w") as archive:
                for entry, content in each:
                    archive.writestr(entry, content)
            with pytest.raises(InputError, match=r"another pickle than data\.pkl"):
                read_pickled(path)
