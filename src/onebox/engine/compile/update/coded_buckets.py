"""Coded buckets: the sum of gradients over a group in a lossy codec with error feedback. Pure.

With ``bf16``, ``int8`` and ``e3m0`` each member adds what its codec lost in earlier steps to its gradients, encodes the
sum, and keeps what is lost now (Seide, Fu, Droppo, Li and Yu, 1-bit stochastic gradient descent, 2014; Karimireddy,
Rebjock, Stich and Jaggi, Error feedback fixes SignSGD, 2019, arXiv:1901.09847). The encoded values are divided into one
slice for each member, which receives that slice of all members, sums them in the order of the ranks, and encodes the
sum likewise, with a residual of its own (Tang, Yu, Lian, Zhang and Liu, DoubleSqueeze, 2019, arXiv:1905.05957). All
members then gather the encoded sums: they hold the same bits, rounded twice whatever their number, and each link
carries ``2 (n - 1) / n`` of the encoded bytes, as in a ring. Where one member needs the sum, it receives everything and
nothing is encoded again.

Where a sum has time to travel, all members gather what each has encoded, and sum it themselves: values are rounded once
and nothing waits for a sum of slices, but ``n - 1`` times the encoded bytes go over each link.

With ``powersgd`` matrices are projected onto thin ones, which are summed exactly, twice in a step; vectors travel with
the first of these sums (Vogels, Karimireddy and Jaggi, 2019, arXiv:1905.13727, algorithms 1 and 2). A member's residual
is what the product with its own second thin matrix lacks. All members compute the same from the same sums: with bits
that agree where their devices are alike.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import prod
from zlib import crc32

from onebox.engine.compile.routine import InstructionLabel, RoutineBuilder
from onebox.engine.partition.gradient_buckets import CodecState
from onebox.engine.partition.sharding_spec import Members
from onebox.graph import decode_bucket, encode_bucket, factor, project, recode_sum, restore
from onebox.plan_names import GradientCodec
from onebox.wire import Program, TensorSpec
from onebox.wire.gradient_codecs import BLOCK, RANK, encoded_spec, matrix_of, padded_elements
from onebox.wire.protocol.instructions import Free, Gather, Receive, Reduce, Send

_CHANNEL = 1 << 20
"""Channel of encoded slices; channels of values between stages count from 0."""

GATHER_LABEL = "gather coded gradients"
"""Label of encoded values that all members gather."""

Phase = Callable[[], None]


class CodedBucket(ABC):
    """A bucket that is summed in a codec: its programs, and its buffers, which have the same numbers on all members.

    Args:
        members: The group.
        owner: The only member that receives the sum; ``None`` for all.
    """

    def __init__(self, members: Members, owner: int | None) -> None:
        self.members = members
        self.owner = owner

    @abstractmethod
    def state(self, worker: int) -> Mapping[int, CodecState]:
        """Return the buffers that a worker keeps from step to step."""

    @abstractmethod
    def phases(self, builder: RoutineBuilder, worker: int, group: int, buffers: Sequence[int]) -> list[Phase]:
        """Return the phases of the sum on one member, each of which waits for the one before on the other members.

        There are three, or two where sums are not encoded again.

        Args:
            builder: The member's routine.
            worker: The member.
            group: Number of the group.
            buffers: The gradients; they become the sums, or end where another member receives these.
        """


class QuantizedBucket(CodedBucket):
    """A bucket that is summed as bf16, int8 or e3m0.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        specs: Specs of the gradients.
        members: The group.
        owner: The only member that receives the sum; ``None`` for all.
        new: Returns an unused number.
    """

    def __init__(
        self,
        codec: GradientCodec,
        specs: Sequence[TensorSpec],
        members: Members,
        owner: int | None,
        new: Callable[[], int],
    ) -> None:
        super().__init__(members, owner)
        self._codec = codec
        self._specs = specs
        self._count = 1 if owner is not None else len(members)
        padded = padded_elements(sum(prod(spec.shape) for spec in specs), self._count)
        self._elements = padded // self._count
        self._slice = encoded_spec(codec, self._elements)
        self._residual, self._sum_residual = new(), new()
        self._slices = [new() for _ in range(self._count)]
        self._received = [new() for _ in members]
        self._summed, self._gathered = new(), new()

    def state(self, worker: int) -> Mapping[int, CodecState]:
        if worker not in self.members:
            return {}
        rows, dtype = self._elements // BLOCK, self._specs[0].dtype
        found = {self._residual: CodecState(TensorSpec(dtype, (rows * self._count, BLOCK)))}
        if self.owner is None:
            found[self._sum_residual] = CodecState(TensorSpec(dtype, (rows, BLOCK)))
        return found

    @functools.cached_property
    def _encode(self) -> Program:
        return encode_bucket(self._codec, self._specs, self._count)

    @functools.cached_property
    def _recode(self) -> Program:
        return recode_sum(self._codec, self._specs[0].dtype, self._elements, len(self.members))

    @functools.cached_property
    def _decode(self) -> Program:
        count = 1 if self.owner is None else len(self.members)
        return decode_bucket(self._codec, self._specs, self._count, count)

    def phases(self, builder: RoutineBuilder, worker: int, group: int, buffers: Sequence[int]) -> list[Phase]:
        rank = self.members.index(worker)
        if self.owner is not None:
            return [
                lambda: self._collect(builder, rank, group, buffers),
                lambda: self._sum(builder, rank, buffers),
            ]
        return [
            lambda: self._scatter(builder, rank, group, buffers),
            lambda: self._gather(builder, rank, group),
            lambda: self._finish(builder, buffers),
        ]

    def _encoding(self, builder: RoutineBuilder, buffers: Sequence[int]) -> None:
        given = [*buffers, self._residual]
        made = [*self._slices, builder.renew(self._residual)]
        builder.call(self._encode, given, made, InstructionLabel("encode"), takes=range(len(buffers)))

    def _send(self, builder: RoutineBuilder, group: int, number: int, peer: int) -> None:
        label = InstructionLabel(
            "send of coded gradients", "transfer", target=self.members[peer], size_bytes=self._slice.size_bytes
        )
        builder.add(Send(number, group, peer, _CHANNEL), label)

    def _receive(self, builder: RoutineBuilder, group: int, peer: int) -> None:
        label = InstructionLabel("receive coded gradients", "transfer")
        builder.add(Receive(self._received[peer], self._slice, group, peer, _CHANNEL), label)

    def _scatter(self, builder: RoutineBuilder, rank: int, group: int, buffers: Sequence[int]) -> None:
        """Encode, send each other member its slice, and begin to receive this one's."""
        self._encoding(builder, buffers)
        others = [(rank + turn) % self._count for turn in range(1, self._count)]
        for peer in others:
            self._send(builder, group, self._slices[peer], peer)
        for peer in reversed(others):
            self._receive(builder, group, peer)
        builder.add(Free(tuple(self._slices[peer] for peer in others)), InstructionLabel("free"))

    def _gather(self, builder: RoutineBuilder, rank: int, group: int) -> None:
        """Sum this member's slice, and begin to gather all sums."""
        slices = [*self._received[:rank], self._slices[rank], *self._received[rank + 1 :]]
        given, made = [*slices, self._sum_residual], [self._summed, builder.renew(self._sum_residual)]
        builder.call(self._recode, given, made, InstructionLabel("sum coded"), takes=range(len(slices)))
        rows, width = self._slice.shape
        whole = TensorSpec(self._slice.dtype, (rows * self._count, width))
        gather = Gather(self._summed, self._gathered, whole, group, (rows,) * self._count)
        builder.add(gather, InstructionLabel(GATHER_LABEL, "transfer"))

    def _finish(self, builder: RoutineBuilder, buffers: Sequence[int]) -> None:
        """Decode the sums."""
        builder.call(self._decode, [self._gathered], buffers, InstructionLabel("decode"), takes=(0,))
        builder.add(Free((self._summed,)), InstructionLabel("free"))

    def _collect(self, builder: RoutineBuilder, rank: int, group: int, buffers: Sequence[int]) -> None:
        """Encode, and send everything to the owner."""
        self._encoding(builder, buffers)
        assert self.owner is not None
        owner = self.members.index(self.owner)
        if rank != owner:
            self._send(builder, group, self._slices[0], owner)
            builder.add(Free((self._slices[0],)), InstructionLabel("free"))
            return
        for peer in range(len(self.members)):
            if peer != rank:
                self._receive(builder, group, peer)

    def _sum(self, builder: RoutineBuilder, rank: int, buffers: Sequence[int]) -> None:
        """Decode and sum everything, at the owner."""
        if self.members[rank] == self.owner:
            given = [*self._received[:rank], self._slices[0], *self._received[rank + 1 :]]
            builder.call(self._decode, given, buffers, InstructionLabel("decode"), takes=range(len(given)))


