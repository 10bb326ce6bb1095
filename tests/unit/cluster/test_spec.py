"""What a pool on a Ray cluster is asked for, and what of it becomes of Ray's resources."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.cluster.spec import (
    Bundle,
    RayNode,
    RayRequest,
    bundles,
    describe_bundles,
    describe_nodes,
    fair_threads,
    host_names,
    parse_ray,
    selectors,
)
from onebox.errors import UsageError

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "clusters.md"

PARTS = {"cuda", "cpu", "pack", "spread", "type", "memory", "threads", "wait"}


def node(
    cores: float, gpus: float = 0, gpu_type: str = "", host: str = "a", address: str = "10.0.0.1", gpu_gib: int = 0
) -> RayNode:
    resources = {"CPU": cores, "memory": float(8 << 30), "object_store_memory": 1e9, f"node:{address}": 1.0}
    if gpus:
        resources |= {"GPU": gpus, f"accelerator_type:{gpu_type}": 1.0}
    return RayNode(id=host, host=host, address=address, resources=resources, gpu_bytes=gpu_gib << 30)


def asked(spec: str, *nodes: RayNode) -> list[Bundle]:
    return bundles(parse_ray(spec), nodes)


# ---- the specification


def test_the_name_alone_asks_for_everything() -> None:
    assert parse_ray("ray") == RayRequest(spec="ray")


def test_everything_can_be_said() -> None:
    found = parse_ray("ray://head.lab:10002/cuda*4+cpu*2/spread/type=A100-40G/memory=1.5g/threads=3/wait=5")
    assert found.address == ("head.lab", 10002)
    assert found.devices == (("cuda", 4), ("cpu", 2))
    assert (found.strategy, found.gpu_type, found.threads, found.wait_s) == ("SPREAD", "A100-40G", 3, 5)
    assert found.memory_bytes == 3 << 29


@pytest.mark.parametrize(
    ("spec", "address"),
    [
        ("ray://head", ("head", 10001)),
        ("ray://10.0.0.1:1/cpu", ("10.0.0.1", 1)),
        ("ray://[fd00::1]:65535/cpu", ("fd00::1", 65535)),
        ("ray://[::1]", ("::1", 10001)),
    ],
)
def test_the_address_of_the_head(spec: str, address: tuple[str, int]) -> None:
    assert parse_ray(spec).address == address


def test_keywords_hold_where_the_specification_says_nothing() -> None:
    said = parse_ray("ray/cpu/threads=2/memory=1k", threads=7, memory_bytes=9)
    assert (said.threads, said.memory_bytes) == (2, 1024)
    unsaid = parse_ray("ray/cpu", threads=7, memory_bytes=9)
    assert (unsaid.threads, unsaid.memory_bytes) == (7, 9)


@pytest.mark.parametrize(
    "spec",
    [
        "ray/", "ray:", "ray:head", "ray://", "ray://head:0", "ray://head:65536", "ray://head:port", "ray://a b",
        "rays", "ray//cpu", "ray/gpu", "ray/cpu*0", "ray/cpu*-1", "ray/cpu*", "ray/cpu+", "ray/cpu,cuda", "ray/cuda:0",
        "ray/strict", "ray/type=", "ray/type=a b", "ray/speed=1", "ray/cpu@0.5",
    ],
)  # fmt: skip
def test_what_is_not_understood_is_named_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(UsageError, match=r"is not understood at .*; allowed: 'ray' or"):
        parse_ray(spec)


@pytest.mark.parametrize("spec", ["ray/cpu/cuda", "ray/spread/pack", "ray/wait=1/wait=2"])
def test_nothing_is_said_twice(spec: str) -> None:
    with pytest.raises(UsageError, match="allowed is one of them"):
        parse_ray(spec)


@pytest.mark.parametrize(
    "spec",
    ["ray/threads=0", "ray/threads=x", "ray/threads=٣", "ray/wait=0", "ray/wait=1e3", "ray/memory=0", "ray/memory=x",
     "ray/memory=1q", "ray/threads=" + "9" * 5000, "ray/threads="],
)  # fmt: skip
def test_numbers_have_bounds(spec: str) -> None:
    with pytest.raises(UsageError, match=r"(threads|wait|memory)=.*allowed"):
        parse_ray(spec)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse_ray("ray" + text)


def test_the_page_about_clusters_names_pools_that_are_understood() -> None:
    named = re.findall(r"(?:`|--pool )(ray(?:://[a-z0-9:]+)?(?:/[a-z0-9*+=]+)*)(?=[`\s])", PAGE.read_text())
    assert {"ray", "ray/cuda*2/spread", "ray://head:10001/cuda*4"} <= set(named)
    for spec in named:
        parse_ray(spec)
    for part in re.findall(r"^\| (`.*?`) \|", PAGE.read_text(), re.MULTILINE):
        for each in re.findall("`(.*?)`", part):
            parse_ray(f"ray/{each}" if each.split("=")[0].split("*")[0] in PARTS else "ray")


# ---- what Ray is asked for


def test_by_default_all_gpus_each_with_a_core() -> None:
    found = asked("ray", node(8, 2, "T4"), node(4), node(8, 1, "A100"))
    assert found == [Bundle(kind="cuda", threads=1, resources={"CPU": 1, "GPU": 1})] * 3


def test_without_gpus_every_node_gives_a_worker_with_its_cores() -> None:
    found = asked("ray", node(8), node(0, host="b"), node(4.5, host="c", address="10.0.0.3"))
    assert [(bundle.threads, bundle.resources) for bundle in found] == [
        (8, {"CPU": 8, "node:10.0.0.1": 0.001}),
        (4, {"CPU": 4, "node:10.0.0.3": 0.001}),
    ]


def test_threads_of_a_node_are_at_most_its_cores() -> None:
    assert [bundle.threads for bundle in asked("ray/threads=6", node(8), node(4))] == [6, 4]


def test_a_type_of_gpu_is_asked_for_by_its_name() -> None:
    [one, two] = asked("ray/cuda/type=T4", node(8, 2, "T4"), node(8, 1, "A100"))
    assert one == two
    assert one.resources == {"CPU": 1, "GPU": 1, "accelerator_type:T4": 0.001}


def test_a_number_is_asked_for_even_where_it_is_not_there_yet() -> None:
    assert len(asked("ray/cuda*4", node(8))) == 4  # a cluster may grow


@pytest.mark.parametrize("spec", ["ray/type=H100", "ray/cuda/type=H100"])
def test_all_of_none_is_refused_with_what_the_cluster_has(spec: str) -> None:
    wrong = r"all GPUs of type H100 of the cluster, which has none: 1 node, a \(10.0.0.1\): 8 CPU, 2 GPU, type T4"
    with pytest.raises(UsageError, match=wrong):
        asked(spec, node(8, 2, "T4"))
    with pytest.raises(UsageError, match="all GPUs of the cluster, which has none"):
        asked("ray/cuda", node(8))


def test_a_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="neither GPUs nor cores"):
        asked("ray", node(0))


def test_memory_is_reserved_for_cpu_workers_and_not_for_gpus() -> None:
    gpu, cpu = asked("ray/cuda*1+cpu*1/memory=1g", node(8, 2, "T4"))
    assert "memory" not in gpu.resources
    assert cpu.resources["memory"] == 1 << 30


def test_gpus_with_too_little_memory_are_left_out() -> None:
    """Of those whose memory is known; the others are looked at when Ray has given them."""
    nodes = [
        node(8, 2, "T4", host="small", gpu_gib=16),
        node(8, 4, "A100", host="large", gpu_gib=80),
        node(8, 1, "L4", host="unknown"),
    ]
    request = parse_ray("ray/cuda+cpu*1/memory=40g")
    wanted = bundles(request, nodes)
    assert [bundle.kind for bundle in wanted] == ["cuda"] * 5 + ["cpu"]
    assert selectors(wanted, request, nodes) == [{"ray.io/node-id": "!in(small)"}] * 5 + [{}]
    modest = parse_ray("ray/cuda*2/memory=16g")
    assert selectors(bundles(modest, nodes), modest, nodes) is None
    by_cpu = parse_ray("ray/cpu*2/memory=40g")
    assert selectors(bundles(by_cpu, nodes), by_cpu, nodes) is None


@pytest.mark.parametrize("spec", ["ray/memory=40g", "ray/cuda/memory=40g", "ray/cuda*1/memory=40g"])
def test_where_all_gpus_are_too_small_that_is_said_with_what_they_have(spec: str) -> None:
    with pytest.raises(UsageError, match=r"GPUs with 40 GiB of the cluster, which has none: .* 16 GiB on each GPU"):
        asked(spec, node(8, 2, "T4", gpu_gib=16))


def test_cpu_workers_leave_a_core_to_each_gpu() -> None:
    found = asked("ray/cuda*2+cpu*1", node(8, 2, "T4"))
    assert [(bundle.kind, bundle.threads) for bundle in found] == [("cuda", 1), ("cuda", 1), ("cpu", 6)]


@pytest.mark.parametrize(
    ("cores", "workers", "threads"),
    [([64, 64], 2, 64), ([64, 64], 3, 32), ([64, 32], 2, 32), ([3], 2, 1), ([2, 2], 9, 1), ([], 1, 1), ([0], 1, 1)],
)
def test_threads_are_shared_fairly(cores: list[int], workers: int, threads: int) -> None:
    assert fair_threads(cores, workers) == threads


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 60))
def test_a_fair_share_fits_and_a_larger_one_does_not(cores: list[int], workers: int) -> None:
    share = fair_threads(cores, workers)
    assert share == 1 or sum(free // share for free in cores) >= workers
    assert sum(free // (share + 1) for free in cores) < workers


# ---- the page


def test_the_manifest_and_the_scripts_of_the_page_can_be_read() -> None:
    yaml = pytest.importorskip("yaml", reason="comes with Ray")
    text = PAGE.read_text()
    [manifest] = (yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    assert manifest["kind"] == "RayCluster"
    groups = [manifest["spec"]["headGroupSpec"], *manifest["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # as KubeRay wants them
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
    scripts = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
        first = next(number for number, line in enumerate(script.splitlines()) if not line.startswith("#"))
        assert "#SBATCH" not in "\n".join(script.splitlines()[first:])  # sbatch reads no further


# ---- for a person


def test_descriptions() -> None:
    assert describe_bundles(asked("ray/cuda*2+cpu*1/type=T4", node(8, 2, "T4"))) == (
        "2 x (1 CPU, 1 GPU, type T4) and 1 x (6 CPU)"
    )
    assert describe_bundles(asked("ray", node(8))) == "1 x (8 CPU, on 10.0.0.1)"
    assert describe_nodes([]) == "0 nodes"
    assert describe_nodes([node(2), node(0.5, 1, "T4", "b", "10.0.0.2")]) == (
        "2 nodes, a (10.0.0.1): 2 CPU, 8 GiB of memory; b (10.0.0.2): 0.5 CPU, 1 GPU, type T4, 8 GiB of memory"
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["1", "2", "3"])), max_size=8))
def test_hosts_are_called_the_same_only_if_they_are(nodes: list[tuple[str, str]]) -> None:
    names = host_names(nodes)
    assert len(set(names)) == len(set(nodes))
    assert all(name.startswith(host) for name, (host, _) in zip(names, nodes, strict=True))
