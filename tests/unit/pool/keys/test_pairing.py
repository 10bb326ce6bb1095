"""Pairing: who has the code learns the other's key, and nobody else learns or changes anything."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from onebox.errors import PoolError, UsageError
from onebox.pool.keys.pairing import PairingListener, pair_with
from onebox.pool.keys.pairing_code import PairingCode, new_code, read_code
from onebox.wire import configure, new_keys
from onebox.wire.protocol.agents import PairReply, PairRequest

AGENT = PairReply("lab", new_keys().public)
CLIENT = PairRequest("ana@desk", new_keys().public)
JOIN_S = 60.0


class Waiting:
    """A door in a thread, and how it ended."""

    def __init__(self, code: PairingCode, take: Callable[[PairRequest], None] | None = None, **limits: float) -> None:
        self.taken: list[PairRequest] = []
        self.error: Exception | None = None
        self._take = self.taken.append if take is None else take
        self._limits = limits
        self.door = PairingListener(code, AGENT, bind="127.0.0.1", port=0)
        self.port = self.door.port
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            with self.door:
                self.door.wait(self._take, **self._limits)  # type: ignore[arg-type]
        except Exception as error:
            self.error = error

    def ended(self) -> str:
        """Wait for its end and return what it said."""
        self.thread.join(JOIN_S)
        assert not self.thread.is_alive()
        return "" if self.error is None else str(self.error)


@contextlib.contextmanager
def waiting(code: PairingCode, **options: object) -> Iterator[Waiting]:
    made = Waiting(code, **options)  # type: ignore[arg-type]
    yield made
    made.thread.join(JOIN_S)
    assert not made.thread.is_alive()


def failed(host: str, port: int, code: PairingCode, within_s: float = 10.0) -> str:
    with pytest.raises(PoolError) as caught:
        pair_with(host, port, code, CLIENT, within_s=within_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the code


@given(st.binary(min_size=16, max_size=16), st.data())
def test_a_code_survives_how_people_write(secret: bytes, data: st.DataObject) -> None:
    code = PairingCode(secret)
    text = code.text
    assert len(text.split("-")) == 7
    for written in (text, text.lower(), text.replace("-", ""), f"  {text.replace('-', ' ')}\n", text.replace("O", "0")):
        assert read_code(written) == code
    # one wrong letter is told, but for one time in 256
    place = data.draw(st.sampled_from([at for at, letter in enumerate(text[:-1]) if letter != "-"]))
    other = data.draw(
        st.sampled_from([letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567" if letter != text[place]])
    )
    with contextlib.suppress(UsageError):
        assert read_code(text[:place] + other + text[place + 1 :]) != code


def test_most_slips_are_told() -> None:
    text = new_code().text
    places = [at for at, letter in enumerate(text[:-1]) if letter != "-"]
    told = 0
    for place in places:
        try:
            read_code(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
        except UsageError:
            told += 1
    assert told >= len(places) - 3


@given(st.text(max_size=40))
def test_what_is_no_code_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_code(text)
    assert len(text) < 8 or text not in str(caught.value)


def test_keys_of_a_code() -> None:
    code, other = new_code(), new_code()
    assert code.agent_keys == read_code(code.text).agent_keys
    assert len({keys.secret for one in (code, other) for keys in (one.agent_keys, one.client_keys)}) == 4
    assert code.text not in repr(code)


# ---- both sides


def test_both_learn_the_other_key() -> None:
    code = new_code()
    with waiting(code) as door:
        assert pair_with("127.0.0.1", door.port, read_code(code.text), CLIENT) == AGENT
        assert door.ended() == ""
    assert door.taken == [CLIENT]


def test_by_name_and_over_ipv6_where_there_is_some() -> None:
    code = new_code()
    with waiting(code) as door:
        assert pair_with("localhost", door.port, code, CLIENT) == AGENT
    try:
        six = PairingListener(code, AGENT, bind="::1", port=0)
    except UsageError:
        pytest.skip("this host has no IPv6")
    thread = threading.Thread(target=lambda: six.wait(lambda _pair: None))
    thread.start()
    assert pair_with("::1", six.port, code, CLIENT) == AGENT
    thread.join(JOIN_S)
    six.close()


def test_a_wrong_code_is_told_and_the_right_one_still_works() -> None:
    code = new_code()
    with waiting(code) as door:
        for _ in range(3):
            assert "did not take the code" in failed("127.0.0.1", door.port, new_code())
        assert not door.taken
        pair_with("127.0.0.1", door.port, code, CLIENT)
    assert door.ended() == ""


def test_who_tries_too_often_ends_it() -> None:
    with waiting(new_code(), attempts=2) as door:
        for _ in range(2):
            failed("127.0.0.1", door.port, new_code())
        assert "2 attempts" in door.ended()
    assert not door.taken


def test_a_code_works_once() -> None:
    code = new_code()
    with waiting(code) as door:
        pair_with("127.0.0.1", door.port, code, CLIENT)
        assert door.ended() == ""
        assert "onebox pair accept" in failed("127.0.0.1", door.port, code)
    assert door.taken == [CLIENT]


def test_a_code_is_good_for_some_time_only() -> None:
    with waiting(new_code(), good_for_s=0.05) as door:
        assert "nobody came" in door.ended()


def test_half_a_code_is_none() -> None:
    """To have the agent's public key alone is not enough: a client proves that it has the client's secret."""
    code = new_code()
    with waiting(code, attempts=1) as door:
        context = zmq.Context()
        channel = context.socket(zmq.DEALER)
        configure(channel, new_keys(), server_key=code.agent_keys.public)
        channel.setsockopt(zmq.RECONNECT_IVL, -1)
        channel.connect(f"tcp://127.0.0.1:{door.port}")
        channel.send(b"anything")
        assert "1 attempts" in door.ended()
        channel.close(0)
        context.term()
    assert not door.taken


def test_who_has_the_code_and_speaks_otherwise() -> None:
    code = new_code()
    with waiting(code) as door:
        with pytest.raises(PoolError, match="did not take"):
            pair_with("127.0.0.1", door.port, code, PairRequest("ana\n", "no key"))
        assert "same onebox" in door.ended()
    assert not door.taken


def test_what_cannot_be_kept_is_not_answered() -> None:
    def full(_pair: PairRequest) -> None:
        raise UsageError("no room")

    code = new_code()
    with waiting(code, take=full) as door:
        assert failed("127.0.0.1", door.port, code)
        assert door.ended() == "no room"


def test_a_scan_of_ports_is_no_attempt() -> None:
    code = new_code()
    with waiting(code, attempts=1) as door:
        for _ in range(3):
            socket.create_connection(("127.0.0.1", door.port), timeout=30).close()
        assert pair_with("127.0.0.1", door.port, code, CLIENT) == AGENT


def test_who_listens_without_answering() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        assert "does not answer" in failed("127.0.0.1", mute.getsockname()[1], new_code(), within_s=0.3)


def test_a_host_whose_first_address_is_mute_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    code = new_code()
    with waiting(code) as door, socket.create_server(("127.0.0.3", door.port)):
        places = [(None, None, None, "", (f"127.0.0.{last}", 0)) for last in (2, 3, 1)]  # .2 refuses
        monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: places)
        assert pair_with("lab", door.port, code, CLIENT, within_s=3.0) == AGENT


def test_there_is_no_such_host() -> None:
    assert "no host nowhere.invalid" in failed("nowhere.invalid", 1, new_code())


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(UsageError, match="cannot listen on"):
        PairingListener(new_code(), AGENT, bind="127.0.0.1", port=other.getsockname()[1])
    with pytest.raises(UsageError, match="cannot listen on"):
        PairingListener(new_code(), AGENT, bind="192.0.2.1", port=0)
