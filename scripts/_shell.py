# SPDX-License-Identifier: Apache-2.0
"""A small trained Llama in the shape of a large one: its text, the other's bytes and kernels.

What a forward costs depends on the shape of a model alone, what speculation gains also on what its
models say. Models of random weights say nothing, and real ones take gigabytes to download. So the
weights of a small model are written into the tensors of a large one, and zeros around them:

* Hidden features beyond the small model's are zero. An RMSNorm over H features of which h are used
  is larger by sqrt(H/h), which its weight takes back.
* Query head j of group g becomes the first such head of group g. Where heads grow from d to D, the
  queries take back that scores are divided by sqrt(D), and pair j of RoPE, of frequency
  theta^(-2j/d), becomes pair j*D/d. The other heads' columns of `o_proj` are zero.
* The other layers are zero, and add nothing to the residual stream.
* Ids beyond the small vocabulary must never be the likeliest: a feature that is the same for every
  token, far too small to be seen by any norm, is scaled up by the last one and pulls them down.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

FORMAT = "shell"
_SOURCE = "shell_of"  # key of a shell's config.json
_CONSTANT = 2.0**-12
_PULL = -1e6
_BIASED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # in Qwen2
_LLAMA = (
    r"(lm_head|model\.(embed_tokens|norm|layers\.\d+\."
    r"(\w+layernorm|self_attn\.[qkvo]_proj|mlp\.\w+_proj)))\.weight$|.+\.[qkv]_proj\.bias$"
)

# What `write_shell` makes of a config.json, as these models have it.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # For machines without a GPU, where nothing is to be learnt from times.
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
    "smaller": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 9216,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama-like model, as its config.json names them."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    tied: bool
    biased: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """From the contents of a config.json."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return cls(
            hidden,
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
            bool(config.get("tie_word_embeddings")),
            config["model_type"] == "qwen2",
        )


