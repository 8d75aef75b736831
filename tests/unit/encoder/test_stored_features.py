"""Counting a tenant's features: its own walks through the store take turns, and hold up nobody else's."""

import asyncio

from encoder_service.hand_over import HandOver, HandOverMemory
from encoder_service.stored_features import StoredFeatures
from encoder_service.tally import TenantTally
from shared.features.codec import FeatureCodec
from shared.store.memory import MemoryFeatureStore
from shared.store.survey import Survey

CODEC = FeatureCodec(fingerprint="0" * 64, chunk_bytes=4096, store_key=None)


class SilentForOne(MemoryFeatureStore):
    """Does not answer the tenant "shop"; `walks` counts what was asked for it."""

    def __init__(self) -> None:
        super().__init__(CODEC, ttl_seconds=60)
        self.walks = 0

    async def survey(self, tenant: str) -> Survey:
        if tenant == "shop":
            self.walks += 1
            await asyncio.Event().wait()
        return await super().survey(tenant)


async def test_a_tenant_whose_store_is_silent_holds_up_no_other() -> None:
    store = SilentForOne()
    hand_over = HandOver(CODEC, HandOverMemory(limit_bytes=1, seconds=1), None)
    stored = StoredFeatures(store=store, hand_over=hand_over, tally=TenantTally(), max_keep_alive_seconds=60)
    silent = [asyncio.create_task(stored.stats("shop")) for _ in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert (await stored.stats("other")).survey.entries == 0
    assert store.walks == 1
    for task in silent:
        task.cancel()
    await asyncio.wait(silent)
