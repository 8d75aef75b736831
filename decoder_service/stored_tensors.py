"""The tensors of one request, fetched from the store when the engine asks for them; knows no tensor."""

from collections.abc import Mapping, Sequence

from decoder_service.byte_budget import ByteBudget
from decoder_service.feature_reader import FeatureReader, Location
from decoder_service.observation import stage
from decoder_service.turns import FeaturePart, Turn
from shared.features.bundle import FeatureBundle


class StoredTensors:
    """The FeatureTensors (see engine.py) of the turns of one question.

    What was loaded counts against the budget until it is released.
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
        self._keys = [part.key for turn in turns for part in turn.parts if isinstance(part, FeaturePart)]
        self._locations = locations
        self._held_bytes = 0

    async def load(self, first: int) -> tuple[FeatureBundle, ...]:
        wanted = self._keys[first:]
        locations = {key: self._locations[key] for key in wanted}
        self.release()
        size_bytes = sum(location.manifest.tensor_bytes for location in locations.values())
        await self._budget.acquire(size_bytes)
        self._held_bytes = size_bytes
        with stage("fetch"):
            bundles = await self._reader.fetch(locations)
        return tuple(bundles[key] for key in wanted)

    def release(self) -> None:
        self._budget.release(self._held_bytes)
        self._held_bytes = 0
