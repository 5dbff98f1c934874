"""The sets of experts that routers choose from in the approximate mode: ids worked out by hand."""

import numpy as np
from numpy.typing import NDArray

from spile.residency.selection import Selection


def choose(selection: Selection, layer: int, **experts: int) -> None:
    """Record experts as e3=2: two tokens chose number 3."""
    ids = np.array(sorted(int(name[1:]) for name in experts), np.int32)
    selection.choose(layer, ids, np.array([experts[f"e{expert}"] for expert in ids], np.int32))


def allowed(selection: Selection, layer: int = 0) -> list[int] | None:
    mask: NDArray[np.uint8] | None = selection.allowed(layer)
    return None if mask is None else np.flatnonzero(mask).tolist()


def selecting(every: int, *, num_active: int = 4, num_shared: int = 0) -> Selection:
    return Selection(2, 8, num_active=num_active, num_shared=num_shared, every=every)


def test_prompt_and_the_token_after_it_see_every_expert() -> None:
    selection = selecting(3)
    selection.begin_prompt()
    assert allowed(selection) is None
    choose(selection, 0, e1=1, e2=1)
    selection.begin_token()
    assert allowed(selection) is None


def test_set_is_what_was_chosen_at_the_selection_and_then_what_the_prompt_chose_most() -> None:
    selection = selecting(3)
    selection.begin_prompt()
    choose(selection, 0, e1=5, e2=9, e3=5, e6=1)
    choose(selection, 1, e7=9)
    selection.begin_token()
    choose(selection, 0, e0=1, e6=1)
    choose(selection, 1, e0=1, e1=1)
    selection.begin_token()
    assert allowed(selection, 0) == [0, 1, 2, 6]  # 0 and 6 by this token; 2, then 1 before 3 by its lower id
    assert allowed(selection, 1) == [0, 1, 2, 7]  # nobody chose 2: the lowest id of those


def test_selection_comes_again_after_so_many_tokens() -> None:
    selection = selecting(3)
    selection.begin_prompt()
    seen = []
    for _ in range(8):
        selection.begin_token()
        seen.append(allowed(selection) is None)
        choose(selection, 0, e0=1, e1=1)
    assert seen == [True, False, False, True, False, False, True, False]


def test_zero_selects_after_each_prompt_and_never_else() -> None:
    selection = selecting(0)
    seen = []
    for _ in range(2):
        selection.begin_prompt()
        for _ in range(4):
            selection.begin_token()
            seen.append(allowed(selection) is None)
            choose(selection, 0, e0=1, e1=1)
    assert seen == [True, False, False, False] * 2


def test_shared_experts_are_always_in_the_set() -> None:
    selection = selecting(2, num_active=4, num_shared=2)
    selection.begin_prompt()
    choose(selection, 0, e4=9, e5=8, e6=7)
    selection.begin_token()
    choose(selection, 0, e7=1)
    selection.begin_token()
    assert allowed(selection) == [0, 1, 4, 7]


def test_what_was_chosen_lately_counts_more_than_what_was_long_ago() -> None:
    selection = selecting(8, num_active=3)
    selection.begin_prompt()
    choose(selection, 0, e5=20)
    for token in range(41):
        selection.begin_token()
        choose(selection, 0, **{"e1": 1, "e0" if token % 8 == 0 else "e2": 1})
    selection.begin_token()
    assert allowed(selection) == [0, 1, 2]


def test_reset_forgets_the_sequence() -> None:
    used, unused = selecting(2), selecting(2)
    used.begin_prompt()
    choose(used, 0, e5=20, e6=20)
    used.begin_token()
    choose(used, 0, e7=1)
    used.reset()
    for selection in (used, unused):
        selection.begin_prompt()
        choose(selection, 0, e3=1)
        selection.begin_token()
        choose(selection, 0, e1=1)
        selection.begin_token()
    assert allowed(used) == allowed(unused)


def test_splitting_a_prompt_changes_nothing() -> None:
    whole, pieces = selecting(2), selecting(2)
    whole.begin_prompt()
    choose(whole, 0, e2=3, e4=5, e5=1)
    for part in ({"e2": 2, "e4": 1}, {"e2": 1, "e4": 4, "e5": 1}):
        pieces.begin_prompt()
        choose(pieces, 0, **part)
    for selection in (whole, pieces):
        selection.begin_token()
        choose(selection, 0, e0=1)
        selection.begin_token()
    assert allowed(whole) == allowed(pieces)
