"""What a pool is asked for, from a person's words to what is leased."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import UsageError
from onebox.pool.spec import AgentPart, LocalPart, Part, RayPart, asked_parts, parse_hosts, parse_spec, wants
from onebox.sizes import Budgets
from onebox.wire.protocol.agents import Offer, Want

CPU = Offer("cpu", "cores", 8 << 30, 6, 8 << 30)
CARDS = tuple(Offer(f"cuda:{index}", "card", 1 << 30, 2, 1 << 30) for index in (0, 1, 3))
SIMS = tuple(Offer(f"sim:{index}", "emulated", 1 << 30, 1, 1 << 30) for index in (0, 1))


def agent(address: str, *devices: str) -> AgentPart:
    return AgentPart(address=address, devices=devices or ("auto",))


def local(devices: str) -> LocalPart:
    return LocalPart(devices=devices)


@pytest.mark.feature("Pools: Open devices by a text, a file or the environment")
@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("auto", [local("auto")]),
        ("cuda:0,cpu*2", [local("cuda:0,cpu*2")]),
        ("cpu@0.5,sim*4@2", [local("cpu@0.5,sim*4@2")]),
        ("hostA", [agent("hostA")]),
        ("hostA,hostB:7272", [agent("hostA"), agent("hostB:7272")]),
        ("hostA/cuda:0, hostA/cpu*2", [agent("hostA", "cuda:0", "cpu*2")]),
        ("cpu,hostB/cuda", [local("cpu"), agent("hostB", "cuda")]),
        ("hostB/cuda*2,cpu,sim", [agent("hostB", "cuda*2"), local("cpu,sim")]),
        ("10.0.0.7:7000/cpu,[fe80::1]:7000", [agent("10.0.0.7:7000", "cpu"), agent("[fe80::1]:7000")]),
        ("127.0.0.1:1,127.0.0.1:2", [agent("127.0.0.1:1"), agent("127.0.0.1:2")]),
        ("hostA,HOSTA:7171/cpu", [agent("hostA", "auto", "cpu")]),
        ("ray", [RayPart(spec="ray")]),
        ("ray://head:10001?gpus=4", [RayPart(spec="ray://head:10001?gpus=4")]),
        ("raynor,cpu-farm,cuda.lab,autobahn", [agent(name) for name in ("raynor", "cpu-farm", "cuda.lab", "autobahn")]),
    ],
)
def test_parts_in_the_order_of_the_specification(spec: str, expected: list[Part]) -> None:
    assert parse_spec(spec) == tuple(expected)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("host A", r"not understood at 'host A'; allowed: 'auto'.*'hostA/cuda:0'.*NAME\.toml"),
        ("cpu,hostA:0", "not understood at 'hostA:0'"),
        ("hostA:70000", "not understood at 'hostA:70000'"),
        ("hostA/", "it asks for ''; allowed: of another host cpu, cpu"),
        ("hostA/sim@2", "it asks for 'sim@2'"),
        ("hostA/cpu@0.5", "it asks for 'cpu@0.5'"),
        ("hostA/cuda:0*2", "it asks for"),
        ("hostA/cpu*0", "it asks for"),
        ("[::1", "not understood"),
        ("hostA,hostB,hostA/cpu", "devices of hostA in two places; name those of one host side by side"),
        ("hostA,cpu,hosta:7171", "devices of hostA in two places"),
        ("cpu,hostA,cpu", "devices of this machine in two places"),
    ],
)
def test_what_is_not_understood_is_named_with_what_is_allowed(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_spec(spec)


@pytest.mark.feature("Pools: Open devices by a text, a file or the environment")
def test_the_environment_says_what_auto_is() -> None:
    def read(name: str) -> str:
        return {"lab.toml": '[[hosts]]\naddress = "hostA"'}[name]

    assert asked_parts("auto", {}, read) == (local("auto"),)
    assert asked_parts("auto", {"ONEBOX_POOL": "  "}, read) == (local("auto"),)
    assert asked_parts(" auto ", {"ONEBOX_POOL": "hostB,cpu"}, read) == (agent("hostB"), local("cpu"))
    assert asked_parts("cpu", {"ONEBOX_POOL": "hostB,cpu"}, read) == (local("cpu"),)
    assert asked_parts("auto", {"ONEBOX_POOL": "lab.toml"}, read) == (agent("hostA"),)


def test_a_file_that_cannot_be_read() -> None:
    def read(name: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", name)

    with pytest.raises(UsageError, match=r"pool 'lab/two.toml' cannot be read: .*No such file"):
        asked_parts("lab/two.toml", {}, read)


FILE = """
[[hosts]]
address = "hostA:7272"
devices = ["cuda:0", "cpu*2"]
memory = "8GiB"
threads = 4

