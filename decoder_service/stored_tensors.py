"""The tensors of one question, fetched from the store when the engine asks for them; knows no tensor."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, Location
from decoder_service.observation import stage
from decoder_service.turns import FeaturePart, Turn
from shared.features.bundle import FeatureBundle

Bundles = tuple[FeatureBundle, ...]


@dataclass(slots=True, eq=False)
class _Fetch:
    """Tensors on their way or here; `holders` still need them, `held_bytes` count against the budget."""

    task: "asyncio.Task[Bundles] | None" = None
    holders: set["SampleTensors"] = field(default_factory=set)
    held_bytes: int = 0


class StoredTensors:
    """The tensors behind the turns of one question, for all of its samples.

    They are fetched once for all samples that need them at the same time, and count against the budget once,
    until the last of these has let go of them. `keys` are those of the prompt, in its order.
    """

    def __init__(
        self,
        reader: FeatureReader,
        budget: ByteBudget,
        turns: Sequence[Turn],
        locations: Mapping[str, Location],
    ) -> None:
        self._reader = reader
        self._budget = budget
        self.keys = [part.key for turn in turns for part in turn.parts if isinstance(part, FeaturePart)]
        self._locations = locations
        self._fetches: dict[int, _Fetch] = {}

    def for_sample(self) -> "SampleTensors":
        """The FeatureTensors (see engine.py) of one sample."""
        return SampleTensors(self)

    async def load(self, first: int, holder: "SampleTensors") -> Bundles:
        fetch = self._fetches.get(first)
        if fetch is None:
            fetch = self._fetches[first] = _Fetch()
            fetch.task = asyncio.create_task(self._fetch(first, fetch))
        fetch.holders.add(holder)
        assert fetch.task is not None
        return await asyncio.shield(fetch.task)

    def release(self, holder: "SampleTensors") -> None:
        for first, fetch in list(self._fetches.items()):
            fetch.holders.discard(holder)
            if not fetch.holders:
                del self._fetches[first]
                self._end(fetch)

    async def _fetch(self, first: int, fetch: _Fetch) -> Bundles:
        wanted = self.keys[first:]
        locations = {key: self._locations[key] for key in wanted}
        size_bytes = sum(location.manifest.tensor_bytes for location in locations.values())
        await self._budget.acquire(size_bytes)
        fetch.held_bytes = size_bytes
        with stage("fetch"):
            bundles = await self._reader.fetch(locations)
        return tuple(bundles[key] for key in wanted)

    def _end(self, fetch: _Fetch) -> None:
        """Gives the budget back; a fetch that is cancelled while it waits for bytes has none yet."""
        assert fetch.task is not None
        fetch.task.cancel()
        self._budget.release(fetch.held_bytes)
        fetch.held_bytes = 0


class SampleTensors:
    """The FeatureTensors of one sample: what it has loaded it holds until it releases it."""

    def __init__(self, tensors: StoredTensors) -> None:
        self._tensors = tensors

    async def load(self, first: int) -> Bundles:
        """See engine.FeatureTensors. Raises FeatureNotFound, StoreUnavailable or QueueFull."""
        self.release()
        try:
            return await self._tensors.load(first, self)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """See engine.FeatureTensors."""
        self._tensors.release(self)
