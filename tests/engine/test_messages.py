# SPDX-License-Identifier: Apache-2.0
"""Messages of an engine to its drafter process fit into a socket with default settings."""

import socket

import pytest

from vllm_hetero_spec.draft.sampling import DraftSampling
from vllm_hetero_spec.engine.ahead.messages import (
    LONGEST,
    MOST_IDS,
    MOST_ROWS,
    RequestUpdate,
    UpdateBatch,
    encode,
    update_batch_of,
)

USUAL = 212992  # bytes; Linux's default limit of a socket's send buffer
LARGE = 2**31 - 1


@pytest.mark.parametrize("times", [1, 4])
def test_the_largest_commit_fits(times: int) -> None:
    """It also closes 16,384 slots. A commit with four times as many texts does not fit."""
    each = MOST_IDS // MOST_ROWS
    draw = DraftSampling(1 / 3, LARGE, 1 / 3, 2**63 - 1, LARGE, True, LARGE)
    told = [LARGE] * (each // 2), LARGE, LARGE, LARGE, LARGE, "s" * 64, draw
    rows = [RequestUpdate(LARGE, LARGE, [LARGE] * (each // 2), *told)] * (times * MOST_ROWS)
    commit = UpdateBatch(LARGE, [*range(2 * 8192)], rows)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, USUAL)
        ours.setblocking(False)
        if times == 1:
            ours.send(encode(commit))
            assert update_batch_of(theirs.recv(LONGEST)) == commit
        else:
            with pytest.raises(OSError, match="Message too long"):
                ours.send(encode(commit))
