"""Keys on disk: made once, kept from others, and refused where others had a hand in them."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from zmq.utils import z85

from onebox.errors import UsageError
from onebox.pool.keys import key_files, keyring
from onebox.pool.keys.keyring import (
    NAME_LENGTH,
    AllowedClients,
    KnownAgent,
    allow_client,
    allowed_clients,
    clients_file,
    config_folder,
    fingerprint,
    forget_agent,
    full_address,
    identity,
    is_key,
    known_agent,
    known_agents,
    remember_agent,
    remove_client,
)
from onebox.wire import new_keys
from tests.kit import leaks


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own folder, which is not there yet."""
    path = tmp_path / "keys"
    monkeypatch.setenv("ONEBOX_CONFIG", str(path))
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_where_the_folder_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ONEBOX_CONFIG", "~/own")
    assert config_folder() == tmp_path / "own"
    monkeypatch.delenv("ONEBOX_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/there")
    assert config_folder() == Path("/there/onebox")
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_folder() == tmp_path / ".config/onebox"


def test_keys_are_made_once_for_this_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        client, agent = identity("client"), identity("agent")
    finally:
        os.umask(before)
    assert client != agent
    assert identity("client") == client
    assert is_key(client.public)
    assert mode(folder) == 0o700
    assert mode(folder / "client.key.json") == mode(folder / "agent.key.json") == 0o600
    assert client.secret not in repr(client)


def test_files_of_version_0_1_0_are_read_and_peers_with_unknown_fields_are_refused(folder: Path) -> None:
    public, secret = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6"
    folder.mkdir(mode=0o700)
    files = {
        "client.key.json": {"public": public, "secret": secret},
        "agents.json": [{"address": "lab-1:7171", "key": public, "host": "lab"}],
        "clients.json": [{"name": "ana@desk", "key": public}],
    }

    def write(more: dict[str, str]) -> None:
        for name, content in files.items():
            entries = [{**each, **more} for each in ([content] if isinstance(content, dict) else content)]
            path = folder / name
            path.write_text(json.dumps(entries[0] if isinstance(content, dict) else entries))
            path.chmod(0o600)

    write({})
    assert (identity("client").public, identity("client").secret) == (public, secret)
    assert known_agents() == (KnownAgent("lab-1:7171", public, "lab"),)
    assert [each.name for each in allowed_clients()] == ["ana@desk"]
    write({"since": "9.9.9"})
    assert identity("client").secret == secret
    for reads in (known_agents, allowed_clients):
        assert "unknown field `since`" in refused(reads)


def test_two_who_make_keys_at_once_have_the_same() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(identity("client").public)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("readers", [0o640, 0o604, 0o660])
def test_a_secret_that_others_can_read_is_refused(folder: Path, readers: int) -> None:
    identity("client")
    path = folder / "client.key.json"
    path.chmod(readers)
    assert f"chmod 600 {path}" in refused(lambda: identity("client"))
    path.chmod(0o600)
    identity("client")


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    identity("client")
    folder.chmod(0o777)
    for call in (lambda: identity("client"), known_agents, lambda: allow_client("ana", new_keys().public)):
        assert f"chmod 700 {folder}" in refused(call)
    folder.chmod(0o755)  # to see the names of files is no harm
    identity("client")


def test_a_list_that_others_can_write_to_is_refused() -> None:
    key = new_keys().public
    allow_client("ana", key)
    clients = AllowedClients()
    clients_file().chmod(0o622)
    assert "chmod 600" in refused(allowed_clients)
    assert clients.name(key) is None
    assert "chmod 600" in str(clients.problem)
    clients_file().chmod(0o644)
    assert clients.name(key) == "ana"
    assert clients.problem is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"public": "short", "secret": "short"}',
        b'{"public": 1, "secret": 2}',
        b'{"public": "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7", "secret": "' + b"0" * 40 + b'"}',
        b"[" * 5000,
        b" " * (key_files.MOST_BYTES + 1),
    ],
)
def test_a_damaged_file_is_one_clear_error(folder: Path, content: bytes) -> None:
    secret = identity("client").secret
    path = folder / "client.key.json"
    path.write_bytes(content)
    said = refused(lambda: identity("client"))
    assert str(path) in said
    assert "damaged" in said
    assert "0" * 40 not in said
    for name in ("clients.json", "agents.json"):
        (folder / name).write_bytes(content if content != b"[]" else b"[1]")
        (folder / name).chmod(0o600)
    assert "damaged" in refused(allowed_clients)
    assert "damaged" in refused(known_agents)
    assert "damaged" in refused(AllowedClients)
    assert secret not in said


def test_the_secret_of_another_key_is_damage(folder: Path) -> None:
    one, other = identity("client"), identity("agent")
    text = (folder / "client.key.json").read_text()
    (folder / "client.key.json").write_text(text.replace(one.secret, other.secret))
    assert "no pair of keys" in refused(lambda: identity("client"))


