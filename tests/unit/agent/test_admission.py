"""What fits into what is offered."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onebox.agent.admission import ClientLimits, Offered, Room, Share, all_room, fit, reach, settled, taken
from onebox.errors import UsageError
from onebox.wire.protocol.agents import Want


def gpu(number: int, memory: int = 8) -> Offered:
    return Offered(device=f"cuda:{number}", name="a GPU", memory_bytes=memory, threads=2)


CPU = Offered(device="cpu", name="a CPU", memory_bytes=100, threads=4)


def offers(*found: Offered) -> dict[str, Offered]:
    return {offer.device: offer for offer in found}


def test_a_gpu_is_leased_alone_or_by_memory() -> None:
    all_ = offers(gpu(0), gpu(1))
    whole, part = fit([Want("cuda"), Want("cuda", 1, 3)], all_room(all_), all_) or (None, None)
    assert whole == Share(device="cuda:0", threads=2, memory_bytes=8)
    assert part == Share(device="cuda:1", threads=1, memory_bytes=3)
    left = taken(all_room(all_), [part])
    assert left["cuda:1"] == Room(memory_bytes=5, threads=2)
    assert fit([Want("cuda:1")], left, all_) is None
    assert fit([Want("cuda:1", 0, 6)], left, all_) is None
    assert fit([Want("cuda:1", 0, 5)], left, all_) is not None


def test_a_share_of_a_gpu_has_a_least_size() -> None:
    all_ = offers(gpu(0, 6400), CPU)
    settled([Want("cuda", 0, 100), Want("cpu", 1, 1)], all_)
    for device in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match=r"99 bytes of .* is 100 bytes at least, as 64 workers may share a GPU"):
            settled([Want(device, 0, 99)], all_)


def test_cores_that_nobody_named_are_shared_equally() -> None:
    wants = settled([Want("cpu"), Want("cpu", 2), Want("cpu", 0, 7)], offers(CPU))
    assert wants == (Want("cpu", 1, 25), Want("cpu", 2, 50), Want("cpu", 1, 7))
    assert settled([Want("cpu")], offers(CPU)) == (Want("cpu", 4, 100),)


def test_memory_that_nobody_named_is_within_what_is_allowed() -> None:
    all_ = offers(gpu(0), gpu(1), CPU)
    assert settled([Want("cpu", 1), Want("cpu", 3)], all_, 60) == (Want("cpu", 1, 15), Want("cpu", 3, 45))
    assert settled([Want("cpu", 1), Want("cpu", 3, 20)], all_, 25) == (Want("cpu", 1, 5), Want("cpu", 3, 20))
    assert settled([Want("cuda"), Want("cuda:1")], all_, 6) == (Want("cuda", 0, 3), Want("cuda:1", 0, 3))
    assert settled([Want("cuda")], all_, 8) == (Want("cuda"),)  # exclusive, as all of it is allowed
    assert settled([Want("cpu", 1, 20)], all_, 10) == (Want("cpu", 1, 20),)  # which the limit then refuses


@pytest.mark.parametrize(
    ("wants", "what"),
    [
        ([], "a request for 0 devices; allowed are 1 to 256"),
        ([Want("cpu")] * 257, "257 devices"),
        ([Want("tpu")], "'tpu' is no device; allowed are cpu, cuda, sim, cuda:K and sim:K"),
        ([Want("cuda:01")], "no device"),
        ([Want("cpu", -1)], "-1 threads"),
        ([Want("cuda:7")], "cuda:7 is not offered; offered is cpu \\(100 bytes, 4 cores\\), cuda:0 \\(8 bytes"),
        ([Want("cuda", 0, 9)], "cuda with 9 bytes is more than is offered"),
        ([Want("cpu", 5)], "cpu with 5 threads is more than is offered: cpu \\(100 bytes"),
        ([Want("cpu", 3), Want("cpu", 3)], "do not fit together into what is offered, even with nothing leased"),
        ([Want("cpu")] * 5, "do not fit together"),
        ([Want("cuda:0"), Want("cuda:0")], "do not fit together"),
        ([Want("cuda"), Want("cuda", 0, 1)], "do not fit together"),
    ],
)
def test_what_can_never_be_had_is_refused(wants: list[Want], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        settled(wants, offers(CPU, gpu(0)))


def test_a_request_reaches_every_gpu_or_the_one_that_it_names() -> None:
    all_ = offers(CPU, gpu(0), gpu(1))
    assert reach([Want("cuda")], all_) == {"cuda:0", "cuda:1"}
    assert reach([Want("cuda:1"), Want("cpu")], all_) == {"cuda:1", "cpu"}


def test_an_emulated_device_is_never_given_for_a_gpu_nor_the_other_way_round() -> None:
    emulated = [Offered(device=f"sim:{number}", name="emulated", memory_bytes=4, threads=1) for number in range(2)]
    all_ = offers(gpu(0), *emulated)
    assert reach([Want("sim")], all_) == {"sim:0", "sim:1"}
    found = fit(settled([Want("sim"), Want("sim"), Want("cuda")], all_), all_room(all_), all_)
    assert found is not None
    assert [share.device for share in found] == ["sim:0", "sim:1", "cuda:0"]
    for wants in ([Want("cuda")] * 2, [Want("sim")] * 3):
        with pytest.raises(UsageError, match="do not fit together"):
            settled(wants, all_)


@pytest.mark.parametrize("bad", [{"device": "cuda"}, {"device": "sim"}, {"memory_bytes": 0}, {"threads": 0}])
def test_an_offer_of_nothing_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="an offer of"):
        Offered(**{"device": "cpu", "name": "", "memory_bytes": 1, "threads": 1, **bad})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [{"devices": -1}, {"lease_s": float("inf")}, {"grace_s": 29.0}, {"memory_bytes": -5}, {"grace_s": float("nan")}],
)
def test_limits_that_are_none_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=f"a limit of {next(iter(bad))}"):
        ClientLimits(**bad)  # type: ignore[arg-type]


def brute_force(wants: list[Want], room: dict[str, Room], all_: dict[str, Offered]) -> bool:
    """Tell whether there is any way to give wants what they want."""
    devices = list(all_)
    for choice in itertools.product(devices, repeat=len(wants)):
        left = {name: [each.memory_bytes, each.threads] for name, each in room.items()}
        good = True
        for want, name in zip(wants, choice, strict=True):
            others = [other for other, its in zip(wants, choice, strict=True) if its == name and other is not want]
            if want.device != name and (want.device != "cuda" or name == "cpu" or others):
                good = False
            need = want.memory_bytes or all_[name].memory_bytes
            good = good and left[name][0] >= need
            left[name][0] -= need
        if good:
            return True
    return False


@st.composite
def puzzles(draw: st.DrawFn) -> tuple[list[Want], dict[str, Room], dict[str, Offered]]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    all_ = offers(*(gpu(number, size) for number, size in enumerate(sizes)))
    free = {
        name: Room(memory_bytes=draw(st.integers(0, each.memory_bytes)), threads=each.threads)
        for name, each in all_.items()
    }
    some = st.builds(Want, st.sampled_from(["cuda", "cuda", *all_]), st.just(0), st.integers(0, 6))
    return draw(st.lists(some, min_size=1, max_size=4)), free, all_


@given(puzzles())
def test_shares_are_found_whenever_there_are_any(
    puzzle: tuple[list[Want], dict[str, Room], dict[str, Offered]],
) -> None:
    wants, free, all_ = puzzle
    shares = fit(wants, free, all_)
    assert (shares is not None) == brute_force(wants, free, all_)
    if shares is not None:
        left = taken(free, shares)
        assert all(room.memory_bytes >= 0 for room in left.values())
        for want, share in zip(wants, shares, strict=True):
            assert want.device in (share.device, "cuda")
            assert share.memory_bytes == (want.memory_bytes or all_[share.device].memory_bytes)
