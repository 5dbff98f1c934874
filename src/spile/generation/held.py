"""Turns a prompt that begins like an earlier one into the part of it that must still be read.

An engine's state holds the keys and values of the tokens it was fed. This file remembers which tokens those
are, and goes on from the longest beginning that a new prompt has in common with them, as far as the state can
be cut back exactly, or with one that a prompt cache has, whichever is longer. A prompt's ids never depend on
what is held: an answer that was chosen in other pieces than its text is encoded in is read again from there. It
does not know text, nor engines beyond their interface.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spile.engines.base import CopyableState, Engine, State
from spile.generation.prompt_blocks import Ids, num_common
from spile.generation.prompt_cache import Found, PromptCache, Source


class Held:
    """An engine's state that outlives an answer, and the token ids it was fed.

    Invariant: the state holds exactly `token_ids[:state.position]`. The last token of an answer was chosen,
    but perhaps never fed; it is in `token_ids` all the same.
    """

    def __init__(self, *, is_lasting: bool = True) -> None:
        """`is_lasting`: the state serves the next prompt too, so a cache in memory needs less of it."""
        self.token_ids: list[int] = []  # of the last prompt and its answer
        self.num_prompt = 0  # of them
        self._is_lasting = is_lasting
        self._state: State | None = None
        self._cache: PromptCache | None = None

    @property
    def position(self) -> int:
        """Tokens that the state holds."""
        return 0 if self._state is None else self._state.position

    def begin(
        self,
        engine: Engine,
        token_ids: Sequence[int],
        cache: PromptCache | None = None,
        sources: Sequence[Source] = (),
    ) -> tuple[State, int]:
        """Return a state, and how many of these tokens it already holds: never all of them, as the logits
        after the last are wanted. `sources` are other places to look than the cache. May touch disk.

        Raises: PromptFileError for a damaged file of `sources`.
        """
        self._cache = cache
        places: tuple[Source, ...] = (*sources, *(() if cache is None else (cache,)))
        state, position = self._begin(engine, np.array(token_ids[:-1], np.int32), places)
        self._state = state
        self.token_ids, self.num_prompt = list(token_ids), len(token_ids)
        return state, position

    def note(self, token_id: int) -> None:
        """Remember a token of the answer before it is fed."""
        self.token_ids.append(token_id)

    def keep(self, cuts: Sequence[int] = ()) -> None:
        """Give the cache what the state holds now; later prompts may well leave this one at `cuts`, the
        likeliest first.
        """
        state = self._state
        if self._cache is not None and isinstance(state, CopyableState) and state.position:
            ids = np.array(self.token_ids[: state.num_reusable], np.int32)
            reached = tuple(
                dict.fromkeys(cut // state.step * state.step for cut in cuts if cut <= state.position)
            )
            reached = tuple(cut for cut in reached if 0 < cut <= state.num_reusable)
            self._cache.store(ids, state, reached, is_held=self._is_lasting)

    def keep_answer(self, cut: int) -> None:
        """The same after an answer, or after what there is of it; a state that lives on goes on from its end
        by itself.
        """
        self.keep((self.num_prompt, cut) if self._is_lasting else (self.num_prompt, self.position, cut))

    def close(self) -> None:
        """Give the state's memory back. May be called twice; the next `begin` starts anew."""
        state, self._state = self._state, None
        self.token_ids, self.num_prompt = [], 0
        if state is not None:
            state.close()

    def _begin(self, engine: Engine, wanted: Ids, places: Sequence[Source]) -> tuple[State, int]:
        state = self._state
        num_held = num_common(np.array(self.token_ids[: self.position], np.int32), wanted)
        reach = num_held if state is not None and num_held and state.can_rewind(num_held) else 0
        while places and reach < len(wanted):
            is_live = state is not None
            state = self._state = state or engine.new_state()
            found = None
            if isinstance(state, CopyableState):
                num_held = min(num_held, state.num_reusable)
                found = _longest(places, wanted, state, num_held)
            elif self._cache is not None:
                self._cache.refuse(engine.name)
            if found is None or found.position <= reach:
                break
            is_held = is_live and found.position <= num_held
            if is_live and not is_held:
                state.close()
                state = self._state = engine.new_state()
            assert isinstance(state, CopyableState), "states of one engine are of one kind"
            try:
                if found.load(state, is_held):
                    return state, found.position
            except BaseException:
                self.close()
                raise
            self.close()
            state, num_held, reach = None, 0, 0
        if state is None or not reach:
            self.close()
            return engine.new_state(), 0
        state.rewind(reach)
        return state, reach


def _longest(places: Sequence[Source], wanted: Ids, state: CopyableState, num_held: int) -> Found | None:
    found = [one for place in places if (one := place.find(wanted, state, num_held)) is not None]
    return max(found, key=lambda one: one.position, default=None)
