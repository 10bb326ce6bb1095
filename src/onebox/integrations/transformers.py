"""The ``Trainer`` of transformers with planned steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from onebox.engine import StepLoss, Trainer, Weighted
from onebox.errors import UsageError
from onebox.integrations.planned_run import (
    PlannedOptions,
    SameInEachStep,
    close_after_error,
    loss_as_it_is,
    pool_for_run,
    targets_for,
    told_step,
    trainer_arguments,
)
from onebox.pool import Pool

_NEEDED = ("_inner_training_loop", "_wrap_model", "_maybe_log_save_evaluate", "_finalize_training", "_get_grad_norm")
"""Methods of transformers' ``Trainer`` that are overridden, and of which not all are in versions before 5."""

_FIXED = ("max_steps", "num_train_epochs", "train_batch_size", "is_world_process_zero", "is_local_process_zero")
"""Parts of a trainer's state that are the same in each step."""

_Inputs = dict[str, Any]


class PlannedTrainer(transformers.Trainer):
    """A ``Trainer`` of transformers whose steps run on a pool by a plan.

    Each update is one step of a :class:`onebox.Trainer`: forward, loss, backward, clipping and the optimizer run on the
    workers. Data, callbacks, logs, schedulers, checkpoints and resuming are those of transformers. What
    ``compute_loss`` does, also that of a subclass, is captured (docs/concepts/capture.md). Micro-batches are the
    plan's: ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` is the batch of a step on all devices
    together. docs/how-to/launchers.md has an example.

    While training, evaluations of the loss alone run on the pool if micro-batches are known to make it up: for language
    models, and with ``loss_reduction="mean"`` or ``"sum"``. Others run in this process. The model in this process has
    the present weights at each save, at each evaluation in this process, and when training has ended.

    Args:
        *arguments: As for ``transformers.Trainer``.
        pool: A pool from :func:`onebox.open`, or a specification for it: that pool is open while ``train`` runs.
        **more: Arguments of ``transformers.Trainer``, and these of :class:`onebox.Trainer`: ``plan``, ``adaptive``,
            ``loss_reduction``, ``pad``, ``stale``, ``lossy``, ``recovery``, ``staging``, ``engine``. A loss that
            divides by ``num_items_in_batch``, as those of language models do, needs no ``loss_reduction``.

    Raises:
        UsageError: Training arguments ask for something that a plan does not do.
    """

    def __init__(self, *arguments: Any, pool: Pool | str | None = None, **more: Any) -> None:
        _require_version()
        names = PlannedOptions.__annotations__
        self._options = PlannedOptions(**{name: more.pop(name) for name in names if name in more})  # type: ignore[typeddict-item]
        self._pool = pool
        self._run = contextlib.ExitStack()
        """Owner of the pool and the trainer below, while training."""
        self._running = False
        self._planned: Trainer | None = None
        self._by_items = False
        """True if the loss divides by ``num_items_in_batch``, and so is a sum over samples."""
        self._batches: list[_Inputs] = []
        """Batches of the update that has not begun."""
        self._losses: list[tuple[int, StepLoss]] = []
        """Losses that are not logged yet, with the global step before each."""
        self._latest: StepLoss | None = None
        self._pulled_at = -1
        """Global step of the weights that the model in this process has."""
        super().__init__(*arguments, **more)
        _require_plain(self)

    @property
    def planned(self) -> Trainer | None:
        """The trainer that runs the steps; ``None`` before the first one, and after training."""
        return self._planned

    # ---- the loop of transformers

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        self._batches, self._losses, self._latest, self._running = [], [], None, True
        try:
            with self._run:
                try:
                    return super()._inner_training_loop(*arguments, **named)
                except BaseException:
                    close_after_error(self._planned)
                    raise
        finally:
            self._planned, self._running = None, False

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the module that is captured, which accelerate does not prepare."""
        if not self._running:
            return super()._wrap_model(model, training, dataloader)
        if not isinstance(self.model_wrapped, _ComputeLoss) or self.model_wrapped.model is not self.model:
            self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            return _ComputeLoss(self)
        return self.model_wrapped

    def training_step(
        self, model: nn.Module, inputs: _Inputs, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Begin a step with the last batch of an update.

        Returns:
            Zero: the loss is added when it is logged, so that steps are not waited for.
        """
        model.train()
        self._batches.append(dict(self._prepare_inputs(inputs)))
        if self.accelerator.sync_gradients:
            batches, self._batches = self._batches, []
            self._step(model, batches, num_items_in_batch)
        return torch.zeros((), device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Do nothing: the workers clip."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> StepLoss | None:
        """Return what knows the norm of the gradients; it is read when it is logged."""
        return self._latest

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, grad_norm: Any, *more: Any, **named: Any) -> None:
        if self.control.should_log:
            self._collect(tr_loss)
            grad_norm = None if grad_norm is None else grad_norm.gradient_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *more, **named)

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self._collect(self._tr_loss)
        self._pull()
        return super()._finalize_training(*arguments, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model with its present weights."""
        self._pull()
        super().save_model(output_dir, _internal_call)

    # ---- evaluation

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *more: Any, **named: Any
    ) -> Any:
        """Evaluate on the pool if a loss is asked for that micro-batches make up, else in this process."""
        alone = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if not alone or not self._composed or type(self).prediction_step is not PlannedTrainer.prediction_step:
            self._pull()
        return super().evaluation_loop(dataloader, description, prediction_loss_only, *more, **named)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: _Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return the loss of a batch, computed on the pool, or loss, logits and labels, computed in this process."""
        if not isinstance(model, _ComputeLoss):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if prediction_loss_only and self.label_names and all(inputs.get(name) is not None for name in self.label_names):
            batch = dict(self._prepare_inputs(inputs))
            items = self._get_num_items_in_batch([batch], self.args.device)
            planned = self._planned_for(model, batch, items)
            if self._composed:
                model.train()  # the state in which it is captured for steps: an evaluation is in eval mode by itself
                try:
                    found = planned.evaluate([self._as_pair(batch, items, None)])
                finally:
                    model.eval()
                return torch.tensor(found.loss, dtype=torch.float64), None, None
        if self._pulled_at != self.state.global_step:
            self._pull()
        with self.accelerator.autocast():
            return super().prediction_step(model.model, inputs, prediction_loss_only, ignore_keys)

    # ---- steps

    def _step(self, model: nn.Module, batches: Sequence[_Inputs], items: Tensor | int | None) -> None:
        """Begin the step of an update."""
        if len(batches) > self.current_gradient_accumulation_steps:
            raise UsageError(
                f"an update has {len(batches)} batches for gradient_accumulation_steps="
                f"{self.args.gradient_accumulation_steps}: some are left from an epoch of unknown length; give "
                "the data set a length, or set gradient_accumulation_steps=1"
            )
        planned = self._planned_for(model, batches[0], items)
        whole = self.loss_is_scaled_for_ga
        if whole is None:
            whole = (self.model_accepts_loss_kwargs and items is not None) or self.compute_loss_func is not None
        scale = 1.0 if whole else 1 / self.current_gradient_accumulation_steps
        if len(batches) > 1 and not self._summed:
            _require_equal_parts(batches, self._options.get("loss_reduction"))
            scale *= len(batches)  # the mean over all samples is the mean of the batches' means
        inputs, targets = self._as_pair(_joined(batches, self._padding), items, None if scale == 1.0 else scale)
        self._latest = told_step(planned, inputs, targets)
        self._losses.append((self.state.global_step, self._latest))

    @property
    def _padding(self) -> Mapping[str, int]:
        """Padding values of batches of texts, as the collators of transformers use them."""
        places = self.processing_class, getattr(self.model, "config", None)
        known = (getattr(place, "pad_token_id", None) for place in places)
        ignored = {"attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100, "shift_labels": -100}
        return {"input_ids": next((number for number in known if number is not None), 0), **ignored}

    @property
    def _summed(self) -> bool:
        """True if the loss of several batches is the sum of theirs."""
        return self._by_items or self._options.get("loss_reduction") == "sum"

    @property
    def _composed(self) -> bool:
        """True if micro-batches are known to make up any batch's loss; steps are checked, and evaluations are not."""
        return self._summed or self._options.get("loss_reduction") == "mean"

    def _as_pair(self, batch: _Inputs, items: Tensor | int | None, scale: float | None) -> tuple[Any, Any]:
        """Return inputs and targets of the captured module."""
        each = None if items is None else torch.as_tensor(items).reshape(1).expand(_size(batch))
        labels = tuple(batch.get(name) for name in self.label_names)
        return (batch, each, scale), targets_for(self._options, labels[0] if len(labels) == 1 else labels)

    def _planned_for(self, model: nn.Module, batch: _Inputs, items: Tensor | int | None) -> Trainer:
        """Return the trainer that runs the steps, made for the first batch."""
        if self._planned is None:
            options = trainer_arguments(self._options)
            optimizer: Any = self.optimizer
            self._by_items = items is not None and self._is_by_items(model, batch)
            if options.get("loss_reduction", "sum") not in (None, "sum") and self._by_items:
                raise UsageError(
                    f"loss_reduction={options['loss_reduction']!r}: the loss divides by num_items_in_batch, so that "
                    "micro-batches add up; leave loss_reduction out"
                )
            if self._by_items:
                options["loss_reduction"] = "sum"
            if (pad := options.get("pad")) is not None and pad.tensors is None:
                texts = [name for name, value in batch.items() if isinstance(value, Tensor) and value.dim() == 2]
                values = {f"inputs[0]['{name}']": self._padding.get(name, pad.value) for name in texts}
                options["pad"] = replace(pad, tensors=values)
            self._planned = self._run.enter_context(
                Trainer(
                    model,
                    loss_as_it_is,
                    getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
                    pool=self._run.enter_context(pool_for_run(self._pool)),
                    precision="bf16" if self.args.bf16 else "fp32",
                    clip_grad_norm=self.args.max_grad_norm or float("inf"),  # the norm is logged in any case
                    seed=self.args.seed,
                    step=self.state.global_step,
                    **options,
                )
            )
        return self._planned

    def _is_by_items(self, model: nn.Module, batch: _Inputs) -> bool:
        """Return whether the loss divides by ``num_items_in_batch``; nothing is computed.

        Raises:
            UsageError: Only a part of it does, so that it is neither a sum nor a mean over samples.
        """
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            inputs = pytree.tree_map_only(Tensor, mode.from_tensor, batch)
            items = torch.ones(1, requires_grad=True)
            try:
                divided, others = divided_by(model(inputs, items, None), items)
            except Exception:  # what cannot be captured is refused by the capture, which says why
                return False
        if divided and others and "loss_reduction" not in self._options:
            raise UsageError(
                "a part of the loss is divided by num_items_in_batch, and another part is not, such as a penalty or an "
                "auxiliary loss of experts: it is neither a sum nor a mean over samples, of which micro-batches could "
                'be put together. Divide all of it, or say loss_reduction="sum" to add up the micro-batches\' losses '
                "all the same"
            )
        return divided

    def _collect(self, total: Tensor) -> None:
        """Add the losses that have not been logged to a total, as the loop of transformers does after each step."""
        for step, loss in self._losses:
            value = torch.tensor(loss.item(), dtype=torch.float64, device=total.device)
            if self.args.logging_nan_inf_filter and not torch.isfinite(value):
                value = total / (1 + step - self._globalstep_last_logged)
            total += value
        self._losses = []

    def _pull(self) -> None:
        if self._planned is not None:
            self._planned.pull()
            self._pulled_at = self.state.global_step

    @contextlib.contextmanager
    def _captured(self) -> Iterator[None]:
        """Refuse reads of what changes from step to step."""
        own, state = vars(self), self.state
        own["state"] = SameInEachStep(state, _FIXED, ("compute_loss", "state"), "model that a callback")
        try:
            yield
        finally:
            own["state"] = state


class _ComputeLoss(nn.Module):
    """``compute_loss`` of a trainer with its model, from inputs to the loss.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: PlannedTrainer) -> None:
        super().__init__()
        assert isinstance(trainer.model, nn.Module)
        self.model = trainer.model
        self._compute_loss: Callable[..., Any] = trainer.compute_loss
        self._context: Callable[[], contextlib.AbstractContextManager[None]] = trainer._captured

    def forward(self, inputs: Mapping[str, Any], items: Tensor | None, scale: float | None) -> Tensor:
        """Return the loss.

        Args:
            inputs: Those of the model.
            items: ``num_items_in_batch`` for each sample; ``None`` for none.
            scale: A factor of the loss; ``None`` for none.
        """
        with self._context():
            loss: Tensor = self._compute_loss(
                self.model, dict(inputs), num_items_in_batch=None if items is None else items[0]
            )
        return loss if scale is None else loss * scale


def _size(batch: _Inputs) -> int:
    """Return the number of samples of a batch."""
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)), 0)


def _joined(batches: Sequence[_Inputs], padding: Mapping[str, int]) -> _Inputs:
    """Return batches as one; shorter sequences are padded on the right where a mask says so to the model.

    Args:
        batches: The batches.
        padding: By name, what tensors of sequences are padded with.

    Raises:
        UsageError: They differ in more than the number and the lengths of samples.
    """
    if len(batches) == 1:
        return batches[0]
    found = {}
    for name, first in batches[0].items():
        values: list[Any] = [batch.get(name) for batch in batches]
        if not isinstance(first, Tensor):
            tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(values))
            alike = not tensors and all(value == first for value in values)
        else:
            alike = all(isinstance(value, Tensor) and value.dim() == first.dim() for value in values)
            if alike and first.dim() == 2 and name in padding and "attention_mask" in batches[0]:
                values = _padded(values, padding[name])
            alike = alike and len({value.shape[1:] for value in values}) == 1
        if not alike:
            raise UsageError(
                f"{name} of the {len(batches)} batches of an update differs in more than the number of samples, and a "
                "planned step takes them as one: pad all batches to one length, let them have an attention_mask by "
                "which they can be padded, or set gradient_accumulation_steps=1 and a larger "
                "per_device_train_batch_size"
            )
        found[name] = torch.cat(values) if isinstance(first, Tensor) else first
    return found


def _padded(tensors: Sequence[Tensor], value: int) -> list[Tensor]:
    """Return tensors [B, T] of the same length."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return [nn.functional.pad(tensor, (0, longest - tensor.shape[1]), value=value) for tensor in tensors]


def _require_equal_parts(batches: Sequence[_Inputs], reduction: Any) -> None:
    """Require that the mean over all samples of an update is the mean of its batches' means.

    Raises:
        UsageError: It is not.
    """
    if isinstance(reduction, Weighted):
        raise UsageError(
            "loss_reduction=Weighted(...) and gradient_accumulation_steps: transformers averages the batches of an "
            "update with equal weights, whatever their labels; set gradient_accumulation_steps=1 and a larger "
            "per_device_train_batch_size"
        )
    sizes = [_size(each) for each in batches]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the batches of an update have {sizes} samples, and transformers averages them with equal weights; set "
            "dataloader_drop_last=True, or gradient_accumulation_steps=1 and a larger per_device_train_batch_size"
        )


def divided_by(loss: Tensor, divisor: Tensor) -> tuple[bool, bool]:
    """Return whether a part of a loss is divided by a tensor, and whether another part is not.

    Args:
        loss: The loss, with its graph of gradients.
        divisor: A leaf of the graph.

    Example:
        >>> x, n = torch.ones(3, requires_grad=True), torch.ones((), requires_grad=True)
        >>> divided_by(2 * (x.sum() / n), n), divided_by(x.sum() / n + x.mean(), n), divided_by(x.mean(), n)
        ((True, False), (True, True), (False, True))
    """
    root, leaf = (torch.autograd.graph.get_gradient_edge(each).node for each in (loss, divisor))
    alone = _made_of(root, leaf)
    divided, others, seen, waiting = False, False, {root}, [root]
    while waiting:
        node = waiting.pop()
        below = [each for each, _ in node.next_functions if each is not None]
        if node.name().startswith(("DivBackward", "MulBackward")) and any(each in alone for each in below):
            divided = True
            continue
        others = others or (not below and node is not leaf)
        waiting += [each for each in below if each not in seen]
        seen.update(below)
    return divided, others


def _made_of(root: Any, leaf: Any) -> set[Any]:
    """Return the nodes of a graph of gradients that depend on one leaf alone."""
    found, seen, waiting = {leaf}, set(), [root]
    while waiting:
        node = waiting[-1]
        below = [each for each, _ in node.next_functions if each is not None]
        left = [each for each in below if each not in seen]
        if node not in seen and left:
            seen.add(node)
            waiting += left
            continue
        seen.add(node)
        waiting.pop()
        if below and all(each in found for each in below):
            found.add(node)
    return found


def _require_version() -> None:
    """Require a transformers with the methods that are overridden.

    Raises:
        UsageError: It is another one.
    """
    if not all(hasattr(transformers.Trainer, name) for name in _NEEDED):
        raise UsageError(f"PlannedTrainer needs transformers 5; this is {transformers.__version__}")


def _require_plain(trainer: PlannedTrainer) -> None:
    """Require that a trainer asks for nothing that a plan does not do.

    Raises:
        UsageError: It does; the message says what to change.
    """
    args, kind = trainer.args, type(trainer)
    refused = {
        f"the device {args.device}: the model stays in this process's memory, and the pool has the devices; set "
        "use_cpu=True": args.device.type != "cpu",
        f"{args.world_size} processes: one process drives all devices of the pool; start the script without a "
        "launcher": args.world_size > 1,
        "fp16=True: gradients are not scaled on the workers; set bf16=True, or neither": args.fp16,
        "auto_find_batch_size=True: the plan is made for one batch; set per_device_train_batch_size": (
            args.auto_find_batch_size
        ),
        "FSDP: the plan divides the model; leave fsdp out": trainer.is_fsdp_enabled,
        "DeepSpeed: the plan divides the model; leave deepspeed out": trainer.is_deepspeed_enabled,
        "parallelism_config: the plan divides the model; leave it out": (
            getattr(args, "parallelism_config", None) is not None
        ),
        f"{kind.__name__}.training_step, which a plan replaces; override compute_loss, which is captured": (
            kind.training_step is not PlannedTrainer.training_step
        ),
    }
    for what, found in refused.items():
        if found:
            raise UsageError(f"PlannedTrainer does not do {what}")


__all__ = ["PlannedTrainer"]
