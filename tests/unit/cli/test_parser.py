"""From words to options; what is wrong comes as one line."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from onebox.cli.options.common import Flag
from onebox.cli.options.estimates import MemoryConfig
from onebox.cli.options.jobs import PlanConfig, TrainConfig
from onebox.cli.options.pools import DevicesConfig, EnvConfig, ProfileConfig, RunConfig
from onebox.cli.options.run_config import read_config, to_stored
from onebox.cli.parser import COMMANDS, OPTIONS, parse
from onebox.errors import UsageError


def message(line: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    text = str(caught.value)
    assert "\n" not in text
    assert not set(text) & set("╭╮│╰╯─\x1b"), text
    return text


def test_the_commands() -> None:
    assert parse(["train"]) == TrainConfig()
    assert parse(["devices", "--json", "--pool", "cpu*3"]) == DevicesConfig(json=True, pool="cpu*3")
    assert parse(["env"]) == EnvConfig()
    assert parse(["plan"]) == PlanConfig()
    assert parse(["profile"]) == ProfileConfig()
    line = "profile --pool cpu*3 --threads 1 --memory 1GiB --fresh --no-cache --json --report p.json"
    assert parse(line.split()) == ProfileConfig(
        pool="cpu*3", threads=1, memory="1GiB", fresh=True, no_cache=True, json=True, report=Path("p.json")
    )


@pytest.mark.parametrize(
    ("line", "flags", "script"),
    [
        ("run x.py", {}, "x.py"),
        (
            "run --pool cpu*2 --synchronous x.py --pool cuda -m --help",
            {"pool": "cpu*2", "synchronous": True},
            "x.py --pool cuda -m --help",
        ),
        ("run --threads=2 --memory 1GiB -m there.x --sync", {"threads": 2, "memory": "1GiB"}, "-m there.x --sync"),
        ("run --synchronous -- -odd.py 1", {"synchronous": True}, "-odd.py 1"),
    ],
)
def test_what_follows_the_name_of_a_script_is_its_own(line: str, flags: dict[str, Any], script: str) -> None:
    assert parse(line.split()) == RunConfig(**flags, script=tuple(script.split()))


@pytest.mark.feature("Launchers: Start a rank for each device by onebox torchrun")
@pytest.mark.parametrize(
    ("line", "flags", "rest"),
    [
        ("torchrun x.py --pool y", {}, "--nproc-per-node gpu x.py --pool y"),
        ("torchrun --pool cpu*2 --nproc-per-node 3 x.py", {"pool": "cpu*2"}, "--nproc-per-node 3 x.py"),
        ("torchrun --threads=1 --nproc_per_node=3 x.py", {"threads": 1}, "--nproc_per_node=3 x.py"),
        ("torchrun --synchronous --nnodes 1 -m x", {"synchronous": True}, "--nproc-per-node gpu --nnodes 1 -m x"),
        ("torchrun --uneven --equal-shares x.py", {"uneven": True, "equal_shares": True}, "--nproc-per-node gpu x.py"),
    ],
)
def test_torchrun_has_a_rank_for_each_device_unless_it_says_otherwise(
    line: str, flags: dict[str, Any], rest: str
) -> None:
    assert parse(line.split()) == RunConfig(**flags, script=("-m", "torch.distributed.run", *rest.split()))


def test_all_flags_of_train() -> None:
    line = (
        "train --data digits --model mlp --epochs 3 --batch 32 --optimizer sgd --lr 0.1 --weight-decay 0.001 "
        "--momentum 0.8 --micro-batch 8 --clip-grad-norm 1.0 --precision bf16 --seed 7 --pool cpu*2 --threads 1 "
        "--memory 2GiB --sync client --shares 3,1 --run there --save-every 5 --every 10 --recover on "
        "--snapshot-every 20 --adaptive --image-size 24 --read 2 --process auto --on-error skip"
    )
    assert parse(line.split()) == TrainConfig(
        data="digits",
        model="mlp",
        epochs=3,
        batch=32,
        optimizer="sgd",
        lr=0.1,
        weight_decay=0.001,
        momentum=0.8,
        micro_batch=8,
        clip_grad_norm=1.0,
        precision="bf16",
        seed=7,
        pool="cpu*2",
        threads=1,
        memory="2GiB",
        sync="client",
        shares="3,1",
        run=Path("there"),
        save_every="5",
        every=10,
        recover="on",
        snapshot_every=20,
        adaptive=True,
        image_size=24,
        read="2",
        process="auto",
        on_error="skip",
    )


def test_all_flags_of_plan() -> None:
    line = (
        "plan --data digits --model gpt --batch 32 --optimizer sgd --lr 0.1 --weight-decay 0.001 --momentum 0.8 "
        "--precision bf16 --seed 7 --pool sim*4@2 --threads 1 --memory 2GiB --micro-batches 4,8 --schedules 1f1b,zb-h1 "
        "--budget 2 --fresh --out plan.json --figure plan.svg --json"
    )
    parsed = parse(line.split())
    assert parsed == PlanConfig(
        model="gpt",
        batch=32,
        optimizer="sgd",
        lr=0.1,
        weight_decay=0.001,
        momentum=0.8,
        precision="bf16",
        seed=7,
        pool="sim*4@2",
        threads=1,
        memory="2GiB",
        micro_batches="4,8",
        schedules="1f1b,zb-h1",
        budget=2.0,
        fresh=True,
        out=Path("plan.json"),
        figure=Path("plan.svg"),
        json=True,
    )
    assert parse(["plan", "--check", "p.json"]) == PlanConfig(check=Path("p.json"))
    assert parse(["train", "--plan", "auto"]) == TrainConfig(plan="auto")


def test_flags_of_late_gradients() -> None:
    assert parse(["plan", "--staleness", "1", "--correction", "none", "--schedules", "1f1b,async-1f1b"]) == PlanConfig(
        staleness=1, correction="none", schedules="1f1b,async-1f1b"
    )
    assert parse(["train", "--staleness", "1", "--correction", "auto", "--warm-up", "5"]) == TrainConfig(
        staleness=1, warm_up=5
    )


def test_plan_may_show_the_memory() -> None:
    assert parse(["plan", "--memory", "2GiB"]) == PlanConfig(memory="2GiB")
    assert parse(["plan", "--memory", "2GiB", "--show-memory"]) == PlanConfig(memory="2GiB", show_memory=True)
    assert parse(["plan", "--policies", "keep, offload"]) == PlanConfig(policies="keep, offload")
    assert PlanConfig(policies="keep, offload").policy_names == ("keep", "offload")
    assert PlanConfig(update="auto").updates == ("device", "host")
    assert parse(["plan", "--show-memory"]) == PlanConfig(show_memory=True)


def test_all_flags_of_memory() -> None:
    line = (
        "memory --data digits --model gpt --batch 32 --pool sim*2 --memory 24GiB,16GiB --micro-batch 8 "
        "--clip-grad-norm 0.5 --gflops 14000 --bandwidth 900 --out plan.json --report r.json"
    )
    assert parse(line.split()) == MemoryConfig(
        data="digits",
        model="gpt",
        batch=32,
        pool="sim*2",
        memory="24GiB,16GiB",
        micro_batch=8,
        clip_grad_norm=0.5,
        gflops=14000.0,
        bandwidth=900.0,
        out=Path("plan.json"),
        report=Path("r.json"),
    )
    assert parse(["memory", "--plan", "p.json"]) == MemoryConfig(plan="p.json")


def test_a_language_model_is_asked_about_with_the_best_plan() -> None:
    line = "memory --config llama/config.json --tokens 128 --lora 16 --frozen int4 --batch 4 --pool sim*2"
    config = parse(line.split())
    assert config == MemoryConfig(
        config=Path("llama/config.json"), tokens=128, lora=16, frozen="int4", batch=4, pool="sim*2"
    )
    assert config.plan_asked == "auto"
    assert MemoryConfig().plan_asked == MemoryConfig(config=Path("c"), micro_batch=2).plan_asked == "data-parallel"
    assert MemoryConfig(plan="auto").plan_asked == "auto"
    assert MemoryConfig(config=Path("c"), plan="p.json").plan_asked == "p.json"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("", ["a command is needed: train, plan,", "see onebox --help"]),
        ("logs", ["onebox logs needs HOST[:PORT]"]),
        ("pair connect lab --name", ["--name needs a value"]),
        (
            "trian",
            [
                "there is no command 'trian' (perhaps train?)",
                "the commands are train, plan, memory, run",
            ],
        ),
        ("Device", ["there is no command 'Device' (perhaps devices?)"]),
        ("xyz", ["there is no command 'xyz'; the commands are"]),
        ("train --modle cnn", ["--modle", "perhaps --model?"]),
        (
            "train --model vgg",
            ["--model vgg: allowed are mlp, cnn, resnet, gpt, and for your own model"],
        ),
        ("train --loss mse", ["--loss mse: allowed is package.module:function"]),
        ("train --precision fp16", ["'fp16'", "fp32", "bf16"]),
        ("train --epochs", ["--epochs", "onebox train --help"]),
        ("train --epochs many", ["--epochs: 'many' is not a whole number"]),
        ("train --threads 1.5", ["--threads: '1.5' is not a whole number"]),
        ("train --lr fast", ["--lr: 'fast' is not a number"]),
        ("train --epochs 0", ["--epochs 0: allowed are 1 and more"]),
        ("train --batch 0", ["--batch 0: allowed are 1 and more"]),
        ("train extra", ["extra"]),
        ("profile --threads 0", ["--threads 0: allowed are 1 and more"]),
        ("profile --memory lots", ["--memory lots: allowed are bytes"]),
        ("profile --jsn x", ["--jsn", "perhaps --json?"]),
        ("plan --micro-batches 4,x", ["--micro-batches 4,x: allowed are whole numbers from 1 to 64"]),
        ("plan --schedules 1f2b", ["--schedules 1f2b: allowed are gpipe, 1f1b"]),
        ("plan --budget 0", ["--budget 0.0: allowed are numbers above 0"]),
        ("plan --schedules async-1f1b", ["allowed are gpipe, 1f1b", "async-1f1b needs --staleness 1"]),
        ("plan --lossy weights", ["--lossy weights: allowed are gradients, activations"]),
        ("train --lossy gradients,int8", ["--lossy gradients,int8: allowed are gradients, activations"]),
        ("plan --staleness 2", ["--staleness 2: allowed are 0, for exact steps, and 1"]),
        ("train --correction predict", ["--correction predict is for late gradients; it needs --staleness 1"]),
        ("train --correction some", ["'some'", "lookahead"]),
        ("train --warm-up 3", ["--warm-up 3", "it needs --staleness 1"]),
        ("train --staleness 1 --warm-up -1", ["--warm-up -1: allowed are 0 and more"]),
        ("train --staleness 1 --sync client", ["--staleness 1 and --sync client"]),
        ("train --overlap --sync client", ["--overlap and --sync client"]),
        ("train --overlap --update host", ["--overlap and --update host"]),
        ("memory --plan p.json --micro-batch 8", ["--plan p.json and --micro-batch 8: a plan says that itself"]),
        ("memory --plan p.json --update host", ["--plan p.json and --update host: a plan says that itself"]),
        (
            "plan --policies recompute",
            ["--policies recompute: allowed are keep, recompute, offload, swap, cpu", "always one"],
        ),
        ("plan --policies keep,drop", ["--policies keep,drop: allowed are keep, recompute, offload, swap, cpu"]),
        ("plan --preparing -1", ["--preparing -1", "0 or more"]),
        ("plan --check p.json --policies keep", ["--check p.json and --policies keep", "give one of them"]),
        ("plan --check p.json --update auto", ["--check p.json and --update auto", "give one of them"]),
        ("plan --check p.json --whole-layers", ["--check p.json and --whole-layers", "give one of them"]),
        ("memory --gflops 100", ["--gflops and --bandwidth go together", "give both"]),
        ("memory --gflops -1 --bandwidth 2", ["--gflops -1.0: allowed are numbers above 0"]),
        ("memory --memory", ["--memory needs a value"]),
        ("memory --lora 8", ["--lora 8 is for a language model; it needs --config"]),
        ("memory --tokens 8", ["--tokens 8 is for a language model; it needs --config"]),
        ("memory --config c --frozen int8", ["--frozen int8: without adapters no weight is frozen; give --lora, too"]),
        ("memory --config c --lora 0", ["--lora 0: allowed are 1 and more"]),
        ("memory --config c --tokens 1", ["--tokens 1: allowed are 2 and more"]),
        ("memory --config c --lora 8 --frozen int2", ["int2"]),
        ("memory --config c --model mlp", ["--config c and --model mlp: give one of them"]),
        ("memory --config c --data mnist:x", ["--config c and --data mnist:x: give one of them"]),
        ("memory --plan auto --micro-batch 8", ["--plan auto and --micro-batch 8: a plan says that itself"]),
        ("plan --memory --budget 2", ["--memory needs a value"]),
        ("run --sync x.py", ["--sync"]),
        ("train --plan p.json --micro-batch 8", ["--plan p.json and --micro-batch 8", "give one of them"]),
        ("devices --jsn", ["--jsn", "perhaps --json?"]),
        ("run", ["a script is needed", "onebox run [flags] script.py"]),
        ("run --pool cpu*2", ["a script is needed"]),
        ("run -m", ["-m needs the name of a module"]),
        ("run --threads 0 x.py", ["--threads 0: allowed are 1 and more"]),
        ("run --pol cpu x.py", ["--pol", "perhaps --pool?"]),
        ("torchrun", ["a script is needed", "onebox torchrun [flags] script.py"]),
        ("torchrun --pool cpu*2", ["a script is needed"]),
        ("torchrun --threads 0 x.py", ["--threads 0: allowed are 1 and more"]),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(line: str, parts: list[str]) -> None:
    text = message(line)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "train --help",
        "plan --help",
        "memory --help",
        "devices -h",
        "profile --help",
        "run --help",
        "torchrun --help",
        "torchrun --pool cpu -h",
        "pair --help",
        "pair accept --help",
        "pair list -h",
    ],
)
def test_help_is_printed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(line.split())
    assert not caught.value.code
    assert "onebox" in capsys.readouterr().out.splitlines()[0]


def store(folder: Path, config: TrainConfig) -> None:
    (folder / "config.json").write_bytes(msgspec.json.encode(to_stored(config.resolved())))


def test_a_resumed_run_brings_its_settings(tmp_path: Path) -> None:
    config = TrainConfig(model="mlp", optimizer="sgd", lr=0.3, seed=5, shares="3,1", memory="1GiB", pool="cpu,cpu")
    store(tmp_path, config)
    resumed = parse(["train", "--resume", str(tmp_path)])
    assert isinstance(resumed, TrainConfig)
    assert resumed.resume == tmp_path
    assert to_stored(resumed) == to_stored(config.resolved())


def test_a_flag_beats_the_file(tmp_path: Path) -> None:
    store(tmp_path, TrainConfig(epochs=3, threads=2))
    resumed = parse(["train", "--resume", str(tmp_path), "--epochs", "9", "--pool", "cpu*3", "--every", "1"])
    assert isinstance(resumed, TrainConfig)
    assert (resumed.epochs, resumed.pool, resumed.every, resumed.threads) == (9, "cpu*3", 1, 2)


@pytest.mark.parametrize(
    "flag", ["--batch 32", "--lr 0.5", "--seed 1", "--model mlp", "--data mnist:x", "--micro-batch 8"]
)
def test_a_flag_that_would_change_the_computation_is_refused(tmp_path: Path, flag: str) -> None:
    store(tmp_path, TrainConfig())
    text = message(f"train --resume {tmp_path} {flag}")
    assert text.startswith(flag.split(maxsplit=1)[0])
    assert "--epochs" in text


@pytest.mark.parametrize("flag", ["--batch 64", "--lr 0.001"])
def test_a_flag_that_says_what_the_file_says_is_fine(tmp_path: Path, flag: str) -> None:
    store(tmp_path, TrainConfig())
    assert isinstance(parse([*f"train --resume {tmp_path}".split(), *flag.split()]), TrainConfig)


def test_there_is_no_run_to_resume(tmp_path: Path) -> None:
    assert "there is no run in it" in message(f"train --resume {tmp_path}")
    assert "there is no run in it" in message(f"train --resume {tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"[]", "damaged"),
        (b'{"epochs": 3}', "unknown or missing"),
    ],
)
def test_a_damaged_configuration_names_its_file(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    text = message(f"train --resume {tmp_path}")
    assert part in text and "config.json" in text


@pytest.mark.parametrize(("key", "value"), [("epochs", "three"), ("epochs", 0), ("model", "vgg"), ("shares", "x")])
def test_a_value_that_cannot_be_is_refused(tmp_path: Path, key: str, value: object) -> None:
    values = to_stored(TrainConfig().resolved()) | {key: value}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(values))
    with pytest.raises(UsageError, match=r"config\.json is damaged"):
        read_config(tmp_path)


def test_a_missing_key_is_an_error(tmp_path: Path) -> None:
    values = to_stored(TrainConfig().resolved())
    del values["correction"]
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(values))
    with pytest.raises(UsageError, match="correction unknown or missing"):
        read_config(tmp_path)


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    values = to_stored(TrainConfig().resolved()) | {"colour": "red"}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(values))
    with pytest.raises(UsageError, match="colour"):
        read_config(tmp_path)


def test_a_resumed_run_may_have_another_plan_but_not_shares_beside_it(tmp_path: Path) -> None:
    store(tmp_path, TrainConfig(plan="auto"))
    resumed = parse(["train", "--resume", str(tmp_path), "--plan", "other.json"])
    assert isinstance(resumed, TrainConfig)
    assert resumed.plan == "other.json"
    text = message(f"train --resume {tmp_path} --shares 3,1")
    assert text == "--plan auto and --shares 3,1: a plan says that itself; give one of them"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_function(command: str) -> None:
    options, name = COMMANDS[command]
    function = getattr(importlib.import_module(f"onebox.cli.commands.{command.split(maxsplit=1)[0]}"), name)
    config = get_type_hints(function)["config"]
    assert options in (get_args(config) or (config,))


def test_a_flag_takes_values_of_one_kind_in_all_commands() -> None:
    kinds: dict[str, set[bool]] = {}
    for options in OPTIONS.values():
        for field in dataclasses.fields(options):
            kinds.setdefault(field.name, set()).add(field.type in ("Flag", Flag))
    assert not [name for name, found in kinds.items() if len(found) > 1]


def test_profile_needs_no_name() -> None:
    bare, named = (
        parse(["run", "--profile", "train.py", "x.json"]),
        parse(["run", "--profile", "there/t.json", "train.py"]),
    )
    assert isinstance(bare, RunConfig) and isinstance(named, RunConfig)
    assert (bare.profile, bare.script) == (Path("onebox-trace.json"), ("train.py", "x.json"))
    assert (named.profile, named.script) == (Path("there/t.json"), ("train.py",))
    with pytest.raises(UsageError, match=r"--profile train.py: the name of the file ends in .json"):
        parse(["run", "--profile=train.py", "train.py"])


@pytest.mark.parametrize(
    ("line", "recovers", "script"),
    [
        ("run --recover train.py", True, ("train.py",)),
        ("run --recover on train.py", True, ("train.py",)),
        ("run --recover=off train.py", False, ("train.py",)),
        ("run --recover --pool cpu*2 -m package.train --recover", True, ("-m", "package.train", "--recover")),
        ("run train.py --recover", None, ("train.py", "--recover")),
        ("run --recover auto --uneven train.py", None, ("train.py",)),
    ],
)
def test_recover_needs_no_value(line: str, recovers: bool | None, script: tuple[str, ...]) -> None:
    config = parse(line.split())
    assert isinstance(config, RunConfig)
    assert config.recovers is recovers
    assert config.script == script
    assert isinstance(trained := parse(["train", "--model", "mlp", "--recover"]), TrainConfig)
    assert trained.recover == "on"
    assert parse(["torchrun", "--recover", "--nproc-per-node", "2", "train.py"]).recovers  # type: ignore[union-attr]
