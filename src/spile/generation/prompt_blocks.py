"""Keys and values of earlier prompts, kept in memory: blocks of 128 positions in a tree, within so many bytes.
Where states can go on only from multiples of a step, a block has that many.

A block is found by its tokens and by the block before it, so prompts that begin alike share what they have in
common. What a block holds of full layers serves every later prompt that begins so. What it holds of sliding
layers is of use where a prompt can be cut: the next token sees a whole window of them. So the windows before
useful cuts are kept apart from others, which are the first to go and only take room that nothing else wants.
Then goes what was used least lately, the ends of prompts before their beginnings. A state that lives on may
keep its full layers itself; then blocks hold sliding layers alone.

It does not know engines beyond their states' interface, nor text or files.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spile.engines.base import CopyableState, LayerKind

BLOCK = 128  # positions
# Positions that are kept beyond a window: the next prompt may leave this one a little before its end, where a
# template begins an answer in other words than it repeats it.
SLACK = 16
_NODE_NBYTES = 2048  # of a block's Python objects and token ids, and its parts' (measured: 1.6 kB)

Ids = NDArray[np.int32]


class Cut(NamedTuple):
    """How much of a prompt is there, and the blocks that hold it."""

    position: int
    oldest: int  # position from which sliding layers are there
    blocks: tuple[Block, ...]


class Part:
    """The layers of one kind of a block's positions, in memory of its own that goes back to the system."""

    def __init__(self, row_nbytes: Sequence[int], num_positions: int) -> None:
        self.nbytes = part_nbytes(row_nbytes, num_positions)
        data = np.frombuffer(mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON), np.uint8)
        self.layers: list[NDArray[np.uint8]] = []
        at = 0
        for row in row_nbytes:
            self.layers.append(data[at : at + num_positions * row].reshape(num_positions, row))
            at += num_positions * row


