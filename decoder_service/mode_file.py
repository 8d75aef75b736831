"""The mode as a file says it, so that operators switch batching off and on while the decoder runs.

A file that Kubernetes mounts from a ConfigMap changes in all pods at once when the ConfigMap does; nothing
restarts, and no request is lost.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from decoder_service.engine.loop import Mode

SECONDS_BETWEEN_LOOKS = 1.0
_MOST_BYTES = 64
_MODES: dict[str, Mode] = {"batched": "batched", "single": "single"}

_log = structlog.get_logger("lenspair.decoder")


class ModeFile:
    """Looks at a file again and again, and hands on the mode that it names when that has changed.

    What names no mode, or can't be read, changes nothing; it is logged once.
    """

    def __init__(self, path: Path, mode: Mode, use_mode: Callable[[Mode], None]) -> None:
        self._path = path
        self._mode = mode
        self._use_mode = use_mode
        self._problem = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)

    async def look(self) -> None:
        """Reads the file once."""
        text, problem = await asyncio.to_thread(_read, self._path)
        mode = _MODES.get(text.strip())
        if mode is None:
            self._complain(problem or "it must hold batched or single")
            return
        self._problem = ""
        if mode != self._mode:
            _log.info("mode switched", mode=mode)
            self._mode = mode
            self._use_mode(mode)

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            _log.warning("the mode stays", mode=self._mode, file=str(self._path), problem=problem)
        self._problem = problem


def _read(path: Path) -> tuple[str, str]:
    """What the file holds, and why it could not be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace"), ""
    except OSError as error:
        return "", error.strerror or type(error).__name__
