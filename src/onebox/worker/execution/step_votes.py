"""Votes on steps: a worker computes nothing more of a step after a failure, and no worker applies that step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from msgspec.structs import replace

from onebox.wire import DTYPES, specs_by_slot
from onebox.wire.protocol.instructions import Call, Gather, Receive, Reduce, Send, Vote
from onebox.wire.protocol.requests import Instruction, Run
from onebox.wire.protocol.responses import WorkerFailure
from onebox.worker.accelerator import Accelerator
from onebox.worker.comm.api import Finish
from onebox.worker.comm.manager import GroupManager
from onebox.worker.execution.communication import Resolve
from onebox.worker.memory.buffers import BufferStore
from onebox.worker.programs.interpreter import CompiledProgram

OBJECTIONS = ("failure",)
"""Reasons to object, each an element of the tensor that is summed over the ranks: how many of them object for it."""

_Step = tuple[int, int]
"""An optimizer, and the number of a step."""

_KEPT = 2
"""Steps before the newest whose votes are kept: the gradients of a step may be applied in the next one."""


class StepVotes:
    """Failures and votes of the steps of each optimizer.

    NaNs, and zeros of integers, stand in for what a failed step would compute, so that all exchanges with other workers
    take place; no worker applies what they make of them. They take no memory: all elements of a tensor are one.

    Args:
        accelerator: Device of the tensors.
        store: The buffers.
        groups: The groups of this worker.
        program: Returns a program by its number.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        store: BufferStore,
        groups: GroupManager,
        program: Callable[[int], CompiledProgram],
    ) -> None:
        self._accelerator = accelerator
        self._store = store
        self._groups = groups
        self._program = program
        self._optimizer = 0  # of the running routine; 0 if its failures are not voted on
        self._step = 0
        self._failed: dict[_Step, WorkerFailure] = {}
        self._known: frozenset[_Step] = frozenset()  # those that had failed when the routine began
        self._new: WorkerFailure | None = None
        self._votes: dict[_Step, Finish | bool] = {}  # begun, or whether the step takes effect

    def begin(self, run: Run, optimizer: int) -> None:
        """Begin a routine.

        Args:
            run: Its run.
            optimizer: The optimizer whose steps wait for its vote; 0 for none.
        """
        self._optimizer, self._step = optimizer, run.step
        if optimizer:
            for table in (self._failed, self._votes):
                for key in [key for key in table if key[0] == optimizer and not 0 < run.step - key[1] <= _KEPT]:
                    del table[key]
            if run.void:
                self._failed[optimizer, run.step] = WorkerFailure("operator", "run", "the step is left out")
            self._known = frozenset(self._failed)

    def end(self) -> WorkerFailure | None:
        """End a routine; return its first failure for a vote, with the steps that have failed in it, if there was one.

        It is reported now: what fails otherwise in the routine is worse.
        """
        new, steps = self._new, self._failed.keys() - self._known
        self._optimizer, self._new = 0, None
        return None if new is None else replace(new, kept=True, steps=tuple(sorted(step for _, step in steps)))

    def forget(self, optimizer: int) -> None:
        """Remove an optimizer, if it is known."""
        for table in (self._failed, self._votes):
            for key in [key for key in table if key[0] == optimizer]:
                del table[key]

    # ---- failures

    def skips(self, instruction: Instruction, resolve: Resolve) -> bool:
        """Return whether an instruction belongs to a failed step; others then stand in for its results."""
        if not (self._optimizer and self._failed and isinstance(instruction, Call)):
            return False
        if (self._optimizer, self._step - instruction.age) not in self._failed:
            return False
        self._stand_in(instruction, resolve)
        return True

    def objects(self, instruction: Instruction, failure: WorkerFailure, resolve: Resolve) -> bool:
        """Note a failure for the vote on its step, with stand-ins for what a program would have computed, and for what
        an exchange would have sent, which has not begun; return whether it is one that a vote is about.
        """
        if not isinstance(instruction, Call | Send | Receive | Reduce | Gather):
            return False
        step = self._optimizer, self._step - instruction.age
        if not self._optimizer or step in self._votes or failure.kind == "peer":
            return False
        match instruction:
            case Call():
                if not self._stand_in(instruction, resolve):
                    return False
            case Send() | Gather():
                self._blank([resolve(instruction.buffer)])
            case Reduce():
                self._blank(map(resolve, instruction.buffers))
            case Receive():
                pass
        if step not in self._failed:
            self._failed[step] = failure
            self._new = self._new or failure
        return True

    def _stand_in(self, call: Call, resolve: Resolve) -> bool:
        """Fill the outputs of a program; return whether there are as many."""
        program = self._program(call.program).program
        if len(call.outputs) != len(program.outputs):
            return False
        specs = specs_by_slot(program)
        for position in call.takes:
            if 0 <= position < len(call.inputs):
                self._store.forget(resolve(call.inputs[position]))
        for reference, slot in zip(call.outputs, program.outputs, strict=True):
            self._put(resolve(reference), DTYPES[specs[slot].dtype], specs[slot].shape)
        return True

    def _blank(self, numbers: Iterable[int]) -> None:
        """Replace buffers by stand-ins, which frees their memory."""
        for number in numbers:
            tensor = self._store.get(number)
            self._put(number, tensor.dtype, tensor.shape)

    def _put(self, number: int, dtype: torch.dtype, shape: Sequence[int]) -> None:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        one = torch.full((), value, dtype=dtype, device=self._accelerator.device)
        self._store.put(number, one.expand(tuple(shape)))

    # ---- votes

    def vote(self, vote: Vote, resolve: Resolve) -> None:
        """Begin a vote; wait for it only if buffers are to be renumbered.

        Raises:
            RankLost: A rank cannot vote.
        """
        step = vote.optimizer, self._step - vote.age
        mine = step not in self._failed
        held: Finish | bool = mine
        if vote.group:
            ballot = torch.full((len(OBJECTIONS),), float(not mine), device=self._accelerator.device)
            held = self._groups.get(vote.group).reduce([ballot])
        if vote.final:
            self._votes[step] = held
        if not vote.buffers:
            return
        buffers = [resolve(reference) for reference in vote.buffers]
        if self.takes_effect(*step) if vote.final else mine and self._numbers(buffers):
            self._store.rename(dict(zip(buffers, map(resolve, vote.into), strict=True)))
        else:
            for number in buffers:
                self._store.forget(number)

    def abstain(self, vote: Vote) -> None:
        """Let a step have no effect whose vote could not be held."""
        self._votes[vote.optimizer, self._step - vote.age] = False

    def takes_effect(self, optimizer: int, step: int) -> bool:
        """Return whether no rank objects to a step of an optimizer, waiting for their votes.

        Raises:
            RankLost: A rank has not voted.
        """
        key = optimizer, step
        held = self._votes.get(key, True)
        if not isinstance(held, bool):
            self._votes[key] = False  # if it cannot be known
            self._votes[key] = held = self._result(held, mine=key not in self._failed)
        return held

    def _numbers(self, buffers: Sequence[int]) -> bool:
        """Return whether all elements of buffers are numbers: others come of a step that has failed elsewhere."""
        found = [self._store.get(number) for number in buffers]
        return not any(bool(each.isnan().any()) for each in found if each.is_floating_point())

    def _result(self, held: Finish, *, mine: bool) -> bool:
        """Wait for a vote and return its result, given that of this rank."""
        summed, _ = held()
        return mine and not bool(summed.any())
