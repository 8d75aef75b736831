"""The mode follows a file; what names no mode changes nothing."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from decoder_service.engine.loop import Mode
from decoder_service.mode_file import ModeFile


class Switch:
    """A watched file, and the modes that were switched to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.modes: list[Mode] = []
        self.file = ModeFile(path, "batched", self.modes.append)

    async def look(self, text: str) -> list[Mode]:
        self.path.write_text(text, encoding="utf-8")
        await self.file.look()
        return self.modes


@pytest.fixture
def switch(tmp_path: Path) -> Switch:
    return Switch(tmp_path / "mode")


async def test_the_mode_follows_the_file_and_is_switched_once(switch: Switch) -> None:
    assert await switch.look("batched\n") == []
    assert await switch.look("single\n") == ["single"]
    assert await switch.look("single") == ["single"]
    assert await switch.look(" batched ") == ["single", "batched"]


@pytest.mark.parametrize("text", ["", "off", "single batched", "SINGLE", "\0" * 10_000, "ä"])
async def test_what_names_no_mode_changes_nothing_and_is_logged_once(switch: Switch, text: str) -> None:
    with capture_logs() as logs:
        await switch.look(text)
        assert await switch.look(text) == []
    assert [log["event"] for log in logs] == ["the mode stays"]


async def test_a_missing_file_is_like_one_that_says_nothing(switch: Switch) -> None:
    with capture_logs() as logs:
        await switch.file.look()
    assert logs[0]["problem"] == "No such file or directory"
    assert await switch.look("single") == ["single"]


async def test_a_link_that_is_swapped_is_followed(switch: Switch, tmp_path: Path) -> None:
    """As Kubernetes updates a mounted ConfigMap."""
    for name in ("batched", "single"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    switch.path.symlink_to(tmp_path / "batched")
    await switch.file.look()
    other = tmp_path / "next"
    other.symlink_to(tmp_path / "single")
    other.replace(switch.path)
    await switch.file.look()
    assert switch.modes == ["single"]
