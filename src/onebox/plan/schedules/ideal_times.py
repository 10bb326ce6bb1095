"""Theoretical step times of named schedules, on equal devices with free links, from the literature."""

from __future__ import annotations

from onebox.errors import UsageError
from onebox.plan.schedules.named import NAMED


def ideal_step_time(
    name: str,
    devices: int,
    micro_batches: int,
    forward_s: float,
    input_s: float,
    weight_s: float,
    stages_per_device: int = 1,
) -> float:
    """Return the ideal time of a step, from the first forward to the end of the last gradient.

    Each device computes for `M (F + I + W)`; on top of that comes, for `D` devices with `v` stages each:

    - ``gpipe``, ``1f1b``: `(D - 1) (F + I + W)` (Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2019);
    - ``interleaved``: `(D - 1) (F + I + W) / v` (Narayanan et al. 2021, arXiv:2104.04473, section 2.2);
    - ``zb-h1``: `(D - 1) (F + I - W)` (Qi et al. 2024, arXiv:2401.10241), but no less than the `(D - 1) F` before the
      last device starts, which that paper leaves out of its bubbles;
    - ``zbv``: that time alone, `(D - 1) F / 2`, since stages are half as long (Qi et al. 2024, arXiv:2405.15362); for
      `F = I = W` and all but them a little more.

    Args:
        name: One of the named schedules.
        devices: Number of devices; all are equal, and so are the stages.
        micro_batches: Number of micro-batches; for ``interleaved`` a multiple of ``devices``.
        forward_s: Seconds of forward of one micro-batch in all stages of a device together, `F`.
        input_s: The same, of the gradients of inputs, `I`.
        weight_s: The same, of the gradients of parameters, `W`.
        stages_per_device: Stages of each device; ``zbv`` has two.

    Raises:
        UsageError: The formula does not hold for these numbers.

    Example:
        >>> theory("1f1b", 4, 8, 1.0, 1.0, 1.0)
        33.0
    """
    if name not in NAMED:
        raise UsageError(f"no theory of a schedule {name!r}; allowed are {', '.join(NAMED)}")
    if devices < 1 or micro_batches < 1 or stages_per_device < 1:
        numbers = f"{devices} devices, {micro_batches} micro-batches, {stages_per_device} stages a device"
        raise UsageError(f"{numbers}: allowed are 1 or more of each")
    wanted = {"interleaved": stages_per_device, "zbv": 2}.get(name, 1)
    if stages_per_device != wanted:
        raise UsageError(f"{name} has {wanted} stages on a device, not {stages_per_device}")
    if name in ("interleaved", "zb-h1", "zbv") and micro_batches < devices:
        raise UsageError(f"{micro_batches} micro-batches: the formula of {name} holds from {devices} up, one a device")
    compute_s = forward_s + input_s + weight_s
    if name in ("gpipe", "1f1b", "interleaved"):
        idle_s = compute_s / stages_per_device
    elif name == "zb-h1":
        idle_s = forward_s + max(0.0, input_s - weight_s)
    else:
        idle_s = forward_s / 2
    return micro_batches * compute_s + (devices - 1) * idle_s