def test_what_is_no_file_or_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (folder / "client.key.json").mkdir(parents=True)
    assert "client.key.json" in refused(lambda: identity("client"))
    plain = tmp_path / "plain"
    plain.write_text("")
    monkeypatch.setenv("ONEBOX_CONFIG", str(plain))
    refused(lambda: identity("client"))


def test_another_writer_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_files, "_LOCK_S", 0.0)
    identity("client")
    with key_files.changing(clients_file()):
        assert "another onebox" in refused(lambda: allow_client("ana", new_keys().public))
    allow_client("ana", new_keys().public)


def test_agents_are_remembered_by_their_address() -> None:
    first, second = new_keys().public, new_keys().public
    assert known_agent("lab") is None
    remember_agent(KnownAgent("Lab", first, "lab.example"))
    remember_agent(KnownAgent("lab:7300", second, "lab.example"))
    assert known_agent("lab:7171") == known_agent("LAB") == KnownAgent("lab:7171", first, "lab.example")
    remember_agent(KnownAgent("lab", second, "lab.example"))
    assert [agent.key for agent in known_agents()] == [second, second]
    assert forget_agent("lab")
    assert not forget_agent("lab")
    assert [agent.address for agent in known_agents()] == ["lab:7300"]
    assert "not to be kept" in refused(lambda: remember_agent(KnownAgent("lab", "key", "host")))


@pytest.mark.parametrize(
    ("written", "full"),
    [("h", "h:7171"), ("H.x:80", "h.x:80"), ("[::1]", "[::1]:7171"), ("[fe80::1%eth0]:9", "[fe80::1%eth0]:9")],
)
def test_addresses(written: str, full: str) -> None:
    assert full_address(written) == full == full_address(full)


@pytest.mark.parametrize(
    "written", ["", "::1", "h:", "h:0", "h:65536", "h:x", "a b", "h/x", "[::1", "tcp://h", "h:1:2"]
)
def test_what_is_no_address(written: str) -> None:
    assert "HOST:PORT" in refused(lambda: full_address(written))


def test_clients_are_let_in_by_their_key() -> None:
    clients = AllowedClients()
    ana, ben = new_keys().public, new_keys().public
    assert clients.name(ana) is None
    assert allow_client("ana@desk", ana) == "ana@desk"
    assert clients.name(ana) == "ana@desk"
    assert clients.name(ben) is None
    assert allow_client("ben@desk", ben) == "ben@desk"
    assert len(clients) == 2
    assert remove_client("ana@desk")
    assert not remove_client("ana@desk")
    assert clients.name(ana) is None
    assert clients.name(ben) == "ben@desk"
    assert remove_client(fingerprint(ben))
    assert len(clients) == 0


def test_two_clients_never_have_one_name() -> None:
    first, second, third = (new_keys().public for _ in range(3))
    assert allow_client("ana", first) == "ana"
    assert allow_client("ana", second) == "ana (2)"
    assert allow_client("ana", third) == "ana (3)"
    assert allow_client("ana", second) == "ana (2)"  # it keeps the one that it has
    longest = "x" * NAME_LENGTH
    assert allow_client(longest, new_keys().public) == longest
    assert len(allow_client(longest, new_keys().public)) == NAME_LENGTH
    assert len(allowed_clients()) == 5


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31m", "x" * (NAME_LENGTH + 1)])
def test_a_name_that_would_steer_a_terminal_is_refused(name: str) -> None:
    assert "no name" in refused(lambda: allow_client(name, new_keys().public))
    assert "no public key" in refused(lambda: allow_client("ana", name))


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_fingerprints_tell_keys_apart(one: bytes, other: bytes) -> None:
    texts = [fingerprint(z85.encode(key).decode()) for key in (one, other)]
    assert (texts[0] == texts[1]) == (one == other)
    assert len(texts[0]) == 39


@given(st.text(max_size=45) | st.text(st.characters(max_codepoint=127), min_size=40, max_size=40))
@example("#" * 40)
def test_what_is_no_key_is_never_taken_for_one(text: str) -> None:
    try:
        whole = z85.encode(z85.decode(text.encode())) == text.encode() and len(text) == 40
    except Exception:  # whatever it says of what is no Z85
        whole = False
    assert is_key(text) == whole


def test_a_list_that_cannot_be_read_for_a_while_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an agent has no descriptor left at the moment in which the list changes."""
    monkeypatch.setattr(keyring, "AGAIN_S", 0.05)
    key = new_keys().public
    allow_client("ana@desk", key)
    clients = AllowedClients()
    allow_client("ben@desk", new_keys().public)
    with leaks.no_descriptors():
        assert clients.name(key) is None and "Too many open files" in str(clients.problem)
        time.sleep(0.1)
        assert clients.name(key) is None
    time.sleep(0.1)
    assert clients.name(key) == "ana@desk" and clients.problem is None