class GatheredBucket(CodedBucket):
    """A bucket whose encoded parts all members gather and sum: the first phase waits for nothing.

    Args:
        codec: ``bf16``, ``int8`` or ``e3m0``.
        specs: Specs of the gradients.
        members: The group.
        new: Returns an unused number.
    """

    def __init__(
        self, codec: GradientCodec, specs: Sequence[TensorSpec], members: Members, new: Callable[[], int]
    ) -> None:
        super().__init__(members, None)
        self._codec = codec
        self._specs = specs
        self._elements = padded_elements(sum(prod(spec.shape) for spec in specs), 1)
        self._part = encoded_spec(codec, self._elements)
        self._residual, self._own, self._gathered = new(), new(), new()

    def state(self, worker: int) -> Mapping[int, CodecState]:
        if worker not in self.members:
            return {}
        return {self._residual: CodecState(TensorSpec(self._specs[0].dtype, (self._elements // BLOCK, BLOCK)))}

    @functools.cached_property
    def _encode(self) -> Program:
        return encode_bucket(self._codec, self._specs, 1)

    @functools.cached_property
    def _decode(self) -> Program:
        return decode_bucket(self._codec, self._specs, 1, len(self.members), joined=True)

    def phases(self, builder: RoutineBuilder, worker: int, group: int, buffers: Sequence[int]) -> list[Phase]:
        return [lambda: self._gather(builder, group, buffers), lambda: self._sum(builder, buffers)]

    def _gather(self, builder: RoutineBuilder, group: int, buffers: Sequence[int]) -> None:
        """Encode, and begin to gather the encoded parts of all members."""
        given, made = [*buffers, self._residual], [self._own, builder.renew(self._residual)]
        builder.call(self._encode, given, made, InstructionLabel("encode"), takes=range(len(buffers)))
        (rows, width), count = self._part.shape, len(self.members)
        whole = TensorSpec(self._part.dtype, (rows * count, width))
        label = InstructionLabel(GATHER_LABEL, "transfer", size_bytes=self._part.size_bytes)
        builder.add(Gather(self._own, self._gathered, whole, group, (rows,) * count), label)

    def _sum(self, builder: RoutineBuilder, buffers: Sequence[int]) -> None:
        """Decode and sum the parts, in the order of the members."""
        builder.call(self._decode, [self._gathered], buffers, InstructionLabel("decode"), takes=(0,))
        builder.add(Free((self._own,)), InstructionLabel("free"))


class LowRankBucket(CodedBucket):
    """A bucket whose matrices are summed by PowerSGD, with the thin matrices of a step as the start of the next one.

    Args:
        specs: Specs of the gradients, by name.
        members: The group.
        owner: The only member that receives the sum; ``None`` for all.
        new: Returns an unused number.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], members: Members, owner: int | None, new: Callable[[], int]
    ) -> None:
        super().__init__(members, owner)
        self._places = [place for place, spec in enumerate(specs.values()) if matrix_of(spec.shape) is not None]
        self._specs = [spec for spec in specs.values() if matrix_of(spec.shape) is not None]
        self._seeds = [crc32(name.encode()) for name, spec in specs.items() if matrix_of(spec.shape) is not None]
        self._lost, self._second, self._first, self._matrices = ([new() for _ in self._specs] for _ in range(4))

    def state(self, worker: int) -> Mapping[int, CodecState]:
        found: dict[int, CodecState] = {}
        if worker in self.members:
            for lost, second, spec, seed in zip(self._lost, self._second, self._specs, self._seeds, strict=True):
                matrix = matrix_of(spec.shape)
                assert matrix is not None
                found[lost] = CodecState(TensorSpec(spec.dtype, matrix))
                found[second] = CodecState(TensorSpec(spec.dtype, (matrix[1], RANK)), seed)
        return found

    @functools.cached_property
    def _project(self) -> Program:
        return project(self._specs)

    @functools.cached_property
    def _factor(self) -> Program:
        return factor(self._specs)

    @functools.cached_property
    def _restore(self) -> Program:
        return restore(self._specs)

    def phases(self, builder: RoutineBuilder, worker: int, group: int, buffers: Sequence[int]) -> list[Phase]:
        return [
            lambda: self._begin(builder, group, buffers),
            lambda: self._sum(builder, group),
            lambda: self._finish(builder, worker, buffers),
        ]

    def _begin(self, builder: RoutineBuilder, group: int, buffers: Sequence[int]) -> None:
        """Begin to sum the first thin matrices, and the vectors."""
        if self._specs:
            given = [*(buffers[place] for place in self._places), *self._lost, *self._second]
            made = [*self._matrices, *self._first]
            builder.call(self._project, given, made, InstructionLabel("project"), takes=range(len(self._places)))
        exact = [number for place, number in enumerate(buffers) if place not in self._places]
        builder.add(Reduce((*self._first, *exact), group), InstructionLabel("reduce", "transfer"))

    def _sum(self, builder: RoutineBuilder, group: int) -> None:
        """Begin to sum the second thin matrices."""
        if self._specs:
            second, lost = ([builder.renew(number) for number in kept] for kept in (self._second, self._lost))
            given, made = [*self._matrices, *self._first], [*self._first, *second, *lost]
            builder.call(self._factor, given, made, InstructionLabel("factor"), takes=range(len(given)))
            builder.add(Reduce(tuple(second), group), InstructionLabel("reduce", "transfer"))

    def _finish(self, builder: RoutineBuilder, worker: int, buffers: Sequence[int]) -> None:
        """Multiply the sums; members that do not need the result drop what they have of it."""
        if self.owner not in (None, worker):
            left = [number for place, number in enumerate(buffers) if place not in self._places]
            builder.add(Free((*self._first, *left)), InstructionLabel("free"))
        elif self._specs:
            second = [builder.newest(number) for number in self._second]
            given, made = [*self._first, *second], [buffers[place] for place in self._places]
            takes = range(len(self._first))
            builder.call(self._restore, given, made, InstructionLabel("restore"), takes=takes)
