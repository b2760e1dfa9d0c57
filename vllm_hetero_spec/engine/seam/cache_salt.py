# SPDX-License-Identifier: Apache-2.0
"""Transfer of a request's `cache_salt` from vLLM's scheduler to the worker.

The drafter shares KV blocks between requests with a common prefix. A salt forbids sharing between
tenants, but vLLM does not send it to the worker. A hash of it is attached to the NewRequestData. A
hash suffices, because only equality matters.
"""

import hashlib
from typing import TYPE_CHECKING

from vllm_hetero_spec.engine.compat import patching

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.request import Request

_ATTRIBUTE = "hetero_cache_salt"


def install() -> None:
    """Wrap `NewRequestData.from_request` in this process. Idempotent."""
    from vllm.v1.core.sched.output import NewRequestData

    patching.wrap(NewRequestData, "from_request", "cache_salt", _keep_salt)


def _keep_salt(
    original: patching.Function,
    cls: "type[NewRequestData]",
    request: "Request",
    *args: object,
    **kwargs: object,
) -> "NewRequestData":
    data = original(cls, request, *args, **kwargs)
    if request.cache_salt is not None:
        salt = request.cache_salt.encode("utf-8", "surrogatepass")
        setattr(data, _ATTRIBUTE, hashlib.sha256(salt).hexdigest())
    return data


def salt_of(new_request: "NewRequestData") -> str | None:
    """Return the hash of a request's salt; None if the request has none."""
    return getattr(new_request, _ATTRIBUTE, None)