class Block:
    """Up to so many positions; only a whole block has blocks after it."""

    def __init__(self, parent: Block | None, start: int, token_ids: Ids) -> None:
        self.parent = parent
        self.start = start
        self.token_ids = token_ids
        self.children: list[Block] = []
        self.full: Part | None = None
        self.sliding: Part | None = None
        self.full_used = self.sliding_used = 0

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class PromptBlocks:
    """The tree. `nbytes` never exceeds the budget, nor does what it takes from the system."""

    def __init__(self, budget_nbytes: int, hold: Callable[[int], None] = lambda nbytes: None) -> None:
        """`hold` is told of the bytes that are in use, before there are more and when there are fewer."""
        self.budget_nbytes = budget_nbytes
        self.nbytes = 0
        self._hold = hold
        self._root = Block(None, 0, np.empty(0, np.int32))
        self._now = 0
        # In the order of use, and within one use the ends before the beginnings.
        self._full: OrderedDict[Block, None] = OrderedDict()
        self._kept: OrderedDict[Block, None] = OrderedDict()
        self._spare: OrderedDict[Block, None] = OrderedDict()

    def find(self, token_ids: Ids, window: int | None, num_held: int = 0, step: int = 1) -> Cut:
        """Return the longest beginning that can be restored; into a state that holds the full layers of the
        first `num_held` of these tokens, if such a one is at hand.
        """
        size = block_size(step)
        path: list[tuple[Block, int]] = []  # and how many of its tokens are those of the prompt
        block, at, num_full = self._root, 0, 0
        while at < len(token_ids):
            child, common = self._closest(block, token_ids[at : at + size])
            if child is None or not common:
                break
            path.append((child, common))
            if child.full is not None and num_full == at:
                num_full = at + common
            at += common
            if common < size:
                break
            block = child
        most = max(num_full, min(num_held, at))
        if window is None:
            position = oldest = most // step * step
        else:
            spans = ((one.start, one.start + common, one.sliding is not None) for one, common in path)
            position, oldest = last_cut(spans, most, window, step)
        blocks = tuple(child for child, _ in path if child.start < position)
        return Cut(position, oldest, blocks)

    def load(self, cut: Cut, state: CopyableState, *, is_held: bool) -> None:
        """Put what was found into a new state, or into one whose full layers are held."""
        if not is_held:
            for block in cut.blocks:
                assert block.full is not None, "found with its full layers"
                count = min(block.end, cut.position) - block.start
                state.write("full", block.start, (layer[:count] for layer in block.full.layers))
        for block in cut.blocks:
            first, last = max(block.start, cut.oldest), min(block.end, cut.position)
            if state.window is not None and first < last:
                assert block.sliding is not None, "found with its sliding layers"
                rows = slice(first - block.start, last - block.start)
                state.write("sliding", first, (layer[rows] for layer in block.sliding.layers))
        state.restore(cut.position, cut.oldest)
        self._now += 1
        self._use(cut.blocks)
        for block in cut.blocks:
            if block.sliding is not None and block.end > cut.oldest:
                self._keep(block)

    def store(self, token_ids: Ids, state: CopyableState, cuts: Sequence[int], *, is_held: bool) -> int:
        """Keep what a state holds of these tokens, as far as there is room: with the windows before `cuts`,
        the first first, and those of other positions where nothing else wants the room. `is_held`: without
        full layers. Return how many positions are kept, from the first on.
        """
        self._now += 1
        path = self._grow(token_ids[: state.num_reusable], state, is_held)
        if not path:
            return 0
        end = path[-1].end
        if state.window is not None:
            # Where there is no room for more, this is the last chance to keep what makes it of use.
            wanted = [*cuts, end] if end < state.num_reusable else cuts
            for cut in dict.fromkeys(min(cut, end) for cut in wanted):
                self._keep_window(path, cut, state)
            for block in path:
                if (
                    block.sliding is None
                    and block.end <= state.num_reusable
                    and state.has("sliding", block.start)
                ):
                    self._add_sliding(block, state, is_spare=True)
        self._now += 1  # nothing is in use any more
        self._prune(path[-1])
        self._hold(self.nbytes)
        return end

    def clear(self) -> None:
        """Forget everything."""
        left = [self._root]
        while left:  # one by one: in a ring of references memory would stay until the next collection
            block = left.pop()
            left += block.children
            block.full = block.sliding = block.parent = None
            block.children = []
        for blocks in (self._full, self._kept, self._spare):
            blocks.clear()
        self.nbytes = 0
        self._hold(0)

    def _closest(self, parent: Block, token_ids: Ids) -> tuple[Block | None, int]:
        """Return the child with the longest common beginning; of equals one that can be cut."""
        best: tuple[int, bool, Block | None] = (0, False, None)
        for child in parent.children:
            common = num_common(child.token_ids, token_ids)
            if (common, child.sliding is not None) > best[:2]:
                best = common, child.sliding is not None, child
        return best[2], best[0]

    def _grow(self, token_ids: Ids, state: CopyableState, is_held: bool) -> list[Block]:
        """Return the blocks of these tokens from the first on; what is missing is added while there is room
        for it and for a window besides.
        """
        path: list[Block] = []
        taken = 0
        parent = self._root
        size = block_size(state.step)
        for start in range(0, len(token_ids), size):
            wanted = token_ids[start : start + size]
            child, common = self._closest(parent, wanted)
            was_kept = False
            if child is not None and common < len(wanted):
                is_shorter = common == len(child.token_ids)
                if is_shorter and (child.sliding is None or state.has("sliding", start)):
                    was_kept = child in self._kept
                    self._drop(child)  # another takes its place that goes on from it
                child = None
            if child is None or (child.full is None and not is_held):
                if child is not None and child.end > state.num_reusable:
                    break  # the state has not all of it
                count = len(wanted) if child is None else len(child.token_ids)
                nbytes = _NODE_NBYTES if child is None else 0
                nbytes += 0 if is_held else part_nbytes(state.row_nbytes("full"), count)
                self._use(path if child is None else [*path, child])
                if not self._fits(taken, count, state, is_held) or not self._make_room(
                    nbytes, is_spare=False
                ):
                    break
                if child is None:
                    child = Block(parent, start, wanted.copy())
                    child.full_used = self._now
                    parent.children.append(child)
                    self.nbytes += _NODE_NBYTES
                if not is_held:
                    child.full = self._read("full", child, state)
                if was_kept:
                    self._add_sliding(child, state, is_spare=False)
            child.full_used = self._now
            for other in self._beginnings(child):
                self._drop(other)
            taken += _NODE_NBYTES + (child.full.nbytes if child.full is not None else 0)
            path.append(child)
            parent = child
        self._use(path)
        return path

    def _beginnings(self, block: Block) -> list[Block]:
        """Return the blocks that this one goes on from and that hold nothing more than it does."""
        assert block.parent is not None, "not the root"
        return [
            other
            for other in block.parent.children
            if other is not block
            and other.sliding is None
            and num_common(other.token_ids, block.token_ids) == len(other.token_ids)
        ]

    def _fits(self, taken: int, count: int, state: CopyableState, is_held: bool) -> bool:
        """Whether so many positions fit beside what their prompt has taken, and a window beside both."""
        nbytes = _NODE_NBYTES + (0 if is_held else part_nbytes(state.row_nbytes("full"), count))
        return taken + nbytes + self._window_nbytes(state) <= self.budget_nbytes

    def _use(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            block.full_used = self._now
            if block.full is not None:
                self._full[block] = None
                self._full.move_to_end(block)

    def _keep_window(self, path: Sequence[Block], cut: int, state: CopyableState) -> None:
        """Keep the sliding layers that the token at `cut` sees, all or none."""
        assert state.window is not None, "sliding layers"
        oldest = max(0, cut - state.window + 1)
        blocks = [block for block in path if block.end > oldest and block.start < cut]
        before = next((block for block in path if block.end == blocks[0].start), None)
        if before is not None and before.end > oldest - SLACK and state.has("sliding", before.start):
            blocks.append(before)  # last: the window does without
        missing = [block for block in blocks if block.sliding is None]
        if not all(
            block.end <= state.num_reusable and state.has("sliding", block.start) for block in missing
        ):
            return
        for block in blocks:
            if block.sliding is not None:
                self._keep(block)
        for block in missing:
            if not self._add_sliding(block, state, is_spare=False):
                return

    def _keep(self, block: Block) -> None:
        block.sliding_used = self._now
        self._spare.pop(block, None)
        self._kept[block] = None
        self._kept.move_to_end(block)

    def _add_sliding(self, block: Block, state: CopyableState, *, is_spare: bool) -> bool:
        nbytes = part_nbytes(state.row_nbytes("sliding"), len(block.token_ids))
        if not self._make_room(nbytes, is_spare=is_spare):
            return False
        block.sliding = self._read("sliding", block, state)
        block.sliding_used = self._now
        (self._spare if is_spare else self._kept)[block] = None
        return True

    def _read(self, kind: LayerKind, block: Block, state: CopyableState) -> Part:
        part = Part(state.row_nbytes(kind), len(block.token_ids))
        for layer, rows in zip(part.layers, state.read(kind, block.start, block.end), strict=True):
            layer[:] = rows
        self.nbytes += part.nbytes
        return part

    def _make_room(self, nbytes: int, is_spare: bool) -> bool:
        """Evict until so many bytes are free; nothing that is in use now, and for spare ones spare ones."""
        while self.nbytes + nbytes > self.budget_nbytes:
            if self._spare:
                block = next(iter(self._spare))
                if is_spare and block.sliding_used == self._now:
                    return False
                self._drop_sliding(block)
                continue
            if is_spare:
                return False
            oldest_kept = next(iter(self._kept), None)
            oldest_full = next(iter(self._full), None)
            if oldest_kept is not None and (
                oldest_full is None or oldest_kept.sliding_used <= oldest_full.full_used
            ):
                if oldest_kept.sliding_used == self._now:
                    return False
                self._drop_sliding(oldest_kept)
            elif oldest_full is not None and oldest_full.full_used != self._now:
                self._drop(oldest_full)
            else:
                return False
        self._hold(self.nbytes + nbytes)
        return True

    def _drop_sliding(self, block: Block) -> None:
        assert block.sliding is not None, "a block with sliding layers"
        self._spare.pop(block, None)
        self._kept.pop(block, None)
        self.nbytes -= block.sliding.nbytes
        block.sliding = None
        self._prune(block)

    def _drop(self, block: Block) -> None:
        """Forget a block's full layers, and all of it where no block comes after."""
        if block.full is not None:
            self._full.pop(block, None)
            self.nbytes -= block.full.nbytes
            block.full = None
        if not block.children:
            block.full_used = 0
            if block.sliding is not None:
                self._drop_sliding(block)
            else:
                self._prune(block)

    def _prune(self, block: Block) -> None:
        """Remove a block that holds nothing, and those before it that held nothing but the way to it."""
        while (
            block.parent is not None
            and not block.children
            and block.full is None
            and block.sliding is None
            and block.full_used != self._now
        ):
            block.parent.children.remove(block)
            self.nbytes -= _NODE_NBYTES
            block = block.parent

    def _window_nbytes(self, state: CopyableState) -> int:
        if state.window is None:
            return 0
        size = block_size(state.step)
        return (-(-(state.window - 1) // size) + 1) * part_nbytes(state.row_nbytes("sliding"), size)


def block_size(step: int) -> int:
    """Return the positions of a whole block of states with such a step."""
    return BLOCK if step == 1 else step


def part_nbytes(row_nbytes: Sequence[int], num_positions: int) -> int:
    """Return the bytes that so many positions take from the system: whole pages."""
    return max(1, -(-sum(row_nbytes) * num_positions // mmap.PAGESIZE)) * mmap.PAGESIZE


def num_common(left: Ids, right: Ids) -> int:
    """Return the length of the longest beginning that two arrays of ids share."""
    count = min(len(left), len(right))
    differs = left[:count] != right[:count]
    return int(differs.argmax()) if differs.any() else count


def last_cut(
    spans: Iterable[tuple[int, int, bool]], most: int, window: int, step: int = 1
) -> tuple[int, int]:
    """Return the last multiple of `step`, up to `most`, at which the next token sees its whole window, and from
    where on to restore it: from the beginning of a block, so that the state can give whole blocks again. `spans`
    are (start, end, whether sliding layers are there), one after the other from 0 on.
    """
    size = block_size(step)
    best = (0, 0)
    first: int | None = None  # of an unbroken run of sliding layers
    for start, end, has_sliding in spans:
        if not has_sliding:
            first = None
            continue
        first = start if first is None else first
        position = min(end, most) // step * step
        seen = max(0, position - window + 1)
        if seen >= first and position > best[0]:
            best = position, max(first, seen // size * size)
    return best
