"""Which tenant a call belongs to, as the server knows it; never from what a caller writes into a key."""

import re
from collections.abc import Iterable
from typing import Any, Final

import grpc.aio

from shared.errors import InvalidRequest, TenantRequired
from shared.features.key import TENANT_NAME, tenant_tag
from shared.rpc.call import current_call

_NAME: Final = re.compile(TENANT_NAME)


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The key part of the call's tenant: `tenant_tag` of the name in the metadata that a setting names."""
    return current_call.get().tenant


def read_tenant(
    metadata: Iterable[tuple[str, str | bytes]], header: str, *, is_required: bool = False
) -> str:
    """The key part of the tenant that metadata names; the one common tenant when `header` is empty.

    A call without the header belongs to the common tenant too, unless a tenant `is_required`.

    Raises:
        TenantRequired: the header is not there, and must be.
        InvalidRequest: the header is there twice, or is no name.
    """
    if not header:
        return tenant_tag("")
    names = [value for key, value in metadata if key == header.lower()]
    if not names and is_required:
        raise TenantRequired("the call must name its tenant in its metadata", field=f"metadata.{header}")
    if not names:
        return tenant_tag("")
    if len(names) > 1 or not isinstance(names[0], str) or not _NAME.fullmatch(names[0]):
        raise InvalidRequest(
            "the tenant must be named once: at most 128 letters, digits and ._:@/+=-",
            field=f"metadata.{header}",
        )
    return tenant_tag(names[0])
