"""A strategy of Lightning with planned steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Unpack

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from onebox.engine import Trainer
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

_GRADIENT_HOOKS = ("backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that see gradients, which are on the workers."""

_FIXED = ("world_size", "global_rank", "local_rank", "is_global_zero", "max_epochs", "max_steps", "precision")
"""Attributes of a Lightning trainer that are the same in each step."""


class OneboxStrategy(SingleDeviceStrategy):
    """A strategy of Lightning whose training steps run on a pool by a plan.

    Each batch is one step of a :class:`onebox.Trainer`: ``training_step``, backward, clipping and the optimizer run on
    the workers. ``training_step`` is captured (docs/concepts/capture.md): it can log the loss alone, and read nothing
    that changes from step to step but its batch. Data, callbacks, loggers, schedulers, checkpoints and resuming are
    those of Lightning. Validation, testing and prediction run in this process. docs/how-to/launchers.md has an example.

    The module in this process has the present weights at each validation, each checkpoint, the end of each epoch, and
    when training has ended.

    Args:
        pool: A pool from :func:`onebox.open`, or a specification for it: that pool is open while ``fit`` runs.
        checkpoint_io: As for other strategies.
        precision_plugin: Likewise.
        **options: These arguments of :class:`onebox.Trainer`: ``plan``, ``adaptive``, ``loss_reduction``, ``pad``,
            ``stale``, ``lossy``, ``recovery``, ``staging``, ``engine``.

    Raises:
        UsageError: An option is not one of these; as it is set up, the trainer or the module asks for something that a
            plan does not do.
    """

    strategy_name = "onebox"

    def __init__(
        self,
        pool: Pool | str | None = None,
        *,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        **options: Unpack[PlannedOptions],
    ) -> None:
        if not hasattr(callbacks, "WeightAveraging"):
            raise UsageError(f"OneboxStrategy needs Lightning 2.6; this is {lightning.__version__}")
        super().__init__("cpu", checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        unknown = sorted(set(options) - set(PlannedOptions.__annotations__))
        if unknown:
            allowed = ", ".join(PlannedOptions.__annotations__)
            raise UsageError(f"OneboxStrategy({unknown[0]}=...): allowed are {allowed}")
        self._pool = pool
        self._options = options
        self._run = contextlib.ExitStack()
        """Owner of the pool and the trainer below, while training."""
        self._planned: Trainer | None = None
        self._calls: _Calls | None = None
        self._stepping = False

    @property
    def planned(self) -> Trainer | None:
        """The trainer that runs the steps; ``None`` before the first one, and after training."""
        return self._planned

    # ---- set-up and end

    def setup_environment(self) -> None:
        """Refuse accelerators other than the CPU, where the module is."""
        if not isinstance(self.accelerator, lightning.pytorch.accelerators.CPUAccelerator):
            raise UsageError(
                f"OneboxStrategy with {type(self.accelerator).__name__}: the module stays in this process's memory, "
                'and the pool has the devices; set accelerator="cpu"'
            )
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Set up the module and its optimizer, and refuse what a plan does not do."""
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _require_plain(trainer, self)
            trainer.callbacks.insert(0, _PresentWeights(self))

    def teardown(self) -> None:
        """Free everything on the pool."""
        self._close()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            trainer: Any = self.lightning_module.trainer
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, _PresentWeights)]
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Bring the weights, as far as possible, and free everything on the pool."""
        close_after_error(self._planned)
        run, self._run, self._planned, self._calls = self._run, contextlib.ExitStack(), None, None
        run.__exit__(type(exception), exception, exception.__traceback__)

    def _close(self) -> None:
        self._run.close()
        self._planned = self._calls = None

    # ---- training

    def training_step(self, batch: Any, *more: Any) -> Tensor:
        """Make a step with a batch, and log what ``training_step`` logs."""
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        _require_one_batch(trainer)
        if not self._stepping:
            raise UsageError(
                "optimizer_step of the module calls its closure without the optimizer's step, and a planned step is "
                "both: call optimizer.step(closure=optimizer_closure) for each batch"
            )
        with contextlib.ExitStack() as contexts:
            if self._precision == "fp32":
                contexts.enter_context(self.precision_plugin.train_step_context())
            calls, planned = self._planned_for(module, trainer, indexed=bool(more))
            with calls.recorded():
                value = told_step(planned, (batch,), targets_for(self._options, batch)).item()
        loss = torch.tensor(value, dtype=calls.dtype)
        for name, named in calls.logged:
            own = {} if named.get("batch_size") is None else {"batch_size": _size(batch)}
            module.log(name, loss, **{**named, **own})
        return loss

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Do nothing: the workers have done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Make the step, of which the optimizer's is a part."""
        self._stepping = True
        try:
            return closure()
        finally:
            self._stepping = False

    @property
    def _precision(self) -> str | None:
        """The precision of a plan for the plugin; ``None`` for none."""
        given = self.precision_plugin.precision
        return {"32-true": "fp32", "64-true": "fp32", "bf16-true": "fp32", "bf16-mixed": "bf16"}.get(str(given))

    def _planned_for(
        self, module: lightning.LightningModule, trainer: lightning.Trainer, *, indexed: bool
    ) -> tuple[_Calls, Trainer]:
        """Return the trainer that runs the steps, made for the first one, and the calls that they make."""
        if self._planned is None or self._calls is None:
            captured = _TrainingStep(module, indexed=indexed)
            self._calls = captured.calls
            self._planned = self._run.enter_context(
                Trainer(
                    captured,
                    loss_as_it_is,
                    self.optimizers[0],
                    pool=self._run.enter_context(pool_for_run(self._pool)),
                    precision="bf16" if self._precision == "bf16" else "fp32",
                    clip_grad_norm=trainer.gradient_clip_val or None,
                    seed=torch.initial_seed() % (1 << 63),
                    step=trainer.global_step,
                    **trainer_arguments(self._options),
                )
            )
        return self._calls, self._planned

    # ---- weights in this process

    def pull(self) -> None:
        """Bring the present weights into the module."""
        if self._planned is not None:
            self._planned.pull()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the present weights."""
        self.pull()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, from which the next step begins anew, as after a search for a learning rate."""
        self._close()
        super().load_model_state_dict(checkpoint, strict)


class _PresentWeights(callbacks.Callback):
    """The first callback: before validation, and at the end of an epoch and of training, the others find the present
    weights.

    Args:
        strategy: The strategy.
    """

    def __init__(self, strategy: OneboxStrategy) -> None:
        self._strategy = strategy

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Bring the weights."""
        self._strategy.pull()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Bring the weights."""
        self._strategy.pull()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Bring the weights."""
        self._strategy.pull()


_Logged = list[tuple[str, dict[str, Any]]]
"""Name and options of each call of ``log``, whose value is the loss."""


class _TrainingStep(nn.Module):
    """``training_step`` of a module, from a batch to the loss.

    Args:
        module: The module.
        indexed: Whether it takes the index of the batch.
    """

    def __init__(self, module: lightning.LightningModule, *, indexed: bool) -> None:
        super().__init__()
        self.module = module
        self.calls = _Calls(module)
        self._more = (_BatchIndex(),) if indexed else ()

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return self.calls.of(lambda: self.module.training_step(batch, *self._more), _size(batch))


class _Calls:
    """Calls that a ``training_step`` makes while it is captured.

    Args:
        module: The module.
    """

    def __init__(self, module: lightning.LightningModule) -> None:
        self._module = module
        reader = "training_step", "trainer"
        self._trainer = SameInEachStep(module.trainer, _FIXED, reader, "module that a hook")
        self._now: list[tuple[str, Any, dict[str, Any]]] = []
        self._latest: list[tuple[torch.dtype, _Logged]] = []

    @property
    def dtype(self) -> torch.dtype:
        """Type of the loss."""
        return self._latest[-1][0]

    @property
    def logged(self) -> _Logged:
        """Calls of ``log``."""
        return self._latest[-1][1]

    def of(self, step: Callable[[], Any], size: int) -> Tensor:
        """Return the loss of a step, and note what it logs.

        Args:
            step: Calls ``training_step``.
            size: Number of samples that it is given.

        Raises:
            UsageError: It returns or logs something else than the loss.
        """
        if torch.compiler.is_dynamo_compiling():  # which reads the user's code alone
            found = step()
            return found["loss"] if isinstance(found, dict) else found
        self._now.clear()
        found = step()
        loss = found["loss"] if isinstance(found, Mapping) and set(found) == {"loss"} else found
        if not isinstance(loss, Tensor):
            what = f"a dict of {', '.join(map(str, found))}" if isinstance(found, Mapping) else type(found).__name__
            raise UsageError(f"training_step returns {what}; a planned step has the loss alone: return a tensor")
        logged = []
        for name, value, named in self._now:
            if not isinstance(value, Tensor) or not torch._C._is_alias_of(value, loss):  # type: ignore[attr-defined]
                raise UsageError(
                    f"training_step logs {name!r}, which is not the loss that it returns: a planned step brings the "
                    "loss alone from the workers; log other values in validation_step or in on_train_batch_end, or run "
                    "the module on virtual devices (onebox run)"
                )
            if named.get("batch_size") not in (None, size):
                raise UsageError(
                    f"training_step logs {name!r} with batch_size={named['batch_size']} for {size} samples; give their "
                    "number, or leave it out"
                )
            logged.append((name, named))
        if self._latest and [name for name, _ in logged] != [name for name, _ in self.logged]:
            raise UsageError("training_step logs other names with this batch than with an earlier one; log the same")
        self._latest[:] = [(loss.dtype, logged)]
        return loss

    def log(self, name: str, value: Any, prog_bar: bool = False, **named: Any) -> None:
        """Note a call of ``log``."""
        if not torch.compiler.is_dynamo_compiling():
            self._now.append((name, value, {"prog_bar": prog_bar, **named}))

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Let the module log here, and refuse what it reads of its trainer."""
        inner = [each for each in self._module.modules() if isinstance(each, lightning.LightningModule)]
        before = [(vars(each), vars(each)["_trainer"]) for each in inner]
        for own, _ in before:
            own |= {"_trainer": self._trainer, "log": self.log}
        try:
            yield
        finally:
            for own, trainer in before:
                own["_trainer"] = trainer
                del own["log"]


class _BatchIndex:
    """The index of a batch, which ``training_step`` is given and cannot use."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(
            "training_step uses batch_idx, but is captured once and not called with each step: do what depends on the "
            "index in on_train_batch_start or on_train_batch_end"
        )

    __index__ = __int__ = __float__ = __bool__ = __str__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def _size(batch: Any) -> int:
    """Return the number of samples of a batch."""
    return next((leaf.shape[0] for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _require_one_batch(trainer: lightning.Trainer) -> None:
    """Require that each batch is a step, also where a callback changes that."""
    count = trainer.accumulate_grad_batches
    if count != 1:
        raise UsageError(
            f"accumulate_grad_batches={count}: a planned step takes one batch; give the data loader a batch_size "
            f"{count} times as large, of which plan=onebox.DataParallel(micro_batch=...) computes a part at a time"
        )


def _require_plain(trainer: Any, strategy: OneboxStrategy) -> None:
    """Require that a trainer and its module ask for nothing that a plan does not do.

    Raises:
        UsageError: They do; the message says what to change.
    """
    module = trainer.lightning_module
    _require_one_batch(trainer)
    averaging = callbacks.StochasticWeightAveraging, callbacks.WeightAveraging
    refused = {
        "automatic_optimization=False: a plan makes whole steps; return the loss from training_step, or run the module "
        "on virtual devices (onebox run)": not module.automatic_optimization,
        f"{len(strategy.optimizers)} optimizers: return one from configure_optimizers": len(strategy.optimizers) != 1,
        f"precision={strategy.precision_plugin.precision!r}: allowed are 32-true, 64-true, bf16-true and bf16-mixed": (
            strategy._precision is None
        ),
        f"gradient_clip_algorithm={trainer.gradient_clip_algorithm!r}: workers clip by the norm of all gradients": bool(
            trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm")
        ),
        "configure_gradient_clipping of a module: workers clip; set gradient_clip_val": (
            type(module).configure_gradient_clipping is not lightning.LightningModule.configure_gradient_clipping
        ),
    }
    for hook in _GRADIENT_HOOKS:
        own = getattr(type(module), hook) is not getattr(lightning.LightningModule, hook)
        refused[f"{hook} of {type(module).__name__}: gradients are on the workers; leave it out"] = own
        for each in trainer.callbacks:
            other = getattr(type(each), hook, None) is not getattr(callbacks.Callback, hook, None)
            refused[f"{hook} of {type(each).__name__}: gradients are on the workers; leave it out"] = other
    for each in trainer.callbacks:
        refused[f"{type(each).__name__}: it reads the weights in each step, which are on the workers; leave it out"] = (
            isinstance(each, averaging)
        )
    for what, found in refused.items():
        if found:
            raise UsageError(f"OneboxStrategy does not do {what}")


__all__ = ["OneboxStrategy"]
