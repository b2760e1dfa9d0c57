# SPDX-License-Identifier: Apache-2.0
"""Environment, test selection, and fixtures of all tests: model pairs, prompts, optional data."""

import json
import os
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

from vllm_hetero_spec.paths import demo_folder

REPO = Path(__file__).resolve().parent.parent

# For tiny models, threads cost more than they gain. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Number of cached kernels, one per batch shape; small, so that a memory leak is visible.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
# Child processes start faster if they share compiled Python files and vLLM's cache. That cache
# contains facts about models for which vLLM would start another process.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(REPO / "tests" / "any_process"), os.environ.get("PYTHONPATH")])
)
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
# Engines run in the process that starts them: tests can access the worker, and start-up is faster.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tests must not access a hub: they build models or read them from disk.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared_or_none() -> Path | None:
    """The folder of optional real tokenizers, models and prompts; None if there is none."""
    path = Path(os.environ.get("HETERO_SPEC_SHARED") or REPO.parent / "shared")
    return path if path.is_dir() else None


@pytest.fixture(scope="session")
def shared(shared_or_none: Path | None) -> Path:
    """The folder of `shared_or_none`; skips the test if there is none."""
    if shared_or_none is None:
        pytest.skip("needs real tokenizers and models (HETERO_SPEC_SHARED names their folder)")
    return shared_or_none


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("full", deadline=None)
    settings.register_profile("fast", deadline=None, max_examples=20)
    settings.load_profile("full" if config.getoption("--full") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Select the tier, and order the files.

    Without `--full`, tests marked `full` run only if the command line names their file or `-m`
    names the mark. Files that start engines run first: they take long, and at the end other workers
    would be idle.
    """
    if not config.getoption("--full") and "full" not in config.getoption("markexpr"):
        named = {Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args}
        left_out = {i for i in items if i.get_closest_marker("full") and i.path not in named}
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    starts = {
        item.path for item in items if {"engine", "server"} & {m.name for m in item.iter_markers()}
    }
    items.sort(key=lambda item: item.path not in starts)


@pytest.fixture(scope="session")
def demo_pair() -> Path:
    """The demo models: target/, target-wide/, drafter/, prompts.jsonl and chats.jsonl."""
    from make_demo import make_demo  # imports torch, which reads OMP_NUM_THREADS

    out = demo_folder()
    if "HETERO_SPEC_DEMO" not in os.environ:
        out.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{out}.lock"):  # one of the workers makes the folder, the others wait
            make_demo(out)
        os.environ["HETERO_SPEC_DEMO"] = str(out)  # for child processes
    return out


@pytest.fixture(scope="session")
def chain_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with written weights, for tests of laws and shares: target/, drafter/, garbled/."""
    from chain_pair import build

    return build(tmp_path_factory.mktemp("chain-pair"))


@pytest.fixture(scope="session")
def code_prompts(demo_pair: Path) -> list[str]:
    """Complete held-out code files. The demo models were trained on similar code."""
    lines = (demo_pair / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def prompts(code_prompts: list[str], shared_or_none: Path | None) -> list[str]:
    """64 prompts: real ones of each kind if available, otherwise parts of held-out code."""
    if shared_or_none is None:
        parts = [(text, part) for part in (4, 3, 2, 1) for text in code_prompts]
        return [text[: len(text) * part // 4] for text, part in parts][:64]
    files = sorted((shared_or_none / "data" / "prompts").glob("*.jsonl"))
    kinds = [[json.loads(line)["prompt"] for line in f.read_text().splitlines()] for f in files]
    mixed = [kind[i] for i in range(64) for kind in kinds if i < len(kind)]
    return [text[:900] for text in mixed[:64]]


@pytest.fixture(scope="session")
def texts(prompts: list[str]) -> list[str]:
    return prompts[:8]


@pytest.fixture(scope="session")
def alone(demo_pair: Path, texts: list[str]) -> dict[str, list[int]]:
    """Greedy tokens of the target alone.

    Request it before a module starts its own engine, because only one engine can exist at a time.
    """
    from harness import engine
    from scenarios import generate, greedy

    with engine(demo_pair / "target") as llm:
        return generate(llm, texts, greedy())
