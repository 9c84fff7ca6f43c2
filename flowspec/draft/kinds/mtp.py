"""`mtp`: the layer of the target's own checkpoint that guesses further tokens (`draft.mtp_head`).

It reads the target's features, which only the head of the pipeline is sent."""

from __future__ import annotations

from flowspec.draft.kinds.base import WordKind
from flowspec.draft.mtp_files import lacking
from flowspec.draft.protocol import Drafter
from flowspec.model.files import ModelFiles
from flowspec.model.trials import prepare
from flowspec.plan import sites
from flowspec.plan.shape import ModelShape, mtp_shape


class Mtp(WordKind):
    word = "mtp"
    plural = "MTP heads"
    acceptance = 0.69  # of all that Qwen3.6's guessed in llama.cpp, at its pull request 24025
    layouts = ("mtp",)
    has_tensors = True
    reads_features = True

    def open(
        self, target: ModelFiles, dtype: str, device: str | None, *, context: int, coupled: bool
    ) -> Drafter:
        prepare()
        from flowspec.draft.eagle import EagleDrafter
        from flowspec.draft.mtp_head import MtpHead
        from flowspec.model.accelerator import find

        head = MtpHead.load(target, dtype, device or find("auto").device)
        return EagleDrafter(head, target, context=context, coupled=coupled)

    def reckoned(self, target: ModelShape) -> sites.PlannedDrafter:
        if not target.has_mtp:
            raise lacking(target.name)
        return sites.PlannedDrafter(name=self.name, shape=mtp_shape(target), acceptance=self.acceptance)
