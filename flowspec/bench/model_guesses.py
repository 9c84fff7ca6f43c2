"""A small language model as a drafter in virtual time; see `bench.drafting`.

The model runs over a prompt and its plain answer at once. A guess off that path is run together with the
guesses before it, back to where they leave the path, and several such branches make one pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flowspec.bench.guesses import WIDTH_MAX, Guesses, Maker, MemoDrafter
from flowspec.bench.plain import DTYPE, PlainCase
from flowspec.core.stage.events import JobPart, RunLayers
from flowspec.draft.ranking import F32, Children, Ranker
from flowspec.model.accelerator import use_threads
from flowspec.model.arithmetic.arrays import Array
from flowspec.model.files import ModelFiles
from flowspec.model.slice import Slice
from flowspec.model.weights import Span

HELD_MAX = 16
"""Cases whose paths are held at once: those that many users have answered at one time."""
GUESSED_ROWS_MAX = 4096
"""Rows of one pass: what is asked for, and the guesses before it."""


class Models:
    """A small language model, in float32."""

    def __init__(self, files: ModelFiles, ranker: Ranker, context: int) -> None:
        count = files.raw_config()["num_hidden_layers"]
        use_threads(1)  # its passes are too small for more
        self.model = Slice.load(files, Span(first=0, end=count, count=count), DTYPE)
        self.ranker = ranker
        self.context = context
        self.held: OrderedDict[_ModelGuesses, int] = OrderedDict()
        """Whose paths are in the model's caches, the longest unused first, and in which."""

    def begin(self, case: PlainCase) -> Maker:
        guesses = _ModelGuesses(self, case)
        return lambda: MemoDrafter(guesses)


class _ModelGuesses(Guesses):
    """Slots 0, 1, ... of a cache hold the path of prompt and plain answer, those behind it the guesses of the
    pass under way."""

    def __init__(self, drafting: Models, case: PlainCase) -> None:
        super().__init__(case, drafting.context)
        self._drafting = drafting
        self._ranker, self._model = drafting.ranker, drafting.model
        self._path = (*case.prompt, *case.answer)[: drafting.context]
        self._position = {prefix: position for position, prefix in enumerate(self.prefixes.chain(self._path))}
        self._path_states = self._hold()

    def _hold(self) -> Array:
        """Puts the path into a cache of the model's, if there are enough in place of another case's; its
        hidden states."""
        length, held = len(self._path), self._drafting.held
        held[self] = len(held) if len(held) < HELD_MAX else held.popitem(last=False)[1]
        self._model.open_cache(held[self], length + GUESSED_ROWS_MAX)
        return self._run(self._path, range(length), np.arange(length), np.tri(length, dtype=bool))

    def _rank(self, prefixes: Sequence[int]) -> list[Children]:
        """Guesses are run with those before them, back to where they leave the path."""
        if self not in self._drafting.held:
            self._hold()
        self._drafting.held.move_to_end(self)
        length = len(self._path_states)
        rows: dict[int, int] = {}  # a guess's prefix -> its row
        for prefix in prefixes:
            branch = []
            while prefix not in self._position and prefix not in rows:
                branch.append(prefix)
                prefix = self.prefixes.parent(prefix)
            for guess in reversed(branch):
                rows[guess] = len(rows)
        states = None
        if rows:
            visible = np.zeros((len(rows), length + len(rows)), dtype=bool)
            for guess, row in rows.items():
                parent = self.prefixes.parent(guess)
                if parent in rows:
                    visible[row] = visible[rows[parent]]
                else:
                    visible[row, : self._position[parent] + 1] = True
                visible[row, length + row] = True
            positions = np.array([self.prefixes.length(guess) - 1 for guess in rows])
            slots = range(length, length + len(rows))
            states = self._run([self.prefixes.token(guess) for guess in rows], slots, positions, visible)
        wanted = [
            self._path_states[self._position[prefix]] if prefix in self._position else states[rows[prefix]]  # type: ignore[index]
            for prefix in prefixes
        ]
        return self._ranker.best(
            self._logits(wanted), self._positions(prefixes), WIDTH_MAX, self._texts(prefixes)
        )

    def _run(
        self,
        tokens: Sequence[int],
        slots: range,
        positions: npt.NDArray[np.int64],
        visible: npt.NDArray[np.bool_],
    ) -> Array:
        """Hidden states of rows in these slots, of which each sees the slots that `visible` `[rows, high]`
        says."""
        high = visible.shape[1]
        part = JobPart(
            request=self._drafting.held[self],
            slots=np.array(slots, dtype=np.int64),
            tokens=np.array(tokens, dtype=np.int64),
            positions=positions.astype(np.int64),
            key_positions=np.concatenate([np.arange(high - len(tokens)), positions]).astype(np.int32),
            visible=visible,
            sampled=np.zeros(len(tokens), dtype=bool),
            sampling=self.case.sampling,
        )
        _, states = self._model.forward(
            RunLayers(job=0, parts=(part,), payload=None, rows=tuple(range(len(tokens)))), None
        )
        return states

    def _logits(self, states: Sequence[Array]) -> F32:
        return self._model.logits(np.stack(states))
