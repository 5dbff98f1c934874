"""Turns mlx-lm's own loading of a checkpoint into where in the files each element of a loaded array lies.

An architecture's `sanitize` renames, stacks, splits and transposes what a checkpoint holds. Instead of
knowing every naming in use, this file lets mlx-lm load the model from stand-ins without data, has MLX export
the graph of what it did, and follows that graph back: a loaded array is then one strided view of a file, or
several side by side. What is computed at load (a conversion, a product) is found to be so and named; nothing
is guessed. It reads no weights and does not know what an expert is.

Source: mx.export_function with a callback, mlx 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from spile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from spile.files.checkpoint import Tensor


@dataclass(frozen=True)
class View:
    """A strided view of one tensor of a file: element [i, j, ...] lies at offset + i * strides[0] + ..."""

    tensor: Tensor
    offset: int  # bytes from the start of the tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    itemsize: int
    negated: bool = False  # every element with its sign flipped (floating point)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in the file as they would in an array of this shape."""
        expected = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return not self.negated

    @property
    def span(self) -> int:
        """Bytes from the first to past the last element in the file."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return last + self.itemsize


@dataclass(frozen=True)
class Joined:
    """Arrays side by side along one axis."""

    parts: tuple[View | Joined, ...]
    axis: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Computed:
    """An array that is no view of what the files hold; `reason` says why."""

    reason: str
    shape: tuple[int, ...]


Origin = View | Joined | Computed


def trace(tensors: Mapping[str, Tensor], load: Callable[[Mapping[str, Any]], Sequence[Any]]) -> list[Origin]:
    """Return the origin of each array that `load` makes of stand-ins for the tensors. Reads no weights.

    Raises: UnsupportedModelError where MLX cannot say what `load` did.
    """
    import mlx.core as mx

    names = list(tensors)
    stand_ins = [mx.zeros(tensors[name].shape, dtype_of(tensors[name])) for name in names]
    records: list[dict[str, Any]] = []

    def run(*arrays: Any) -> list[Any]:
        return list(load(dict(zip(names, arrays, strict=True))))

    own = mx.contiguous, mx.eval, mx.async_eval
    mx.contiguous = lambda array, *rest, **named: array  # the same values; its graph node cannot be exported
    mx.eval = mx.async_eval = lambda *arrays: None  # stand-ins have no values
    try:
        mx.export_function(records.append, run, *stand_ins)
    except (ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"what mlx-lm does to this checkpoint's weights cannot be followed: {' '.join(str(error).split())}"
        ) from error
    finally:
        mx.contiguous, mx.eval, mx.async_eval = own
    return _follow(records, [tensors[name] for name in names])


def dtype_of(tensor: Tensor) -> Any:
    """Return the MLX dtype that mx.load gives a tensor of a file.

    Raises: UnsupportedModelError for one that MLX does not load.
    """
    import mlx.core as mx

    dtypes = {
        "BOOL": mx.bool_, "U8": mx.uint8, "I8": mx.int8, "U16": mx.uint16, "I16": mx.int16, "U32": mx.uint32,
        "I32": mx.int32, "U64": mx.uint64, "I64": mx.int64, "F16": mx.float16, "BF16": mx.bfloat16,
        "F32": mx.float32, "F64": mx.float64, "C64": mx.complex64, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
        "F8_E5M2": mx.uint8,
    }  # fmt: skip
    if tensor.dtype not in dtypes:
        raise UnsupportedModelError(f"tensor {tensor.name} has dtype {tensor.dtype}, which mlx does not load")
    return dtypes[tensor.dtype]


def _follow(records: Sequence[Mapping[str, Any]], tensors: Sequence[Tensor]) -> list[Origin]:
    origins: dict[str, Origin] = {}
    outputs: list[str] = []
    for record in records:
        kind = record["type"]
        if kind == "inputs":
            for (name, shape, dtype), tensor in zip(record["inputs"], tensors, strict=True):
                origins[name] = _whole(tensor, tuple(shape), dtype.size)
        elif kind == "constants":
            for name, array in record["constants"]:
                origins[name] = Computed("a constant of the code", tuple(array.shape))
        elif kind == "outputs":
            outputs = [name for name, _, _ in record["outputs"]]
            shapes = {name: tuple(shape) for name, shape, _ in record["outputs"]}
        elif kind == "primitive":
            for (name, _, _), origin in zip(record["outputs"], _apply(record, origins), strict=True):
                origins[name] = origin
    missing = Computed("not of the checkpoint", ())
    return [origins.get(name, replace(missing, shape=shapes[name])) for name in outputs]


def _whole(tensor: Tensor, shape: tuple[int, ...], itemsize: int) -> View:
    return View(tensor, 0, shape, _dense_strides(shape, itemsize), itemsize)


def _dense_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, stride = [], itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def _apply(record: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[Origin]:
    """Work out the outputs of one primitive."""
    name, arguments = record["name"], record["arguments"]
    shapes = [tuple(shape) for _, shape, _ in record["outputs"]]
    inputs = [
        origins.get(key, Computed("not of the checkpoint", tuple(shape)))
        for key, shape, _ in record["inputs"]
    ]
    rule = _RULES.get(name)
    if name not in ("Concatenate", "Split") and (rule is None or len(inputs) != 1):
        return [Computed(f"computed at load ({name})", shape) for shape in shapes]
    for origin in inputs:
        if isinstance(origin, Computed):
            return [replace(origin, shape=shape) for shape in shapes]
    if name == "Concatenate":
        return [_join([o for o in inputs if not isinstance(o, Computed)], arguments[0], shapes[0])]
    if name == "Split":
        return _split(inputs[0], arguments[0], arguments[1], shapes)
    assert rule is not None
    sizes = [dtype.size for _, _, dtype in record["outputs"]]
    return [rule(inputs[0], arguments, shapes[0], sizes[0])]


def _map(
    joined: Joined, change: Callable[[View | Joined], Origin], axis: int, shape: tuple[int, ...]
) -> Origin:
    """Change every part alike; the parts then lie along `axis`."""
    parts = []
    for part in joined.parts:
        changed = change(part)
        if isinstance(changed, Computed):
            return replace(changed, shape=shape)
        parts.append(changed)
    return _join(parts, axis, shape)


def _join(parts: Sequence[View | Joined], axis: int, shape: tuple[int, ...]) -> Origin:
    return parts[0] if len(parts) == 1 else Joined(tuple(parts), axis % len(shape), shape)


def _same(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    return origin


def _convert(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    return Computed(f"converted at load to {str(arguments[0]).removeprefix('mlx.core.')}", shape)


def _negate(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    if isinstance(origin, Joined):
        return _map(origin, lambda part: _negate(part, arguments, part.shape, itemsize), origin.axis, shape)
    assert isinstance(origin, View)
    if not origin.tensor.dtype.startswith(("F", "BF")):
        return Computed("computed at load (Negative)", shape)
    return replace(origin, negated=not origin.negated)


def _reshape(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    """Give another shape; of a strided view only where no element has to move."""
    if isinstance(origin, Joined):
        return _reshape_joined(origin, shape, itemsize)
    assert isinstance(origin, View)
    strides = _reshaped_strides(origin, shape)
    if strides is None:
        return Computed("reordered at load (a reshape of a transposed array)", shape)
    return replace(origin, shape=shape, strides=strides)


def _reshape_joined(joined: Joined, shape: tuple[int, ...], itemsize: int) -> Origin:
    """Only where the axis of the parts, and all before it, stay or gain and lose ones."""
    before = joined.shape[: joined.axis + 1]
    axis, seen = 0, 1
    for axis, size in enumerate(shape):  # noqa: B007
        seen *= size
        if seen == prod(before):
            break
    tail = shape[axis + 1 :]
    head = shape[: axis + 1]
    if prod(head) != prod(before) or [n for n in head if n != 1] != [n for n in before if n != 1]:
        return Computed("reordered at load (a reshape across joined arrays)", shape)

    def change(part: View | Joined) -> Origin:
        return _reshape(part, None, (*head[:-1], part.shape[joined.axis], *tail), itemsize)

    if head[-1] != joined.shape[joined.axis]:
        return Computed("reordered at load (a reshape across joined arrays)", shape)
    return _map(joined, change, axis, shape)


def _reshaped_strides(view: View, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of a view under another shape, None where there are none (as NumPy's no-copy reshape)."""
    old = [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size != 1]
    runs: list[tuple[int, int]] = []  # (elements, stride of the last) of stretches that can be regrouped
    for size, stride in old:
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    strides: list[int] = []
    left, step = runs.pop() if runs else (1, view.itemsize)
    for size in reversed(shape):
        if size == 1:
            strides.append(step)
            continue
        if left == 1:
            if not runs:
                return None
            left, step = runs.pop()
        if left % size:
            return None
        strides.append(step)
        left, step = left // size, step * size
    return tuple(reversed(strides)) if left == 1 and not runs else None


