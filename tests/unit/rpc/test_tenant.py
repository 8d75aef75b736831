"""Which tenant a call's metadata names."""

import pytest

from shared.errors import InvalidRequest, TenantRequired
from shared.features.key import tenant_tag
from shared.rpc.tenant import read_tenant

Metadata = list[tuple[str, str | bytes]]


def test_without_the_setting_there_is_one_tenant() -> None:
    assert read_tenant([("x-tenant", "shop")], "") == tenant_tag("")


def test_the_setting_names_the_header() -> None:
    assert read_tenant([("other", "x"), ("x-tenant", "shop")], "X-Tenant") == tenant_tag("shop")
    assert tenant_tag("shop") != tenant_tag("")


def test_a_call_without_the_header_belongs_to_the_common_tenant() -> None:
    assert read_tenant([("other", "x")], "x-tenant") == tenant_tag("")


def test_a_call_without_the_header_is_refused_where_a_tenant_is_required() -> None:
    with pytest.raises(TenantRequired) as refusal:
        read_tenant([("other", "x")], "X-Tenant", is_required=True)
    assert refusal.value.field == "metadata.X-Tenant"
    assert read_tenant([("x-tenant", "shop")], "X-Tenant", is_required=True) == tenant_tag("shop")


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize(
    "metadata",
    [
        [("x-tenant", "")],
        [("x-tenant", "a" * 129)],
        [("x-tenant", "two words")],
        [("x-tenant", "line\nfeed")],
        [("x-tenant", "feed at the end\n")],
        [("x-tenant", "shop\n")],
        [("x-tenant", "größe")],
        [("x-tenant", b"bytes")],
        [("x-tenant", "a"), ("x-tenant", "b")],
        [("x-tenant", "a"), ("x-tenant", "a")],
    ],
)
def test_what_is_no_single_name_is_refused(metadata: Metadata, is_required: bool) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_tenant(metadata, "x-tenant", is_required=is_required)
    assert refusal.value.field == "metadata.x-tenant"


def test_the_longest_name_passes() -> None:
    assert read_tenant([("x-tenant", "a" * 128)], "x-tenant") == tenant_tag("a" * 128)
