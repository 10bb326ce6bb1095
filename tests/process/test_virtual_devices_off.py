"""``onebox.open(virtual_devices=False)``: nothing of PyTorch is registered or patched."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_SCRIPT = textwrap.dedent(
    """
    import sys
    import warnings

    import torch, torch.distributed, torch.nn.parallel, torch._dynamo, torch.fx.experimental.proxy_tensor

    import onebox


    def ours():
        '''Attributes of torch's modules and classes that are defined in onebox.'''
        found = set()
        for name, module in list(sys.modules.items()):
            if name != "torch" and not name.startswith("torch."):
                continue
            for key, value in list(vars(module).items()):
                owners = [(f"{name}.{key}", value)]
                if isinstance(value, type) and value.__module__.startswith("torch"):
                    owners += [(f"{name}.{key}.{attribute}", one) for attribute, one in list(vars(value).items())]
                found |= {
                    place for place, one in owners
                    if (isinstance(one, type) or callable(one))
                    and str(getattr(one, "__module__", "")).startswith("onebox")
                }
        return found


    def trained(virtual_devices):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            onebox.open("cpu*2", threads=1, virtual_devices=virtual_devices) as pool,
            onebox.Trainer(model, torch.nn.functional.mse_loss, optimizer, pool=pool) as trainer,
        ):
            trainer.step(torch.ones(8, 4), torch.zeros(8, 1)).item()
            return ours(), torch._C._get_privateuse1_backend_name()


    if __name__ == "__main__":
        warnings.simplefilter("ignore")
        places, backend = trained(False)
        # while a trainer is open, what would read weights that are not the current ones is told so
        assert places <= {
            "torch.nn.utils.clip_grad._clip_grads_with_norm_", "torch.optim.swa_utils.AveragedModel.update_parameters"
        }, places
        assert not ours(), "after it"
        assert backend == "privateuseone", backend
        assert not hasattr(torch, "vgpu")
        for make in (lambda: torch.device("vgpu:0"), lambda: torch.ones(1, device="vgpu:0")):
            try:
                make()
            except RuntimeError as error:
                assert "vgpu" in str(error), error
            else:
                raise AssertionError("there is a device vgpu:0")
        places, backend = trained(True)  # these checks find what the virtual device patches
        assert len(places) >= 20, places
        assert backend == "vgpu", backend
        print("done")
    """
)


@pytest.mark.feature("Virtual devices: Open a pool without virtual devices")
@pytest.mark.timeout(120)
def test_pytorch_is_left_alone() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr
