# SPDX-License-Identifier: Apache-2.0
"""Messages from the drafter process to its engine. Imports neither torch nor numpy."""

import msgspec

# Bytes; the largest message in either direction.
LONGEST = 1 << 20


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The drafter is loaded.

    Attributes:
        num_blocks: KV blocks of the drafter, including block 0, which is never used.
        block_size: Tokens per block.
    """

    num_blocks: int
    block_size: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The drafter could not be loaded; `sentence` names the cause and the remedy."""

    sentence: str


encode = msgspec.msgpack.Encoder().encode
answer_of = msgspec.msgpack.Decoder(Ready | Failed).decode
