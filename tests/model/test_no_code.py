"""Nothing that a model's folder brings is run: no pickle is opened but a draft head's, and that one by words
that call nothing; no module of a repository is imported."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest

from flowspec.bench.checkpoints import make_variant
from flowspec.cli.main import main
from flowspec.draft.kinds import open_drafter
from flowspec.errors import InputError
from flowspec.model.files import BUNDLED, ModelFiles
from flowspec.model.reference import Reference
from flowspec.model.text import Tokenizer

ROOT = Path(__file__).parents[2]
CODE = "import pathlib; pathlib.Path({path!r}).touch()\nclass Mine: pass\n"


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


PICKLED_HEADS = "flowspec/model/pickled_file.py"
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def opens_pickles(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        is_load = isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "torch.load",
            "torch.hub",
            "torch.jit.load",
        )
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
    trees = {
        str(path.relative_to(ROOT)): ast.parse(path.read_text("utf-8"))
        for path in (ROOT / "flowspec").rglob("*.py")
    }
    assert {path for path, tree in trees.items() if opens_pickles(tree)} == {PICKLED_HEADS}
    (call,) = (
        node
        for node in ast.walk(trees[PICKLED_HEADS])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    )
    assert "weights_only=True" in map(ast.unparse, call.keywords)
    for code in ("from pickle import loads", "import torch\ntorch.load('x')", "f(trust_remote_code=True)"):
        assert opens_pickles(ast.parse(code))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model-00001-of-00002.bin"])
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
        open_drafter(str(folder), ModelFiles(BUNDLED), "float32", context=64)
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
    for name, classes in (
        ("config.json", {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.Mine", "code.Mine"]}),
    ):
        path = folder / name
        raw = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(
            json.dumps(
                {**raw, "auto_map": classes, **({"model_type": family} if name == "config.json" else {})}
            )
        )
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
