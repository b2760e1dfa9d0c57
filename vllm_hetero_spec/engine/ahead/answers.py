# SPDX-License-Identifier: Apache-2.0
"""What a drafter process answers its engine, and how either writes; no torch, no numpy."""

import msgspec

# Bytes of a message at most, either way.
LONGEST = 1 << 20


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The drafter is loaded.

    Attributes:
        num_blocks: Blocks of the drafter's KV.
        block_size: Tokens of a block.
    """

    num_blocks: int
    block_size: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """It could not be loaded.

    Attributes:
        sentence: Why, and what to do.
    """

    sentence: str


encode = msgspec.msgpack.Encoder().encode
answer_of = msgspec.msgpack.Decoder(Ready | Failed).decode