def _transpose(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    order = list(arguments[0])
    if isinstance(origin, Joined):
        axis = order.index(origin.axis)

        def change(part: View | Joined) -> Origin:
            return _transpose(part, arguments, tuple(part.shape[i] for i in order), itemsize)

        return _map(origin, change, axis, shape)
    assert isinstance(origin, View)
    return replace(origin, shape=shape, strides=tuple(origin.strides[axis] for axis in order))


def _slice(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    start, _, steps = (list(values) for values in arguments[:3])
    return take(origin, start, steps, shape)


def take(origin: Origin, start: Sequence[int], steps: Sequence[int], shape: tuple[int, ...]) -> Origin:
    """Return the part of `shape` from `start` on, every `steps`-th element."""
    if isinstance(origin, Computed):
        return replace(origin, shape=shape)
    if isinstance(origin, View):
        offset = origin.offset + sum(at * stride for at, stride in zip(start, origin.strides, strict=True))
        strides = tuple(step * stride for step, stride in zip(steps, origin.strides, strict=True))
        return replace(origin, offset=offset, shape=shape, strides=strides)
    axis, first, parts = origin.axis, 0, []
    if steps[axis] < 1:
        return Computed("reordered at load (a reversed slice of joined arrays)", shape)
    last = start[axis] + (shape[axis] - 1) * steps[axis]
    for part in origin.parts:
        end = first + part.shape[axis]
        begin = start[axis]
        if begin < first:
            begin += -(-(first - begin) // steps[axis]) * steps[axis]
        if begin <= min(last, end - 1):
            count = (min(last, end - 1) - begin) // steps[axis] + 1
            inner = [at if i != axis else begin - first for i, at in enumerate(start)]
            piece = take(part, inner, steps, tuple(count if i == axis else n for i, n in enumerate(shape)))
            if isinstance(piece, Computed):
                return replace(piece, shape=shape)
            parts.append(piece)
        first = end
    return _join(parts, axis, shape) if parts else Computed("empty", shape)


def _split(origin: Origin, at: Sequence[int], axis: int, shapes: Sequence[tuple[int, ...]]) -> list[Origin]:
    starts = [0, *at]
    rank = len(origin.shape)
    return [
        take(origin, [start if i == axis % rank else 0 for i in range(rank)], [1] * rank, shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]


def _broadcast(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    missing = len(shape) - len(origin.shape)
    if isinstance(origin, Joined):
        axis = origin.axis + missing
        if shape[axis] != origin.shape[origin.axis]:
            return Computed("computed at load (Broadcast)", shape)

        def change(part: View | Joined) -> Origin:
            wanted = tuple(part.shape[origin.axis] if i == axis else n for i, n in enumerate(shape))
            return _broadcast(part, arguments, wanted, itemsize)

        return _map(origin, change, axis, shape)
    assert isinstance(origin, View)
    strides = [0] * missing + [
        0 if size == 1 and wanted != 1 else stride
        for size, wanted, stride in zip(origin.shape, shape[missing:], origin.strides, strict=True)
    ]
    return replace(origin, shape=shape, strides=tuple(strides))


def _view(origin: Origin, arguments: Any, shape: tuple[int, ...], itemsize: int) -> Origin:
    """The same bytes as another dtype."""
    if isinstance(origin, Joined):
        if origin.axis == len(shape) - 1 and shape != origin.shape:
            return Computed("reordered at load (a view across joined arrays)", shape)
        return _map(
            origin,
            lambda part: _view(part, arguments, (*part.shape[:-1], shape[-1]), itemsize),
            origin.axis,
            shape,
        )
    assert isinstance(origin, View)
    if origin.negated:
        return Computed("computed at load (Negative)", shape)
    if itemsize == origin.itemsize:
        return origin
    if origin.strides[-1] != origin.itemsize:
        return Computed("reordered at load (a view of a transposed array)", shape)
    return replace(origin, shape=shape, strides=(*origin.strides[:-1], itemsize), itemsize=itemsize)


_RULES: Mapping[str, Callable[[Any, Any, tuple[int, ...], int], Origin]] = {
    "ExpandDims": _reshape,
    "Squeeze": _reshape,
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Unflatten": _reshape,
    "Transpose": _transpose,
    "Slice": _slice,
    "Broadcast": _broadcast,
    "View": _view,
    "AsType": _convert,
    "Negative": _negate,
    "Copy": _same,
    "Contiguous": _same,
    "StopGradient": _same,
}
