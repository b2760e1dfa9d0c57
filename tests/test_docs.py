# SPDX-License-Identifier: Apache-2.0
"""Documents name only existing links, files, commands, options, keys, metrics and rooms."""

import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_hetero_spec.bench.datasets import Dataset
from vllm_hetero_spec.bench.suite import SuiteDrafter, SuiteFile, Target
from vllm_hetero_spec.cli.main import main
from vllm_hetero_spec.draft.methods import HETERO, SLEM
from vllm_hetero_spec.draft.methods import METHODS as TABLE
from vllm_hetero_spec.engine.compat.releases import SUPPORTED
from vllm_hetero_spec.engine.metrics.counters import CHAINS, METRICS, REASONS
from vllm_hetero_spec.options import (
    CONTROLLERS,
    METHODS,
    VERIFICATIONS,
    VLLM_KEY,
    ConfidenceOptions,
    Debug,
    FuzzyOptions,
    HeteroOptions,
    parse,
    wants_us,
)

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "vllm_hetero_spec"
README = REPO / "README.md"
CONFIGURATION = REPO / "examples" / "configuration.md"
BENCH = REPO / "examples" / "bench" / "README.md"
DOCUMENTS = sorted(
    file
    for folder in (".", ".github", "examples", "scripts", "tests", "vllm_hetero_spec")
    for file in (REPO / folder).glob("*.md" if folder == "." else "**/*.md")
)
# Files that users, commands or other programs write.
NOT_OURS = (
    "results.md",
    "results.jsonl",
    "summary.json",
    "prompts.jsonl",
    "prompts_like_yours.jsonl",
)
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda file: str(file.relative_to(REPO))
)


def prose(document: Path) -> str:
    return re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def quoted(text: str) -> list[str]:
    """Return the texts between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def commands(document: Path) -> Iterator[list[str]]:
    """Yield the words of each command line of a document, in blocks or between backticks."""
    text = document.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    blocks += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(document))]
    blocks += re.findall(r"^    (\S.*)$", text, flags=re.MULTILINE)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        try:
            yield shlex.split(line, comments=True)
        except ValueError:  # a fragment with a quotation mark
            continue


def tables(document: Path, heading: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables whose first column has this heading."""
    text = document.read_text(encoding="utf-8")
    for table in re.findall(r"(?:^ *\|.*\n)+", text, flags=re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
        ]
        if head[0] == heading:
            yield from rows


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 160


def test_figures_are_filled_in() -> None:
    assert not [path for path in DOCUMENTS if "PLACE" + "HOLDER" in path.read_text()]


def test_each_supported_release_has_run_somewhere() -> None:
    rows = list(tables(REPO / "examples" / "compatibility.md", "vLLM"))
    for major, minor in SUPPORTED:
        assert any(row[0].startswith(f"{major}.{minor}.") and all(row) for row in rows)


@each_document
def test_links_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        linked = document.parent / path if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), flags=re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, target


@each_document
def test_files_that_are_named_exist(document: Path) -> None:
    places = (document.parent, REPO, PACKAGE)
    for name in quoted(prose(document)):
        path = re.fullmatch(r"(?!/|~|\$)[\w./-]+(?:/|\.(?:py|sh|toml|ya?ml|md|json|jsonl))", name)
        if path is None or name in NOT_OURS:
            continue
        here = any((place / name).exists() for place in places)
        assert here or any(PACKAGE.rglob(name)) or any((REPO / "tests").rglob(name)), name


