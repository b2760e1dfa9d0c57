# SPDX-License-Identifier: Apache-2.0
"""Drafts that were drawn ahead, as the target's tokens with what they were drawn from.

Why they are lossless. A line is drawn with numbers of its own, which neither verification nor
another line has (`Text.draw_of`). Which line is used, and from where on, follows from what the
target has written, from tokens in front and from how far lines have come (`find_drawn`): given all
that, each token that is used still has the law of its row, and the target's next random choices are
new. What was verified once has not: it had a part in what was written. A correction that adds no
bytes leaves it behind the text again, the very token that was rejected first; and where a draft is
judged as a whole, all of it has a part. So it is certain from then on (`RemoteRequest.seen`). A row
is cut to the likeliest tokens before the draw, so that it travels whole.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import Draft
from vllm_hetero_spec.draft.methods import SLEM
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.draft.sparse_rows import SPARSE_TOP_K, unpack
from vllm_hetero_spec.engine.drafter.method import sampling_of
from vllm_hetero_spec.engine.drafter.sampled_drafts import SampledDraft
from vllm_hetero_spec.engine.drafter.tasks import DraftTask
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.staging import Send, Sender


class SampledRecordDecoder:
    """Makes drafts of what was drawn.

    Args:
        sampling: What drafter tokens propose; on the host.
        ends: Drafter ids after which a draft ends.
        send: Brings rows to the target's device.
    """

    def __init__(self, sampling: SampledMethod, ends: Collection[int], send: Send) -> None:
        self.tokens = sampling.tokens
        self._sampling, self._ends, self._send = sampling, ends, send

    @classmethod
    def of(
        cls, options: HeteroOptions, pair: TokenizerPair, width: int, device: torch.device
    ) -> "SampledRecordDecoder | None":
        """For a deployment; None where drafts are greedy.

        Args:
            options: The user's.
            pair: The two tokenizers.
            width: Columns of the target's logits.
            device: Where the target runs.
        """
        if options.method == SLEM or options.verification == "race":
            return None
        sampling = sampling_of(options, pair, width, torch.device("cpu"), 1, SPARSE_TOP_K)
        if sampling is None:
            return None
        return cls(sampling, pair.bridge.drafter_eos, Sender(device).send)

    def ends(self, ids: Sequence[int]) -> list[int]:
        """Leading ids that each target token needs which they propose."""
        return [end for end, drawn in enumerate(ids, 1) for _ in self._sampling.spell(drawn)]

    def drafts(
        self,
        tasks: Sequence[DraftTask],
        ids: Sequence[Sequence[int]],
        rows: Sequence[Sequence[bytes]],
    ) -> list[Draft]:
        """A draft for each request.

        Args:
            tasks: The requests.
            ids: Drafter tokens for each.
            rows: What each token was drawn from, see `DraftRecord`; nothing where it is certain.
        """
        used = [of[: task.lookahead] for task, of in zip(tasks, rows, strict=True)]
        every = [row for of in used for row in of if row]
        (packed,) = self._send(
            np.frombuffer(b"".join(every), np.int32).reshape(-1, 2, SPARSE_TOP_K)
        )
        probs = unpack(packed, self.tokens.width)
        numbers = iter(range(len(every)))
        drafts = []
        for task, own, rows_of in zip(tasks, ids, used, strict=True):
            row_of = [next(numbers) if row else -1 for row in rows_of]
            made = SampledDraft(own[: len(row_of)], row_of, ())
            draft = made.draft(task, self._sampling, self._ends, probs, None)
            certain = max(row_of, default=-1) < 0
            drafts.append(draft._replace(draft_probs=None) if certain else draft)
        return drafts
