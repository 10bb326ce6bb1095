"""Operators that are split otherwise than along a letter of a rule.

Splits and joins along a split dimension, normalisation of groups of channels, and dropout.
"""

from __future__ import annotations

from onebox.graph.shard.placements import REPLICATE, Shard
from onebox.graph.shard.spmd import PerRank
from onebox.graph.shard.state import PlacementState
from onebox.wire import DType, Many, Operator, OwnDevice, SlotArgument, Value, reads


def along_blocks(placing: PlacementState, operator: Operator) -> bool:
    """Append an operator that divides a split dimension between blocks, or joins dimensions that are split alike.

    Queries, keys and values that are features of one tensor, split as three blocks, are separated without
    communication.

    Returns:
        Whether this is such an operator.
    """
    slots = reads(operator)
    native = next((n for n in (placing.native[slot] for slot in slots) if isinstance(n, Shard)), None)
    if native is None:
        return False
    if operator.name == "aten.slice.Tensor":
        return _slice(placing, operator, native)
    return (_join if operator.name == "aten.cat.default" else _split)(placing, operator, native)


def _split(placing: PlacementState, operator: Operator, native: Shard) -> bool:
    """Append a split: ``(x, size or sizes, dim)``."""
    if _dim(placing, operator, 2) != native.dim:
        return False
    lengths = [0 if spec is None else spec.shape[native.dim] for spec in operator.specs]
    told = operator.args[1]
    every = [told] if isinstance(told, int) else list(told.items) if isinstance(told, Many) else []
    if any(length % native.block for length in lengths) or any(int(size) % native.block for size in every):  # type: ignore[arg-type]
        return False
    blocks = [max(1, length // native.block) for length in lengths]
    local: list[Value] = []
    for share in native.sizes:
        parts = tuple(int(size) // native.block * share for size in every)  # type: ignore[arg-type]
        local.append(parts[0] if isinstance(told, int) else Many(parts))
    made = [Shard(native.dim, native.sizes, count) for count in blocks]
    placing.emit(operator, [native], made, fixed={1: PerRank(tuple(local))})
    return True


def _slice(placing: PlacementState, operator: Operator, native: Shard) -> bool:
    """Append a slice: ``(x, dim, start, end, step)``."""
    if _dim(placing, operator, 1) != native.dim or len(operator.args) > 4:
        return False
    length = placing.specs[reads(operator)[0]].shape[native.dim]
    start, end = (_bound(operator, position, length) for position in (2, 3))
    if start % native.block or end % native.block or start >= end:
        return False
    fixed = {
        2 + number: PerRank(tuple(bound // native.block * share for share in native.sizes))
        for number, bound in enumerate((start, end))
        if 2 + number < len(operator.args)
    }
    made = Shard(native.dim, native.sizes, (end - start) // native.block)
    placing.emit(operator, [native], [made], fixed=fixed)
    return True


def _bound(operator: Operator, position: int, length: int) -> int:
    """Return the start or the end of a slice."""
    value = operator.args[position] if position < len(operator.args) else None
    if not isinstance(value, int):
        return 0 if position == 2 else length
    return min(max(value + length if value < 0 else value, 0), length)


def _join(placing: PlacementState, operator: Operator, native: Shard) -> bool:
    """Append a concatenation ``(tensors, dim)``: blocks of one dimension if each is split as the first is."""
    slots = reads(operator)
    if _dim(placing, operator, 1) != native.dim:
        return False
    shards = [placing.native[slot] for slot in slots]
    alike = [Shard(native.dim, native.sizes, _blocks(placing, slot, native)) for slot in slots]
    sizes_fit = all(placing.specs[slot].shape[native.dim] % native.block == 0 for slot in slots)
    if not sizes_fit or any(b not in (a, REPLICATE, None) for a, b in zip(alike, shards, strict=True)):
        return False
    placing.emit(operator, alike, [Shard(native.dim, native.sizes, sum(shard.blocks for shard in alike))])
    return True


def _blocks(placing: PlacementState, slot: int, native: Shard) -> int:
    return placing.specs[slot].shape[native.dim] // native.block


def _dim(placing: PlacementState, operator: Operator, position: int) -> int:
    value = operator.args[position] if position < len(operator.args) else 0
    rank = len(placing.specs[reads(operator)[0]].shape)
    return int(value) % rank if isinstance(value, int) else 0


def dropout(placing: PlacementState, operator: Operator) -> bool:
    """Append dropout of a split tensor: every rank draws the mask of the whole, and keeps its share.

    So the mask is that of one device, whose draws depend on the shape and the seed alone.

    Returns:
        Whether this is such an operator.
    """
    native = placing.native[reads(operator)[0]]
    if not isinstance(native, Shard) or operator.args[2] is False:
        return False
    spec, (_, mask_spec) = placing.specs[reads(operator)[0]], operator.specs
    out, mask = operator.outs
    probability = operator.args[1]
    assert isinstance(probability, float | int)
    scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
    if mask_spec is None or mask is None or out is None:
        return False
    ones = placing.add(spec)
    args: tuple[Value, ...] = (Many(spec.shape),)
    device: dict[str, Value] = {"dtype": DType(spec.dtype), "device": OwnDevice()}
    placing.emit(Operator("aten.ones.default", args, device, (ones,), (spec,)), [], [REPLICATE])
    placing.spmd.relaid.add(ones)
    draw = (SlotArgument(ones), *operator.args[1:])
    drawn = Operator(operator.name, draw, {}, (None, mask), (None, mask_spec), (), operator.position)
    placing.emit(drawn, [REPLICATE], [REPLICATE, REPLICATE])
    placing.want(mask, native)
    placing.native[mask] = native
    kept = (operator.args[0], SlotArgument(mask), scale)
    name = "aten.native_dropout_backward.default"  # x * mask * scale, as dropout itself
    placing.emit(Operator(name, kept, {}, (out,), (operator.specs[0],)), [native, native], [native])
    return True


def group_norm(placing: PlacementState, operator: Operator) -> bool:
    """Append the normalisation of groups of channels, if every rank has whole groups.

    ``(x, weight, bias, samples, channels, pixels, groups, eps)`` to ``(y, mean, 1 / deviation)``.

    Returns:
        Whether every rank has whole groups.
    """
    shards = _groups(placing, operator, x=0, channels=4)
    if shards is None:
        return False
    x, each, groups, counts = shards
    wanted = [x, *[each] * (len(reads(operator)) - 1)]
    placing.emit(operator, wanted, [x, groups, groups], fixed=counts)
    return True


def group_norm_backward(placing: PlacementState, operator: Operator) -> bool:
    """Append its gradient.

    ``(gradient, x, mean, 1 / deviation, weight, samples, channels, pixels, groups, mask)`` to those of x, weight, bias.

    Returns:
        Whether every rank has whole groups.
    """
    shards = _groups(placing, operator, x=1, channels=6)
    if shards is None:
        return False
    x, each, groups, counts = shards
    wanted = [x, x, groups, groups, *[each] * (len(reads(operator)) - 4)]
    placing.emit(operator, wanted, [x, each, each], fixed=counts)
    return True


def _groups(
    placing: PlacementState, operator: Operator, *, x: int, channels: int
) -> tuple[Shard, Shard, Shard, dict[int, PerRank]] | None:
    """Return the splits of x, of a tensor with one number a channel and of one with one a group, and both counts."""
    native = placing.native[reads(operator)[x]]
    every, groups = operator.args[channels], operator.args[channels + 2]
    assert isinstance(every, int)
    assert isinstance(groups, int)
    length = every // groups
    if not isinstance(native, Shard) or native.dim != 1 or any(size % length for size in native.sizes):
        return None
    own = tuple(size // length for size in native.sizes)
    counts = {
        channels: PerRank(tuple(size * native.blocks for size in native.sizes)),
        channels + 2: PerRank(tuple(count * native.blocks for count in own)),
    }
    return native, native.at(0), Shard(1, own, native.blocks), counts


SPECIAL = {
    "aten.split.Tensor": along_blocks,
    "aten.split_with_sizes.default": along_blocks,
    "aten.slice.Tensor": along_blocks,
    "aten.cat.default": along_blocks,
    "aten.native_dropout.default": dropout,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
}
"""The special split function of each operator."""