[[hosts]]
address = "local"
devices = "cpu*2"
memory = 1000

[[hosts]]
address = "hostB"
"""


@pytest.mark.feature("Pools: Open devices by a text, a file or the environment")
def test_a_file_of_hosts() -> None:
    first = AgentPart(address="hostA:7272", devices=("cuda:0", "cpu*2"), threads=4, memory=Budgets(every=8 << 30))
    assert parse_hosts(FILE, "x") == (first, LocalPart(devices="cpu*2", memory=Budgets(every=1000)), agent("hostB"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = [", "'x.toml' is no TOML"),
        ("", r"missing required field `hosts`.*allowed are tables \[\[hosts\]\] with address"),
        ("hosts = []", "length >= 1"),
        ("[[hosts]]\ndevices = 'cpu'", "missing required field `address`"),
        ("[[hosts]]\naddress = 'a'\ndevice = 'cpu'", r"unknown field `device`.*\$\.hosts"),
        ("colour = 1\n[[hosts]]\naddress = 'a'", "unknown field `colour`"),
        ("[[hosts]]\naddress = 'a'\nthreads = 0", "threads"),
        ("[[hosts]]\naddress = 'a'\nmemory = 'much'", "memory of a much: allowed are bytes"),
        ("[[hosts]]\naddress = 'a'\nmemory = 0", "memory of a 0: allowed are bytes"),
        ("[[hosts]]\naddress = 'a'\nmemory = ['1k', 'much']", "memory of a much: allowed are bytes"),
        ("[[hosts]]\naddress = 'a'\nmemory = []", "memory of a .*a list of them"),
        ("[[hosts]]\naddress = 'a b'", "'a b' is no address of an agent"),
        ("[[hosts]]\naddress = 'a'\ndevices = 'sim@2'", "it asks for 'sim@2'"),
        ("[[hosts]]\naddress = 'a'\ndevices = []", "wants no device of a"),
        ("[[hosts]]\naddress = 'a'\n[[hosts]]\naddress = 'a:7171'", "devices of a in two places"),
    ],
)
def test_files_that_are_wrong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_hosts(text, "x.toml")


@pytest.mark.parametrize(
    ("devices", "offers", "expected"),
    [
        (["auto"], [CPU, *CARDS], ["cuda:0", "cuda:1", "cuda:3"]),
        (["auto"], [CPU], ["cpu"] * 4),
        (["cuda"], [CPU, *CARDS], ["cuda:0", "cuda:1", "cuda:3"]),
        (["cuda:3", "cpu*2"], [CPU, *CARDS], ["cuda:3", "cpu", "cpu"]),
        (["cuda*2"], CARDS, ["cuda", "cuda"]),
        (["sim*2", "cuda:3"], [*CARDS, *SIMS], ["sim", "sim", "cuda:3"]),
        (["sim"], [*CARDS, *SIMS], ["sim:0", "sim:1"]),
        (["sim:1"], SIMS, ["sim:1"]),
    ],
)
def test_what_is_leased(devices: list[str], offers: list[Offer], expected: list[str]) -> None:
    part = AgentPart(address="a", devices=tuple(devices), threads=3, memory=Budgets(every=99))
    assert wants(part, offers) == tuple(Want(device, 3, 99) for device in expected)


def test_each_device_that_is_leased_may_have_its_own_budget() -> None:
    part = AgentPart(address="a", devices=("cuda:3", "cpu*2"), threads=3, memory=Budgets(listed=(7, 8, 9)))
    assert wants(part, [CPU, *CARDS]) == (Want("cuda:3", 3, 7), Want("cpu", 3, 8), Want("cpu", 3, 9))
    with pytest.raises(UsageError, match="memory of 3 devices, but a has 2"):
        wants(replace(part, devices=("cpu*2",)), [CPU, *CARDS])


def test_cpu_workers_share_the_cores() -> None:
    part = AgentPart(address="a", devices=("cuda:0", "cpu*3"))
    assert wants(part, [CPU, *CARDS]) == (Want("cuda:0"), *[Want("cpu", 2)] * 3)
    assert wants(AgentPart(address="a", devices=("cpu*9",)), [CPU]) == (Want("cpu", 1),) * 9


@pytest.mark.parametrize(
    ("devices", "offers", "message"),
    [
        (["cuda:2"], CARDS, "hostA has no cuda:2 to lease; it offers cuda:0, cuda:1, cuda:3"),
        (["cuda"], [CPU], "hostA has no cuda to lease; it offers cpu"),
        (["cuda*4"], CARDS, "no cuda"),
        (["sim*4"], [*CARDS, *SIMS], "no sim"),
        (["cpu"], CARDS, "no cpu to lease"),
        (["auto"], [], "it offers nothing"),
        (["cuda", "cuda:1"], CARDS, "cuda:1 of hostA is asked for twice"),
    ],
)
def test_what_cannot_be_leased(devices: list[str], offers: list[Offer], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wants(AgentPart(address="hostA", devices=tuple(devices)), offers)


HOSTS = st.from_regex(r"(?!auto|cpu|cuda|sim|ray)[a-z][a-z0-9-]{0,8}(:[1-9][0-9]{0,3})?", fullmatch=True)
DEVICES = st.sampled_from(["auto", "cpu", "cpu*3", "cuda", "cuda:7", "cuda*2"])
HERE = st.sampled_from(["cpu", "cpu*2", "cuda:1", "sim@2"])


@given(st.lists(st.tuples(HOSTS, st.lists(DEVICES, min_size=1, max_size=3)), max_size=4), st.lists(HERE, max_size=3))
def test_a_specification_is_its_parts(hosts: list[tuple[str, list[str]]], here: list[str]) -> None:
    """Written down and read again, hosts and devices keep their order, whatever stands beside them."""
    unlike = {name.removesuffix(":7171"): devices for name, devices in hosts}
    words = [*here, *(f"{name}/{device}" for name, devices in unlike.items() for device in devices)]
    if not words:
        return
    expected: list[Part] = [local(",".join(here))] if here else []
    expected += [agent(name, *devices) for name, devices in unlike.items()]
    assert parse_spec(" , ".join(words)) == tuple(expected)


@given(st.text(alphabet="acdhopu:*/,.@[]0179 -", max_size=24))
def test_any_text_is_parts_or_one_clear_error(text: str) -> None:
    try:
        parts = parse_spec(text)
    except UsageError as error:
        assert repr(text) in str(error)
    else:
        assert parts


@given(st.text(max_size=40))
def test_any_file_is_hosts_or_one_clear_error(text: str) -> None:
    for content in (text, f"[[hosts]]\naddress = {text!r}"):
        try:
            assert parse_hosts(content, "some.toml")
        except UsageError as error:
            assert str(error)


@pytest.mark.parametrize("spec", ["", ",", "lab1,,lab2", "lab1,"])
def test_nothing_is_no_part(spec: str) -> None:
    with pytest.raises(UsageError, match=f"^pool '{spec}' names nothing"):
        parse_spec(spec)


def test_a_file_that_is_not_there_is_told_with_who_named_it() -> None:
    def missing(name: str) -> str:
        raise FileNotFoundError(2, "No such file or directory", name)

    with pytest.raises(UsageError, match=r"^pool 'lab\.toml' cannot be read: No such file or directory$"):
        asked_parts("lab.toml", {}, missing)
    with pytest.raises(UsageError, match=r"^pool 'lab\.toml', which ONEBOX_POOL names, cannot be read"):
        asked_parts("auto", {"ONEBOX_POOL": "lab.toml"}, missing)
