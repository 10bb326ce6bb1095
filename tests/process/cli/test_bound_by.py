"""What a script is bound by is said at its end, with the line that waits most."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onebox.report.figures.chrome_trace import Timeline
from tests.process.cli.test_run_command import run, script

READS = """
import torch
net = torch.nn.Linear(1024, 1024, device="cuda")
x = torch.randn(1024, 1024, device="cuda")
for step in range(20):
    out = net(x).sum()
    total = out.item()
"""

UPLOADS = """
import torch
images = torch.ones(32, 3, 256, 256)
for step in range(20):
    first = images.cuda()[0, 0, 0, 0].item()
"""

SLOW = """
import torch
x = torch.randn(512, 512, device="cuda")
for step in range(100):
    x = (x @ x).tanh()
print(x.sum().item())
"""

TRAINS = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
x = torch.ones(4, device="cuda")
for step in range(3):
    dist.all_reduce(x)
    seen = x.sum().item()
dist.destroy_process_group()
"""


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_the_line_that_reads_most_is_named(tmp_path: Path) -> None:
    script(tmp_path, READS)
    done = run(tmp_path, "--verbose", "script.py")
    assert (done.returncode, done.stdout) == (0, "")
    line = done.stderr.splitlines()[-1]  # on a slow machine others have come before
    assert line.startswith("onebox: ") and re.search(r"busy cuda:0 \d+ %: ", line)
    if "waited for values" in line:  # unless the device or the script took still longer
        assert ", most at script.py:7 total = out.item() (" in line


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_uploads_are_named(tmp_path: Path) -> None:
    script(tmp_path, UPLOADS)
    done = run(tmp_path, "--verbose", "script.py")
    assert done.returncode == 0
    said = r"onebox: .*, bound by uploads: 480 MiB took \d+ %; busy cuda:0 \d+ %: "
    assert re.match(said, done.stderr.splitlines()[-1]), done.stderr


@pytest.mark.feature("Monitoring: Hear what a script is bound by")
def test_a_device_is_named_and_one_that_is_idle(tmp_path: Path) -> None:
    script(tmp_path, SLOW.replace("import torch", "import torch\ntorch.ones(1, device='cuda:1')"))
    done = run(tmp_path, "--verbose", "script.py", pool=("--pool", "cpu@0.1,cpu", "--threads", "1"))
    assert done.returncode == 0
    said = r"onebox: .*, bound by the device cuda:0; busy cuda:0 \d+ %, cuda:1 \d+ %: give cuda:1 more of the work"
    assert re.fullmatch(said, done.stderr.splitlines()[-1]), done.stderr


def test_a_short_script_is_not_commented(tmp_path: Path) -> None:
    script(tmp_path, "import torch\nprint(torch.ones(2).cuda().sum().item())\n")
    done = run(tmp_path, "script.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0\n", "")


def test_one_rank_tells_for_all(tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    pool = ("--pool", "cpu*2", "--threads", "1")
    done = run(tmp_path, "--verbose", "torchrun", "--nproc-per-node", "gpu", "script.py", pool=pool)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "busy cuda:" in line]
    assert lines, done.stderr
    assert all(line.startswith("onebox: rank 0: ") and "busy cuda:0 " in line for line in lines), done.stderr


# ---- timelines


@pytest.mark.feature("Monitoring: Write a timeline of a script")
@pytest.mark.parametrize(("last", "status"), [("", 0), ("1 / 0\n", 1)], ids=["ends", "fails"])
def test_a_timeline_has_the_lines_of_the_script_also_where_it_fails(last: str, status: int, tmp_path: Path) -> None:
    script(tmp_path, UPLOADS + "    images.cuda(1)\n" + last)
    done = run(tmp_path, "--profile", "trace.json", "script.py", pool=("--pool", "cpu*2", "--threads", "1"))
    assert done.returncode == status
    said = "onebox: the timeline is in trace.json, for ui.perfetto.dev or chrome://tracing"
    assert said in done.stderr.splitlines()
    tracks = Timeline.from_json((tmp_path / "trace.json").read_bytes()).processes
    assert list(tracks) == ["script", "cuda:0", "cuda:1"]
    spans = tracks["script"]["MainThread"]
    uploads = [span.args["line"] for span in spans if span.category == "upload" and span.args["size_bytes"] == 24 << 20]
    assert uploads == ["script.py:5", "script.py:6"] * 20
    waits = {(span.args["line"], span.args["text"]) for span in spans if span.category == "wait" and span.args}
    assert waits == {("script.py:5", "first = images.cuda()[0, 0, 0, 0].item()")}
    assert any(span.name.endswith("up to script.py:5") for span in tracks["cuda:0"]["operators"])


@pytest.mark.feature("Monitoring: Write a timeline of a script")
def test_each_rank_writes_a_timeline_of_its_own(tmp_path: Path) -> None:
    script(tmp_path, TRAINS)
    pool = ("--pool", "cpu*2", "--threads", "1")
    line = ("--profile", "trace.json", "torchrun", "--nproc-per-node", "gpu", "script.py")
    done = run(tmp_path, *line, pool=pool)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.glob("*.json"))
    assert files == ["trace-rank-0.json", "trace-rank-1.json"]
    for rank, file in enumerate(files):
        tracks = Timeline.from_json((tmp_path / file).read_bytes()).processes
        assert list(tracks) == ["script", f"cuda:{rank}"]
        waits = [span.args["line"] for span in tracks["script"]["MainThread"] if span.category == "wait" and span.args]
        assert "script.py:9" in waits


def test_a_timeline_needs_a_folder_that_exists(tmp_path: Path) -> None:
    script(tmp_path, "print('begun')\n")
    done = run(tmp_path, "--profile", "there/trace.json", "script.py")
    said = "onebox: --profile there/trace.json: a file in an existing folder is needed\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
