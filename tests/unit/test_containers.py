"""The image and the compose file in docker, checked without an engine: ``make compose-check``.

Checked are the instructions and paths of the Dockerfile; the keys of the compose file, by the Compose Specification
(https://github.com/compose-spec/compose-spec; some of its keys are allowed); that services refer to what there is; and
that every command of either is one of onebox.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import onebox
from onebox.cli.options.agents import AGENT_PORT, ServeConfig
from onebox.cli.options.jobs import TrainConfig
from onebox.cli.options.pairing import PAIRING_PORT
from onebox.cli.parser import parse
from onebox.errors import UsageError
from onebox.pool.spec import AgentPart, parse_spec

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"

TOP = {"name", "services", "volumes", "networks", "secrets", "configs"}
SERVICE = {
    *("build", "cap_drop", "command", "cpus", "depends_on", "environment", "healthcheck", "hostname", "image", "init"),
    *("mem_limit", "networks", "ports", "profiles", "restart", "secrets", "security_opt", "shm_size", "user"),
    "volumes",
}
BUILD = {"context", "dockerfile", "target", "args"}
HEALTH = {"test", "interval", "timeout", "start_period", "retries", "disable"}
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "VOLUME", "WORKDIR"),
}

Instruction = tuple[str, str]


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines.splitlines() if line)]


def stages(found: list[Instruction]) -> list[str]:
    return [rest.split(" AS ")[1] for word, rest in found if word == "FROM"]


def image_problems(text: str) -> list[str]:
    """Return what is wrong with a Dockerfile."""
    found = instructions(text)
    problems = [f"unknown instruction {word}" for word, _ in found if word not in INSTRUCTIONS]
    for word, rest in found:
        if word == "FROM" and not re.fullmatch(r"\S+:\d+\.\d+\.\d+\S* AS \w+", rest):
            problems.append(f"FROM {rest}: a base is pinned to a version, and a stage is named")
        if word == "COPY" and not rest.startswith("--from="):
            problems += [f"COPY {name}: not in the tree" for name in rest.split()[:-1] if not (ROOT / name).exists()]
        elif word == "COPY" and rest.split()[0].removeprefix("--from=") not in stages(found):
            problems.append(f"COPY {rest}: there is no such stage")
    users = [rest for word, rest in found if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        problems.append("the container runs as root")
    if not any(word == "HEALTHCHECK" for word, _ in found):
        problems.append("there is no health check")
    if re.search(r"(?i)password|token|secret|--trusted-host", text):
        problems.append("it has a secret, or trusts a host")
    return problems


def compose_problems(data: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compose file."""
    problems = [f"unknown key {key}" for key in data if key not in TOP and not key.startswith("x-")]
    named = stages(instructions(DOCKERFILE.read_text()))
    for name, service in data["services"].items():
        problems += [f"{name}: unknown key {key}" for key in service if key not in SERVICE]
        build = service.get("build", {})
        problems += [f"{name}: build: unknown key {key}" for key in build if key not in BUILD]
        context = COMPOSE.parent / build.get("context", ".")
        if not (context / build.get("dockerfile", "Dockerfile")).is_file():
            problems.append(f"{name}: there is no such Dockerfile")
        if build.get("target") not in named:
            problems.append(f"{name}: there is no stage {build.get('target')}")
        problems += [
            f"{name}: healthcheck: unknown key {key}" for key in service.get("healthcheck", {}) if key not in HEALTH
        ]
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            if source not in data["volumes"] or not target.startswith("/"):
                problems.append(f"{name}: there is no volume {source}, or {target} is no path")
        problems += [
            f"{name}: depends on {other}, which is not there"
            for other in service.get("depends_on", ())
            if other not in data["services"]
        ]
        try:
            config = parse(service.get("command", []))
        except UsageError as error:
            problems.append(f"{name}: {error}")
            continue
        parts = () if isinstance(config, ServeConfig) else parse_spec(config.pool)
        hosts = {part.address.partition(":")[0] for part in parts if isinstance(part, AgentPart)}
        problems += [f"{name}: there is no service {host}" for host in hosts if host not in data["services"]]
    return problems


