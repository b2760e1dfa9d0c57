# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and its drafter process. Drafts come back through a table in memory.

Messages contain drafter ids. Text and target tokens stay in the engine.
"""

import msgspec

from vllm_hetero_spec.draft.sampling import DraftSampling

# Maximum ids and requests of a message, so that it fits into a socket's buffer. Kernels usually
# limit that to 2 * 208 KiB.
MOST_IDS, MOST_ROWS = 8192, 1024
# Bytes; the largest message in either direction.
LONGEST = 1 << 20


class RequestUpdate(msgspec.Struct, array_like=True, frozen=True):
    """The new state of one request.

    Attributes:
        slot: The request's slot in the process.
        keep: Number of leading ids that are unchanged since the last update; -1 for a new request.
        ids: The ids after them.
        drafted: Ids that are assumed to come next: the draft under verification, and what comes
            after it in its continuation.
        wanted: Number of ids to draft after the text, including `drafted`.
        at_stake: Number of leading `drafted` ids under verification.
        beside: Number of ids to draft in each branch.
        guesses: Maximum number of branches.
        salt: The request's cache salt; KV is shared only between equal salts.
        draw: Sampling parameters of the next tokens; None if they are greedy.
    """

    slot: int
    keep: int
    ids: list[int]
    drafted: list[int]
    wanted: int
    at_stake: int = 0
    beside: int = 0
    guesses: int = 0
    salt: str | None = None
    draw: DraftSampling | None = None


class UpdateBatch(msgspec.Struct, array_like=True, frozen=True):
    """All changes of one target step.

    Attributes:
        serial: Number of the update. A draft has the serial of the last update of its request.
        closed: Slots of requests that are gone.
        rows: Requests that have changed or need drafts.
    """

    serial: int
    closed: list[int]
    rows: list[RequestUpdate]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The answer of the process: the drafter is loaded.

    Attributes:
        num_blocks: KV blocks of the drafter, including block 0, which is never used.
        block_size: Tokens per block.
    """

    num_blocks: int
    block_size: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The drafter cannot be loaded; `sentence` names the cause and the remedy."""

    sentence: str


encode = msgspec.msgpack.Encoder().encode
answer_of = msgspec.msgpack.Decoder(Ready | Failed).decode
update_batch_of = msgspec.msgpack.Decoder(UpdateBatch).decode
