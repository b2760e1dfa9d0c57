# SPDX-License-Identifier: Apache-2.0
"""Precomputed drafts that were sampled, as target tokens with their `draft_probs`.

Why they are lossless: each continuation is sampled with random numbers of its own, which neither
verification nor another continuation uses (`ServerRequest.draw_of`). The target's output, the
tokens before a draft, and the lengths of continuations determine which continuation is used, and
from where on (`find_drawn`). Given all that, each token of the draft still has the distribution of
its row, and the target's next random numbers are new.

This does not hold for a token that was verified before, because it has influenced the output. If
a recovered token adds no bytes, the token that was rejected comes next again. If a draft is judged
as a whole, all its tokens have influenced the output. So such tokens are certain from then on
(`RemoteRequest.seen`). A row is cut to the most likely tokens before sampling, so that the table
has all of it.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from vllm_hetero_spec.draft.draft import SPARSE_TOP_K, Draft, unpack_rows
from vllm_hetero_spec.draft.methods import SLEM
from vllm_hetero_spec.draft.sampling import SampledMethod
from vllm_hetero_spec.engine.drafter.method import sampling_of
from vllm_hetero_spec.engine.drafter.round import sampled_draft
from vllm_hetero_spec.engine.drafter.tasks import DrafterTokens, DraftTask
from vllm_hetero_spec.engine.seam.tokenizers import TokenizerPair
from vllm_hetero_spec.options import HeteroOptions
from vllm_hetero_spec.staging import Send, Sender


class SampledRecordDecoder:
    """Makes drafts of sampled tokens.

    Args:
        sampling: What drafter tokens propose, on the host.
        ends: Drafter ids that end a draft.
    """

    def __init__(self, sampling: SampledMethod, ends: Collection[int], send: Send) -> None:
        self.tokens = sampling.tokens
        self._sampling, self._ends, self._send = sampling, ends, send

    @classmethod
    def of(
        cls, options: HeteroOptions, pair: TokenizerPair, width: int, device: torch.device
    ) -> "SampledRecordDecoder | None":
        """Build a decoder for logits of `width` columns; None if all drafts are greedy."""
        if options.method == SLEM or options.verification == "race":
            return None
        sampling = sampling_of(options, pair, width, torch.device("cpu"), 1, SPARSE_TOP_K)
        if sampling is None:
            return None
        return cls(sampling, pair.bridge.drafter_eos, Sender(device).send)

    def ends(self, ids: Sequence[int]) -> list[int]:
        """For each target token that the ids propose, how many leading ids it needs."""
        return [end for end, drawn in enumerate(ids, 1) for _ in self._sampling.spell(drawn)]

    def drafts(
        self,
        tasks: Sequence[DraftTask],
        ids: Sequence[Sequence[int]],
        rows: Sequence[Sequence[bytes]],
    ) -> list[Draft]:
        """Make a draft for each request.

        Args:
            ids: Drafter tokens of each.
            rows: The row of each token; see `LookupResult`.
        """
        used = [of[: task.lookahead] for task, of in zip(tasks, rows, strict=True)]
        every = [row for of in used for row in of if row]
        (packed,) = self._send(
            np.frombuffer(b"".join(every), np.int32).reshape(-1, 2, SPARSE_TOP_K)
        )
        probs = unpack_rows(packed, self.tokens.width)
        numbers = iter(range(len(every)))
        drafts = []
        for task, own, rows_of in zip(tasks, ids, used, strict=True):
            row_of = [next(numbers) if row else -1 for row in rows_of]
            made = DrafterTokens(list(own))
            draft = sampled_draft(task, made, row_of, probs, self._sampling, self._ends)
            certain = max(row_of, default=-1) < 0
            drafts.append(draft._replace(draft_probs=None) if certain else draft)
        return drafts
