# SPDX-License-Identifier: Apache-2.0
"""Where in a prompt tokens stand for images, audio and the like: they are no text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def media_of(features: "Sequence[MultiModalFeatureSpec]") -> Sequence[slice]:
    """Parts of a prompt, one for each feature of the request."""
    if not features:
        return ()
    places = [feature.mm_position for feature in features]
    return [slice(place.offset, place.offset + place.length) for place in places]
