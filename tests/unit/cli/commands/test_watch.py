"""``onebox watch``: how a browser is told of the page."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from onebox.cli.commands import watch as command
from onebox.cli.options.agents import WatchConfig


def test_no_command_line_of_a_browser_has_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    opened: list[tuple[str, str, int, int]] = []

    def browse(url: str) -> bool:
        file = Path(url2pathname(urlsplit(url).path))
        opened.append((url, file.read_text(), file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777))
        return True

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.webbrowser, "open", browse)
    monkeypatch.setattr(command.time, "sleep", stop)
    command.watch(WatchConfig(target=str(tmp_path), open=True))
    page = capsys.readouterr().out.split()[2]
    ((url, content, mode, folder_mode),) = opened
    assert url.startswith("file://") and urlsplit(page).path.strip("/") not in url
    assert f"url={page}" in content and (mode, folder_mode) == (0o600, 0o700)
    assert not Path(url2pathname(urlsplit(url).path)).exists(), "it goes with the page"
