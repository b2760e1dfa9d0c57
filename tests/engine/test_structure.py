# SPDX-License-Identifier: Apache-2.0
"""Tests of the package's structure: reads of vLLM's batch, moves of tensors, imports, file size."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_docs import REPO, quoted, tables

import vllm_hetero_spec

PACKAGE = Path(vllm_hetero_spec.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Attributes of vLLM's runner, its batch, its requests and its scheduler's output.
BATCH = {
    "input_batch",
    "num_tokens_no_spec",
    "token_ids_cpu",
    "output_token_ids",
    "prompt_embeds",
    "scheduled_new_reqs",
    "scheduled_spec_decode_tokens",
    "num_spec_tokens_to_schedule",
    "total_num_scheduled_tokens",
    "rejection_sampler",
    "topk_topp_sampler",
    "_dummy_run",
    "req_states",
    "all_token_ids",
    "idx_mapping",
    "idx_mapping_np",
    "draft_tokens_handler",
}

# Files that may move tensors between host and device or read one, and why. Others use `staging`.
MOVERS = {
    "draft/methods.py": "arrays of the host: tables of the pair",
    "engine/ahead/drafter_main.py": "banned ids, once at start",
    "engine/ahead/server_requests.py": "arrays of the host: what the drafter thought of its tokens",
    "engine/ahead/table.py": "arrays of the host: drafts in shared memory",
    "engine/copies/earlier_text.py": "arrays of the host: a prompt's token ids",
    "engine/copies/policy.py": "arrays of the host: mean acceptance",
    "engine/drafter/inline_source.py": "banned ids, once at start",
    "engine/drafter/method.py": "tables of the pair, once at start",
    "engine/drafter/recorded_steps.py": "static buffers, once at start",
    "engine/drafter/requests.py": "arrays of the host: a prompt's token ids",
    "engine/drafter/round_plan.py": "arrays of the host: what will be fed",
    "engine/drafter/slrs_spans.py": "runs slrs",
    "engine/drafter/steps.py": "offsets of requests, once at start",
    "engine/drafter/token_healing.py": "candidates that have been fetched",
    "engine/drafter/token_picking.py": "rows of forks, on the host; confidences, on a CPU alone",
    "engine/seam/draft_inputs_v2.py": "drafts for those who ask too early, once at start",
    "engine/seam/runner_v1.py": "arrays of the host: lengths in the runner's batch",
    "engine/seam/runner_v2.py": "arrays of the host: what requests sampled",
    "engine/seam/step_view.py": "arrays of the host: token ids of a request",
    "engine/trees/attention_v1.py": "arrays of the host: tokens of a step",
    "engine/trees/control.py": "arrays of the host: what trees are worth",
    "engine/trees/drafts.py": "arrays of the host: rows that are known",
    "engine/verifier/rejection_sampler_v2.py": "arrays of the host: where requests' rows begin",
    "engine/verifier/cpu_rows_v1.py": "tokens, penalties and values of rows, on a CPU alone",
    "slrs/merges.py": "tables of the pair, once at start",
    "slrs/slrs.py": "on the host by design: what was drawn decides what is fed",
    "slrs/tree.py": "part of slrs",
    "trees/growth.py": "arrays of the host: what arrived first",
    "trees/values.py": "arrays of the host: estimates",
}

_BIRTH = ("__init__", "__post_init__")


def named(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def trees() -> Iterator[tuple[str, ast.Module]]:
    for file in FILES:
        yield named(file), ast.parse(file.read_text(encoding="utf-8"))


def test_one_file_reads_each_runner_and_its_batch() -> None:
    readers = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in BATCH
        if not name.startswith("engine/compat/")  # repairs of vLLM itself
    }
    # `runner` has what both share. The other files write drafts into the batch, or give attention a
    # batch other than the scheduler's.
    files = ("runner", "runner_v1", "runner_v2", "draft_inputs_v2")
    attention = {f"engine/trees/{file}.py" for file in ("attention_v1", "attention_v2")}
    assert readers == {f"engine/seam/{file}.py" for file in files} | attention


@pytest.mark.parametrize("name", [named(file) for file in FILES if "engine" in file.parts])
def test_attributes_are_born_in_init(name: str) -> None:
    """Each attribute of an object is declared in its class or assigned in `__init__`."""
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        declared = {
            target.id
            for node in owner.body
            for target in ast.walk(node)
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)
        }
        declared |= {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        born = {m.name: set(_assigned(m)) for m in methods}
        late = set().union(*(names for m, names in born.items() if m not in _BIRTH), set())
        assert late <= declared.union(*(born.get(m, set()) for m in _BIRTH)), owner.name


def _assigned(method: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def test_imports_run_one_way() -> None:
    """Imports at the top level of modules have no cycles."""
    imports = {}
    for name, tree in trees():
        module = "vllm_hetero_spec." + name.removesuffix(".py").replace("/", ".")
        imports[module.removesuffix(".__init__")] = set(_loaded(tree))
    known = set(imports)
    waiting = {module: deps & known for module, deps in imports.items()}
    while ready := [module for module, deps in waiting.items() if not deps]:
        for module in ready:
            del waiting[module]
        for deps in waiting.values():
            deps.difference_update(ready)
    assert not waiting, f"circles among {sorted(waiting)}"


def _loaded(tree: ast.Module) -> Iterator[str]:
    """Yield the modules that are imported at the top level. Imports in functions run later."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_what_moves_tensors_is_known() -> None:
    """This checks the source text only. Other tests use fake tensors and count packets."""
    movers = {
        name
        for name, tree in trees()
        if name.startswith(("engine/", "draft/", "verify/", "slrs/", "trees/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _moves(node)
    }
    assert movers == MOVERS.keys()


@pytest.mark.parametrize(
    ("call", "moves"),
    [
        ("a.to(device)", True),
        ("a.to(b.device, non_blocking=True)", True),
        ("a.to(device=device)", True),
        ("a.to(torch.int32)", False),
        ("a.to(b.dtype)", False),
        ("torch.tensor(a, device=device)", True),
        ("torch.tensor(a)", False),
        ("a.tolist()", True),
        ("(a > 0).nonzero()", True),
        ("a.sum().item()", True),
        ("np.flatnonzero(a)", False),
    ],
)
def test_moves_are_seen(call: str, moves: bool) -> None:
    calls = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
    assert any(map(_moves, calls)) is moves


def _moves(call: ast.Call) -> bool:
    """Return True if a call moves a tensor between host and device, or reads one."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    named = {keyword.arg for keyword in call.keywords}
    if name in ("tensor", "as_tensor"):
        return "device" in named
    if name == "to":
        text = "".join(map(ast.unparse, call.args))
        return "device" in named or not (text.startswith("torch.") or text.endswith("dtype"))
    return name in ("tolist", "item", "cpu", "cuda", "nonzero")


# Files to delete when vLLM removes Model Runner V1, and files that import them.
V1 = {
    "engine/seam/runner_v1.py",
    "engine/trees/attention_v1.py",
    "engine/verifier/race_sampler_v1.py",
    "engine/verifier/rejection_sampler_v1.py",
    "engine/verifier/cpu_rows_v1.py",
}
IMPORT_V1 = {"engine/seam/worker_hooks.py", "engine/verifier/install.py"}


def test_files_of_model_runner_v1_are_listed() -> None:
    assert {named(file) for file in FILES if file.stem.endswith("_v1")} == V1
    page = tables(REPO / "examples" / "model_runner_v1.md", "file to delete")
    assert {name for row in page for name in quoted(row[0])} == V1
    importers = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{alias.name}".count("_v1") for alias in node.names)
    }
    assert importers <= V1 | IMPORT_V1, importers - V1 - IMPORT_V1


# Optional features, and the files of the core that compose them.
ROOMS = ("slrs", "trees", "engine.trees", "engine.ahead", "engine.copies")
OPTIONAL = (*ROOMS, "engine.drafter.slrs_spans", "engine.drafter.token_healing")
CORE = ("text", "verify", "lookahead", "draft", "inputs", "bench", "cli", "engine")
CORE += ("engine.compat", "engine.metrics", "engine.seam", "engine.drafter", "engine.verifier")
COMPOSE = {
    "engine/drafting_rank.py",  # policies, and the source of drafts
    "engine/drafter/inline_source.py",  # extensions of a round
    "engine/drafter/method.py",  # SLRS-n
    "engine/seam/spec_config.py",  # hooks of front ends
    "engine/seam/worker_hooks.py",  # hooks of workers
}


def test_each_room_is_core_or_optional() -> None:
    rooms = {named(file.parent).replace("/", ".") for file in FILES if file.parent != PACKAGE}
    assert rooms == {*CORE, *ROOMS}


def test_the_core_imports_no_optional_feature() -> None:
    prefixes = tuple(f"vllm_hetero_spec.{room}." for room in OPTIONAL)
    rooms = tuple(room.replace(".", "/") for room in OPTIONAL)
    importers = {
        name
        for name, tree in trees()
        if not name.startswith(rooms)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        if f"{node.module}.".startswith(prefixes)
        or any(f"{node.module}.{alias.name}.".startswith(prefixes) for alias in node.names)
    }
    assert importers == COMPOSE


def test_no_file_is_long() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert not {named(file) for file, count in lines.items() if count > 350}
