# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of the language model head for each row of logits, on Model Runner V2."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def map_adapters_by_row(state: Any, present: Callable[[], Any]) -> None:
    """Apply each request's adapter to all rows of its logits, by replacing `make_lora_inputs`.

    vLLM lists one adapter per request, which is wrong for requests with drafts.
    """
    by_request = state.make_lora_inputs

    def make_lora_inputs(req_ids: Sequence[str], *args: Any) -> tuple[Any, ...]:
        output = present()
        assert output is not None, "no step has begun"
        adapters, *rest = by_request(req_ids, *args)
        drafts = output.scheduled_spec_decode_tokens
        rows = [1 + len(drafts.get(req_id, ())) for req_id in req_ids]
        return (tuple(np.repeat(adapters, rows)), *rest)

    state.make_lora_inputs = make_lora_inputs
