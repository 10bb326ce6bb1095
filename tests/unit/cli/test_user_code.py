"""Models and losses of the user's own: what is imported and called; errors are one line, with exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from onebox.cli import main
from onebox.cli.options.jobs import TrainConfig
from onebox.cli.options.pools import ProfileConfig
from onebox.cli.training.run_setup import accuracy, make_loss, make_model, run_folder
from onebox.errors import UsageError
from onebox.feed import load_dataset

MODULE = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=4):
        super().__init__(nn.Flatten(), nn.Linear(64, width))

    @staticmethod
    def wide():
        return Net(width=9)

def sized(data, width=3):
    channels, height, rows = data.shape
    return nn.Linear(channels * height * rows, data.classes + width)

def named(*, data):
    return nn.Linear(len(data.mean), len(data.std))

def several(classes, *, depth):
    pass

def nothing():
    pass

def pair():
    return Net(), None

def fails():
    return inner()

def inner():
    raise RuntimeError("no weights here")

def ends():
    raise SystemExit(3)

def squared(outputs, targets):
    return outputs.square().mean()

model = Net()
number = 3
"""

MODULES = {
    "own_models": MODULE,
    "own_broken": "\nimport not_there_at_all\n",
    "own_syntax": "def f(:\n",
    "own_exit": "raise SystemExit(2)\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules in it; what was imported from there is forgotten afterwards."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def made(name: str, **options: int) -> nn.Module:
    return make_model(TrainConfig(model=f"own_models:{name}", **options).resolved(), load_dataset("digits"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("folder")
def test_a_class_or_a_function_makes_the_model() -> None:
    assert [parameter.shape[0] for parameter in made("Net").parameters()] == [4, 4]
    assert [parameter.shape[0] for parameter in made("Net.wide").parameters()] == [9, 9]


@pytest.mark.usefixtures("folder")
def test_a_required_argument_called_data_is_the_data_set() -> None:
    sized, named = made("sized"), made("named")
    assert isinstance(sized, nn.Linear) and isinstance(named, nn.Linear)
    assert (sized.in_features, sized.out_features) == (64, 13)
    assert (named.in_features, named.out_features) == (1, 1)


@pytest.mark.usefixtures("folder")
def test_the_seed_alone_sets_the_weights_and_the_global_random_state_stays() -> None:
    made("Net")  # imports the module, which has a model of its own
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = made("Net", seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = made("Net", seed=7).state_dict(), made("Net", seed=8).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.usefixtures("folder")
def test_a_loss_of_ones_own() -> None:
    loss = make_loss(TrainConfig(loss="own_models:squared"))
    assert loss(torch.tensor([1.0, 3.0]), None) == 5.0
    assert make_loss(TrainConfig(loss="torch.nn.functional:nll_loss")) is functional.nll_loss
    assert make_loss(TrainConfig()) is functional.cross_entropy


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model vgg",
            "--model vgg: allowed are mlp, cnn, resnet, gpt, and for your own model package.module:f",
        ),
        ("--model resnet18", "gpt (perhaps resnet?), and for your own"),
        ("--model own_models.py:Net", "--model own_models.py:Net: a module is named as in an import, without .py"),
        ("--model here/own_models:Net", "--model here/own_models:Net: a module is named as in an import"),
        ("--model own_models:", "--model own_models:: allowed is package.module:function, such as my_models:make"),
        ("--model :Net", "--model :Net: allowed is package.module:function"),
        ("--model own_models:Net()", "--model own_models:Net(): allowed is package.module:function"),
        ("--loss cross_entropy", "--loss cross_entropy: allowed is package.module:function"),
        (
            "--model own_model:Net",
            "--model own_model:Net: there is no module own_model (perhaps own_models?), neither in the current folder, "
            "{folder}, nor among what is installed",
        ),
        ("--model own_models.part:Net", "there is no module own_models.part"),
        ("--model not_a_package.part:Net", "there is no module not_a_package, neither in the current folder, {folder}"),
        ("--model own_models:Nets", "--model own_models:Nets: there is no Nets in own_models (perhaps Net?)"),
        ("--model own_models:Net.wid", "there is no wid in own_models.Net (perhaps wide?)"),
        (
            "--model own_models:qqq",
            "there is no qqq in own_models; it defines Net, sized, named, several, nothing",
        ),
        ("--loss own_models:square", "--loss own_models:square: there is no square in own_models (perhaps squared?)"),
        ("--model own_models:number", "--model own_models:number is of type int, which cannot be called"),
        ("--loss own_models:number", "--loss own_models:number is of type int, which cannot be called"),
        ("--model own_models:model", "--model own_models:model is a model itself: name a function that makes one"),
        ("--model own_models:several", "--model own_models:several needs classes, depth: allowed is one argument"),
        (
            "--model own_models:nothing",
            "--model own_models:nothing returned NoneType; it has to return a torch.nn",
        ),
        ("--model own_models:pair", "--model own_models:pair returned tuple; it has to return"),
        ("--model torch:ones", "--model torch:ones has failed: TypeError: ones() missing"),
        ("--model own_syntax:f", "--model own_syntax:f: importing own_syntax has failed: SyntaxError: invalid syntax"),
        (
            "--model own_exit:f",
            "--model own_exit:f: importing own_exit has failed: SystemExit: 2 ({folder}/own_exit.py",
        ),
        ("--model own_models:ends", "--model own_models:ends has failed: SystemExit: 3 ({folder}/own_models.py, line "),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(flags: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--pool", "cpu", *flags.split()]) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("onebox: --")
    assert said.format(folder=folder) in first


@pytest.mark.parametrize(
    ("name", "error", "line", "steps"),
    [
        ("own_models:fails", "RuntimeError: no weights here", 'raise RuntimeError("no weights here")', 2),
        ("own_broken:f", "ModuleNotFoundError: No module named 'not_there_at_all'", "import not_there_at_all", 1),
    ],
)
def test_an_exception_of_the_users_code_names_its_line(
    name: str, error: str, line: str, steps: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", "--pool", "cpu", "--model", name]) == 2
    lines = capsys.readouterr().err.splitlines()
    file = folder / f"{name.partition(':')[0]}.py"
    number = file.read_text().splitlines().index(line if steps == 1 else f"    {line}") + 1
    assert error in lines[0] and f"({file}, line {number}, in " in lines[0]
    places = [each for each in lines[1:] if each.startswith("  File ")]
    assert len(places) == steps  # nothing of this package, of importlib or of PyTorch
    assert all(str(file) in each for each in places)


@pytest.mark.parametrize("command", ["train", "plan", "profile"])
@pytest.mark.parametrize("flag", ["--model", "--loss"])
@pytest.mark.usefixtures("folder")
def test_what_cannot_be_imported_is_said_before_devices_are_opened(
    command: str, flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a pool was opened")

    monkeypatch.setattr(f"onebox.cli.commands.{command}.open_pool", opened)
    model = [] if flag == "--model" else ["--model", "mlp"]
    assert main([command, "--pool", "cpu", *model, flag, "own_models:qqq"]) == 2
    assert f"{flag} own_models:qqq: there is no qqq in own_models" in capsys.readouterr().err


def test_a_loss_for_no_model_is_not_profiled() -> None:
    with pytest.raises(UsageError, match="--loss a:b is for --model; name one"):
        ProfileConfig(loss="a:b")


@pytest.mark.parametrize(
    ("model", "name"), [("cnn", "cnn-digits"), ("my.models:Net.make", "my-models-Net-make-digits")]
)
def test_the_run_folder_is_named_after_the_model(
    model: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with run_folder(TrainConfig(model=model), "digits") as folder:
        assert folder.path.name.partition("Z-")[2] == name


def test_only_logits_have_an_accuracy() -> None:
    logits, targets = torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 2])
    assert accuracy(logits, targets).item() == pytest.approx(2 / 3)
    assert accuracy(logits.unsqueeze(1), targets).isnan()
    assert accuracy((logits, logits), targets).isnan()
