# SPDX-License-Identifier: Apache-2.0
"""A target with image inputs: the drafter reads only the text around the images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import engine, metrics_of, proposer_of, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec import read_stats

IMAGE_TOKENS = 4
SIDE = 28


@pytest.fixture(scope="module")
def seeing(demo_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BLIP-2 with the demo target as its language model. Its vision part is not trained."""
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
    )

    processors = pytest.importorskip("transformers.models.blip.image_processing_pil_blip")
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    language = AutoModelForCausalLM.from_pretrained(demo_pair / "target", dtype=torch.float32)
    language.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    small = {"hidden_size": 32, "intermediate_size": 64}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    asking = {"vocab_size": 16, "encoder_hidden_size": 32, "cross_attention_frequency": 1}
    model = Blip2ForConditionalGeneration(
        Blip2Config(
            vision_config={"image_size": SIDE, "patch_size": 14} | small,
            qformer_config=asking | small,
            text_config=language.config.to_dict(),
            num_query_tokens=IMAGE_TOKENS,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        )
    ).float()
    model.language_model.load_state_dict(language.state_dict())
    model.save_pretrained(folder)
    images = processors.BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def requests(texts: list[str]) -> list[dict[str, Any]]:
    """Requests, every second one with an image."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (len(texts), SIDE, SIDE, 3), np.uint8)
    return [
        {"prompt": text}
        | ({"multi_modal_data": {"image": Image.fromarray(pixels)}} if i % 2 else {})
        for i, (text, pixels) in enumerate(zip(texts, noise, strict=True))
    ]


@pytest.mark.full
@pytest.mark.engine
def test_images_are_not_read_as_text(
    demo_pair: Path, seeing: Path, requests: list[dict[str, Any]]
) -> None:
    with engine(seeing) as llm:
        alone: Outputs = generate(llm, requests, greedy())
    read: set[int] = set()
    with engine(seeing, slem(demo_pair / "drafter")) as llm:
        image = llm.get_tokenizer().convert_tokens_to_ids("<image>")
        bridge = proposer_of(llm).drafting.bridge
        extend = bridge.extend

        def observed(contexts: Any, new_ids: Any) -> list[int]:
            read.update(*new_ids)
            return extend(contexts, new_ids)

        bridge.extend = observed
        assert generate(llm, requests, greedy()) == alone
        stats, images = read_stats(llm), len(requests) // 2
        assert stats["media_tokens"] == images * IMAGE_TOKENS
        assert set(stats["skipped"]) <= {"catching_up"}
        assert len(read) > 20
        assert image not in read
        accepted = metrics_of(llm)["num_accepted_tokens"]
        assert generate(llm, requests[1::2], greedy()) == {
            str(i): alone[str(2 * i + 1)] for i in range(images)
        }
        assert metrics_of(llm)["num_accepted_tokens"] > accepted


@pytest.mark.full
@pytest.mark.engine
def test_embedded_prompts_are_not_drafted_for(demo_pair: Path, texts: list[str]) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair / "target")
    rows = load_file(demo_pair / "target" / "model.safetensors")["model.embed_tokens.weight"]
    ids = [tokenizer.encode(text) for text in texts[:4]]
    embedded = [{"prompt_embeds": rows[torch.tensor(prompt)].float()} for prompt in ids]
    spec = slem(demo_pair / "drafter")
    with engine(demo_pair / "target", spec, enable_prompt_embeds=True) as llm:
        as_text = generate(llm, [{"prompt_token_ids": prompt} for prompt in ids], greedy())
        before = read_stats(llm)
        assert generate(llm, embedded, greedy()) == as_text
        after = read_stats(llm)
    assert before["drafts"] == after["drafts"] > 0
    assert after["skipped"]["no_text"] > 0