@each_document
def test_commands_and_their_options_exist(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(document):
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        scripts = [word for word in words[1:] if re.match(r"(scripts|examples|tests)/", word)]
        for file in scripts:
            assert (REPO / file).exists(), " ".join(words)
        if words[:1] == ["vllm-hetero-spec"] and len(words) > 1:
            with pytest.raises(SystemExit) as ended:
                main([words[1], "--help"])
            assert ended.value.code == 0, " ".join(words)
            described = capsys.readouterr().out
            assert not {each for each in options if each not in described}, " ".join(words)
        elif words[:1] == ["python"] and scripts and scripts[0].endswith(".py"):
            source = (REPO / scripts[0]).read_text(encoding="utf-8")
            for shared in re.findall(r"^from (_\w+) import", source, flags=re.MULTILINE):
                source += (REPO / "scripts" / f"{shared}.py").read_text(encoding="utf-8")
            assert not {each for each in options if f'"{each}"' not in source}, " ".join(words)


@each_document
def test_configurations_are_accepted(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for found in re.findall(r'\{"method": .*?\}', text):
        config: dict[str, Any] = json.loads(found.replace("...", '"model": "DRAFTER"'))
        assert wants_us(config), found
        parse({"num_speculative_tokens": 5, **config})


@each_document
def test_metrics_that_are_named_exist(document: Path) -> None:
    shown = {metric.shown or name for name, metric in METRICS.items()}
    for name in re.findall(r"vllm:hetero_spec_(\w+)", document.read_text(encoding="utf-8")):
        assert re.sub(r"_(total|sum|bucket)$", "", name) in shown, name


def names_in(rows: Iterator[list[str]]) -> set[str]:
    """Return the texts between backticks in the first column of a table."""
    return {name for row in rows for name in quoted(row[0])}


def names_of(model: Any) -> set[str]:
    """Return the names of the fields of a dataclass."""
    return {each.name for each in dataclasses.fields(model)}


def test_every_key_is_described_and_no_other() -> None:
    keys = names_of(HeteroOptions)
    assert len(keys - {"parallel_drafting"}) <= 22  # and one that vLLM's methods have, too
    assert names_in(tables(CONFIGURATION, "key")) == {*keys, VLLM_KEY}
    assert names_in(tables(CONFIGURATION, "key of `debug`")) == names_of(Debug)
    assert names_in(tables(CONFIGURATION, "key of a word")) == {
        *(f"verification.{FuzzyOptions.word}.{name}" for name in names_of(FuzzyOptions)),
        *(f"controller.{ConfidenceOptions.word}.{name}" for name in names_of(ConfidenceOptions)),
    }
    assert names_in(tables(README, "key")) <= keys


def test_every_method_controller_and_reason_is_described() -> None:
    assert names_in(tables(CONFIGURATION, "`method`")) == set(METHODS)
    assert names_in(tables(CONFIGURATION, "`controller`")) == set(CONTROLLERS)
    assert names_in(tables(CONFIGURATION, "reason")) == set(REASONS)
    assert names_in(tables(CONFIGURATION, "because")) == set(CHAINS)


def test_the_decision_guide_names_existing_options() -> None:
    guide = list(tables(README, "task"))
    assert guide
    supported = {*METHODS, *VERIFICATIONS, *CONTROLLERS, *names_of(HeteroOptions), "sharded"}
    supported |= names_of(FuzzyOptions)
    for row in guide:
        assert set(quoted(" ".join(row[1:]))) <= supported, row


def test_every_key_of_a_suite_is_described() -> None:
    """Keys are the fields of the classes that a suite file is read into."""
    described = names_in(tables(BENCH, "key"))
    written: set[str] = set()
    for model in (SuiteFile, Target, SuiteDrafter, Dataset):
        written |= {each.name for each in dataclasses.fields(model)} - set(model.not_in_files())
    assert written <= set(quoted(prose(BENCH)))
    assert described <= written


def test_methods_that_draft_ahead_are_described() -> None:
    (row,) = (row for row in tables(CONFIGURATION, "question") if "Which methods run" in row[0])
    methods = {name for name, method in TABLE.items() if method.draws_ahead}
    assert set(quoted(row[1])) == {*methods, SLEM, HETERO}


def test_environment_variables_are_those_of_the_code() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
    in_code = set(re.findall(r"\"(HETERO_SPEC_[A-Z_]+)\"", sources))
    described = names_in(tables(CONFIGURATION, "variable"))
    assert {name for name in described if name.startswith("HETERO_SPEC_")} == in_code


def test_imports_of_rooms() -> None:
    """The table of rooms lists exactly the imports of all files, also those inside functions."""
    table = {
        room: set(quoted(row[2]))
        for row in tables(PACKAGE / "README.md", "room")
        for room in quoted(row[0])
    }
    folders = {file.parent.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*/*.py")}
    assert {f"{folder}/" for folder in folders} == table.keys()
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if "/" in path:  # all rooms may import the files without a folder
            room = room_of(path, table)
            imported = {room_of(other, table) for other in imports(file) if "/" in other}
            found[room] = found.get(room, set()) | imported - {room}
    assert found == table


def room_of(path: str, rooms: Collection[str]) -> str:
    """Return the innermost room of the table that contains a file."""
    return max((room for room in rooms if path.startswith(room)), key=len, default=path)


def imports(file: Path) -> Iterator[str]:
    """Yield the modules of this package that a file imports, as paths below the package."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("vllm_hetero_spec."):
                path = name.removeprefix("vllm_hetero_spec.").replace(".", "/")
                if (PACKAGE / f"{path}.py").exists():
                    yield f"{path}.py"


def test_vllm_is_imported_at_the_head_of_files_in_the_engine_alone() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.is_relative_to(PACKAGE / "engine"):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in getattr(node, "names", ())] if not named else []
            assert not any(re.match(r"vllm(\.|$)", name) for name in named), file


def test_a_step_is_explained_in_twelve_lines() -> None:
    """Each line names a method or function that exists."""
    text = (PACKAGE / "README.md").read_text(encoding="utf-8")
    step = text.partition("## A step\n")[2].partition("\n\n**")[0]
    lines = re.split(r"^\d+\. ", step, flags=re.MULTILINE)[1:]
    assert len(lines) <= 12
    code = {file: file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    for line in lines:
        found = re.findall(r"`(?:(\w+)\.)?(\w+)\(\)`", line)
        assert found, line
        for owner, name in found:
            assert any(
                f"def {name}(" in source and (not owner or f"class {owner}" in source)
                for source in code.values()
            ), f"{owner}.{name}"


def test_the_glossary_is_short() -> None:
    assert len(list(tables(PACKAGE / "README.md", "word"))) <= 15
