# SPDX-License-Identifier: Apache-2.0
"""Positions of placeholder tokens for images, audio and the like in a prompt."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec


def media_of(features: "Sequence[MultiModalFeatureSpec]") -> Sequence[slice]:
    """Return the placeholder positions of a prompt, one slice for each multimodal feature."""
    if not features:
        return ()
    places = [feature.mm_position for feature in features]
    return [slice(place.offset, place.offset + place.length) for place in places]