@pytest.fixture
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


@pytest.mark.feature("Installation: Check image and compose file of containers")
def test_the_image_is_well_formed() -> None:
    assert image_problems(DOCKERFILE.read_text()) == []


@pytest.mark.feature("Installation: Check image and compose file of containers")
def test_the_compose_file_is_well_formed(compose: dict[str, Any]) -> None:
    assert compose_problems(compose) == []
    commands = {name: parse(service["command"]) for name, service in compose["services"].items()}
    assert {name: type(config) for name, config in commands.items()} == {
        "agent1": ServeConfig,
        "agent2": ServeConfig,
        "client": TrainConfig,
    }
    assert commands["client"].pool == "agent1,agent2"


def test_an_image_runs_what_it_says_and_exposes_where_it_listens() -> None:
    found = dict(instructions(DOCKERFILE.read_text()))
    assert json.loads(found["ENTRYPOINT"]) == ["onebox"]
    config = parse(json.loads(found["CMD"]))
    assert isinstance(config, ServeConfig)
    assert set(found["EXPOSE"].split()) == {str(AGENT_PORT), str(PAIRING_PORT), config.worker_ports}
    options, _, command = found["HEALTHCHECK"].partition("CMD")
    assert re.findall(r"--(\S+)=", options) == ["interval", "timeout", "start-period", "retries"]
    assert f"127.0.0.1:{config.metrics_port}/metrics" in json.loads(command)[-1]
    compile(json.loads(command)[-1], "health check", "exec")
    environment = dict(pair.split("=") for pair in shlex.split(found["ENV"]))
    made = next(rest for word, rest in instructions(DOCKERFILE.read_text()) if word == "RUN" and "useradd" in rest)
    assert environment["ONEBOX_CONFIG"] in made, "the volume of keys belongs to the user who runs onebox"


def test_versions_are_those_of_the_project(compose: dict[str, Any]) -> None:
    images = {service["image"] for service in compose["services"].values()}
    assert images == {f"onebox:{onebox.__version__}"}
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    bases = [rest for word, rest in instructions(DOCKERFILE.read_text()) if word == "FROM"]
    assert len({base.split()[0] for base in bases}) == 1
    assert bases[0].startswith(f"python:{least}.")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(service={}), "unknown key service"),
        (lambda data: data["services"]["agent1"].update(imge="x"), "agent1: unknown key imge"),
        (
            lambda data: data["services"]["agent1"]["build"].update(target="nowhere"),
            "agent1: there is no stage nowhere",
        ),
        (
            lambda data: data["services"]["agent1"]["build"].update(dockerfile="x"),
            "agent1: there is no such Dockerfile",
        ),
        (lambda data: data["volumes"].pop("agent2-keys"), "agent2: there is no volume agent2-keys"),
        (lambda data: data["services"].pop("agent2"), "client: there is no service agent2"),
        (lambda data: data["services"]["agent1"]["command"].append("--prot"), "agent1: "),
        (lambda data: data["services"]["client"].update(depends_on=["agent9"]), "client: depends on agent9"),
    ],
)
def test_the_check_finds_what_is_wrong(compose: dict[str, Any], change: Any, said: str) -> None:
    data = copy.deepcopy(compose)
    change(data)
    assert any(problem.startswith(said) for problem in compose_problems(data))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("USER onebox\n", "", "as root"),
        (":3.11.9-slim-bookworm AS run", ":latest AS run", "pinned"),
        ("COPY src src", "COPY sources src", "not in the tree"),
        ("--from=build", "--from=built", "no such stage"),
        ("WORKDIR", "WORKDR", "unknown instruction"),
        ("HEALTHCHECK", "# HEALTHCHECK", "unknown instruction"),
    ],
)
def test_the_check_finds_what_is_wrong_with_an_image(old: str, new: str, said: str) -> None:
    text = DOCKERFILE.read_text()
    assert old in text
    assert any(said in problem for problem in image_problems(text.replace(old, new)))
