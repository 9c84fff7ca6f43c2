"""The bundled model with the chat template of a family that calls tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from flowspec.model.files import bundled_folder


def folder_of(
    folder: Path, template: str, names: tuple[str, ...], special: tuple[str, ...] = ()
) -> dict[str, int]:
    """The bundled model with another template, and these names in the place of its rarest tokens, of which
    some are `special`."""
    shutil.copytree(bundled_folder("target"), folder)
    for path in folder.glob("*.json"):  # the name of what ends answers, of which channels make another use
        path.write_text(path.read_text("utf-8").replace('"<|end|>"', '"<|return|>"'), "utf-8")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text("utf-8"))
    vocabulary, merges = document["model"]["vocab"], document["model"]["merges"]
    for name in names:
        piece, token = max(vocabulary.items(), key=lambda item: item[1] if item[0] not in names else -1)
        del vocabulary[piece]
        merges.remove(next(pair for pair in merges if "".join(pair) == piece))
        vocabulary[name] = token
        entry = {**document["added_tokens"][0], "id": token, "content": name, "special": name in special}
        document["added_tokens"].append(entry)
    path.write_text(json.dumps(document), "utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return dict(vocabulary)
