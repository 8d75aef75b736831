"""What each tenant was handed out."""

from datetime import UTC, datetime

import pytest

from encoder_service.tally import Counts, Kind, TenantTally

NOW = datetime(2026, 5, 4, tzinfo=UTC)


def test_counts_by_tenant() -> None:
    tally = TenantTally(now=lambda: NOW)
    kinds: list[Kind] = ["hit", "hit", "joined", "encoded", "missed"]
    for kind in kinds:
        tally.count("a", kind)
    tally.count("b", "missed")
    assert tally.of("a") == Counts(NOW, hit=2, joined=1, encoded=1, missed=1)
    assert tally.of("a").hit_rate == pytest.approx(0.75)
    assert tally.of("b").hit_rate is None


def test_a_tenant_without_requests_has_no_counts() -> None:
    tally = TenantTally()
    assert tally.of("a") == Counts()
    assert tally.of("a").since is None


def test_the_tenant_that_was_quiet_for_longest_is_forgotten() -> None:
    tally = TenantTally(max_tenants=2)
    for tenant in ("a", "b", "a", "c"):
        tally.count(tenant, "hit")
    tally.of("b")
    assert [tally.of(tenant).hit for tenant in "abc"] == [2, 0, 1]