class Shell:
    """Tensors of the small model in the places of the large one.

    Args:
        inner: The small model's shape.
        outer: The large one's.

    Raises:
        ValueError: The one does not fit into the other.
    """

    def __init__(self, inner: Shape, outer: Shape) -> None:
        per_group = inner.heads // inner.groups, outer.heads // outer.groups
        fits = {
            "hidden features": (inner.hidden, outer.hidden),
            "MLP columns": (inner.intermediate, outer.intermediate),
            "layers": (inner.layers, outer.layers),
            "heads in a group": per_group,
            "groups of heads": (inner.groups, outer.groups),
            "numbers in a head": (inner.head, outer.head),
            "ids": (inner.vocabulary, outer.vocabulary),
        }
        for what, (small, large) in fits.items():
            if small > large:
                raise ValueError(f"a model of {small} {what} does not fit into {large}")
        if outer.head % inner.head:
            raise ValueError(f"heads of {inner.head} do not divide heads of {outer.head}")
        self._pads = outer.vocabulary > inner.vocabulary
        if self._pads and outer.hidden == inner.hidden:
            raise ValueError("a larger vocabulary takes more hidden features too")
        if outer.tied and not inner.tied:
            raise ValueError("an untied head does not fit into a tied one")
        self._inner, self._outer = inner, outer
        self._norm = math.sqrt(inner.hidden / outer.hidden)
        groups, within = torch.arange(inner.groups), torch.arange(per_group[0])
        self._q_rows = self._rows((groups[:, None] * per_group[1] + within).flatten())
        self._kv_rows = self._rows(groups)

    def tensors(
        self, small: Mapping[str, torch.Tensor], make: Callable[..., torch.Tensor] = torch.zeros
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the large model, by the names that its checkpoint would have.

        Args:
            small: The small model's checkpoint.
            make: Makes a tensor of zeros of the given sizes, of the dtype and where it is wanted.
        """
        i, o = self._inner, self._outer
        features = torch.arange(i.hidden)
        embedding = make(o.vocabulary, o.hidden)
        embedding[: i.vocabulary, : i.hidden] = small["model.embed_tokens.weight"].to(embedding)
        head = None if o.tied else make(o.vocabulary, o.hidden)
        if head is not None:
            own = small.get("lm_head.weight", small["model.embed_tokens.weight"])
            head[: i.vocabulary, : i.hidden] = own.to(head)
        last = self._scaled(small["model.norm.weight"], make)
        if self._pads:
            embedding[: i.vocabulary, i.hidden] = _CONSTANT
            (embedding if head is None else head)[i.vocabulary :, i.hidden] = _PULL
            last[i.hidden] = self._norm / _CONSTANT
        yield "model.embed_tokens.weight", embedding
        del embedding
        if head is not None:
            yield "lm_head.weight", head
            del head
        yield "model.norm.weight", last
        columns = torch.arange(i.intermediate)
        grown = math.sqrt(o.head / i.head)
        q, kv = o.heads * o.head, o.groups * o.head
        projections: dict[str, tuple[int, int, torch.Tensor, torch.Tensor, float]] = {
            "self_attn.q_proj": (q, o.hidden, self._q_rows, features, grown),
            "self_attn.k_proj": (kv, o.hidden, self._kv_rows, features, 1.0),
            "self_attn.v_proj": (kv, o.hidden, self._kv_rows, features, 1.0),
            "self_attn.o_proj": (o.hidden, q, features, self._q_rows, 1.0),
            "mlp.gate_proj": (o.intermediate, o.hidden, columns, features, 1.0),
            "mlp.up_proj": (o.intermediate, o.hidden, columns, features, 1.0),
            "mlp.down_proj": (o.hidden, o.intermediate, features, columns, 1.0),
        }
        for layer in range(o.layers):
            before, there = f"model.layers.{layer}.", layer < i.layers
            for norm in ("input_layernorm", "post_attention_layernorm"):
                name = f"{before}{norm}.weight"
                yield name, self._scaled(small[name], make) if there else make(o.hidden) + 1
            for part, (height, width, rows, across, scale) in projections.items():
                name = f"{before}{part}"
                weight = make(height, width)
                if there:
                    own = small[f"{name}.weight"].to(weight) * scale
                    where = rows.to(weight.device)[:, None], across.to(weight.device)
                    weight[where] = own
                yield f"{name}.weight", weight
                if o.biased and part in _BIASED:
                    bias = make(height)
                    if there and i.biased:
                        bias[rows.to(bias.device)] = small[f"{name}.bias"].to(bias) * scale
                    yield f"{name}.bias", bias

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """Where the numbers of the small model's heads go, given the large one's heads."""
        half, by = self._inner.head // 2, self._outer.head // self._inner.head
        pairs = torch.arange(half) * by
        numbers = torch.cat([pairs, self._outer.head // 2 + pairs])
        return (heads[:, None] * self._outer.head + numbers).flatten()

    def _scaled(self, norm: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        weight = make(self._outer.hidden)
        weight[: self._inner.hidden] = (norm.float() * self._norm).to(weight)
        return weight


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and weights of a Llama-like model in one safetensors file.

    Raises:
        ValueError: It is another model.
    """
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"{folder} has no model.safetensors; sharded models are large enough")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(weights)
    if not all(re.match(_LLAMA, name) for name in tensors):
        raise ValueError(f"{folder} is not a Llama-like model: no gate, up and down projections")
    return config, tensors


def write_shell(inner: Path, shape: Mapping[str, Any], out: Path) -> None:
    """Make the folder of a shell: configuration and tokenizer; its weights are made on loading.

    Args:
        inner: Folder of the small model, which has to stay where it is.
        shape: What differs in its config.json, as in `SHAPES`.
        out: A folder that does not exist.

    Raises:
        ValueError: The small model does not fit.
    """
    config, _ = read_model(inner)
    outer = {**config, **shape, _SOURCE: str(inner.absolute())}
    Shell(Shape.of(config), Shape.of(outer))
    outer.pop("layer_types", None)  # one for each layer, all of them ordinary
    outer["rms_norm_eps"] = config["rms_norm_eps"] * config["hidden_size"] / outer["hidden_size"]
    shutil.copytree(inner, out, ignore=shutil.ignore_patterns("*.safetensors"))
    (out / "config.json").write_text(json.dumps(outer, indent=2) + "\n")


def shell_weights(
    folder: Path, make: Callable[..., torch.Tensor] = torch.zeros
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a shell's folder, or of an ordinary one, by the names of a checkpoint."""
    outer = json.loads((folder / "config.json").read_text())
    config, tensors = read_model(Path(outer.get(_SOURCE, folder)))
    return Shell(Shape.of(config), Shape.of(outer)).tensors(tensors, make)


def register() -> None:
    """Let vLLM load shells in this process, by `load_format="shell"`: no weights on the disk."""
    from functools import partial

    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ShellLoader(BaseModelLoader):
        def download_model(self, model_config: ModelConfig) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
            device = next(model.parameters()).device
            make = partial(torch.zeros, dtype=model_config.dtype, device=device)
            model.load_weights(shell_weights(Path(model_config.model), make))

    register_model_loader(FORMAT)(ShellLoader)
