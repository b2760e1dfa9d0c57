# SPDX-License-Identifier: Apache-2.0
"""What an engine and its drafter process tell each other; the drafts come by a table in memory.

The process speaks of drafter ids alone: text, requests and target tokens stay in the engine.
"""

import msgspec

from vllm_hetero_spec.draft.sampling import DraftSampling

# Ids, and texts, of one message at most, so that it fits into the buffer of a socket: twice 208 KiB
# where the kernel gives no more than it usually does.
MOST_IDS, MOST_ROWS = 8192, 1024


class RequestUpdate(msgspec.Struct, array_like=True, frozen=True):
    """One text, as it stands now.

    Attributes:
        slot: Which text.
        keep: Leading ids of it that stand since it was told last; -1 where another text has begun.
        ids: The ids behind them.
        drafted: What is taken to come behind the text: the target is verifying it.
        wanted: Ids to have behind the text in all, those in `drafted` included.
        at_stake: Leading ones of `drafted` that the target is verifying.
        beside: Ids to have of each guess of where the target leaves them.
        guesses: How many of them to make.
        salt: Whose KV it may share.
        draw: How tokens behind it are drawn; None takes the likeliest.
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
    """What a step of the target has changed.

    Attributes:
        serial: Its number; drafts bear that of the last one that named their text.
        closed: Slots whose texts are gone.
        rows: Texts that have changed, or are to be drafted for.
    """

    serial: int
    closed: list[int]
    rows: list[RequestUpdate]


update_batch_of = msgspec.msgpack.Decoder(UpdateBatch).decode
