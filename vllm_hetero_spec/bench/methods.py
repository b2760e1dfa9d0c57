# SPDX-License-Identifier: Apache-2.0
"""What can be measured: this package's methods, and the peers beside them."""

from dataclasses import dataclass

from vllm_hetero_spec.options import METHODS

ALONE = "alone"
HF_ALONE = "hf_alone"


@dataclass(frozen=True)
class Kind:
    """What running a method takes.

    Attributes:
        drafts: It needs a drafter and a lookahead.
        huggingface: It runs in Hugging Face transformers, one request at a time; else in vLLM.
        same_vocabulary: Target and drafter must have the same vocabulary.
        reference: The method without speculation whose greedy output it must equal.
    """

    drafts: bool = True
    huggingface: bool = False
    same_vocabulary: bool = False
    reference: str = ALONE


PEERS = {
    ALONE: Kind(drafts=False),
    "vllm_tli": Kind(),
    "draft_model": Kind(same_vocabulary=True),
    HF_ALONE: Kind(drafts=False, huggingface=True, reference=HF_ALONE),
    "hf_assisted": Kind(huggingface=True, reference=HF_ALONE),
}
KINDS = {**{method: Kind() for method in METHODS}, **PEERS}
