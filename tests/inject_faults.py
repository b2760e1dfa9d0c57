# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults, one or more for each promise, and the fast tests that have to fail on them.

`python tests/inject_faults.py` copies the repository to a temporary folder for each fault, changes
one place and runs the tests named beside it. It prints which of them failed, and ends with exit
code 1 if a fault was not caught by each. Words of promises or faults on the command line select
some; `--list` prints the table of `tests/README.md`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
PACKAGE = "vllm_hetero_spec"
NOT_COPIED = (".git", ".venv*", "__pycache__", "*.egg-info", "build", "shared")


class Fault(NamedTuple):
    """One wrong place."""

    promise: str  # first column of the table of promises
    what: str  # the fault in a few words
    file: str  # path below the repository
    right: str  # text that is in the file once
    wrong: str  # takes its place
    caught_by: tuple[str, ...]  # files or node ids of tests, below `tests/`; each has to fail


GREEDY = "Temperature 0: the tokens of the target"
LAW = "Other temperatures: the distribution of the target"
SEED = "`race`: a seed gives the same output"
FUZZY = "`fuzzy` reports its bound"
TREES = "Draft trees change nothing but speed"
PARALLEL = "A parallel drafter writes a draft in one forward"
PROCESS = "`draft_ahead` changes nothing but speed"
HARMLESS = "A fault of the drafter costs no request"
UNCHANGED = "An engine without our method is unchanged"
SPEED = "Never much slower than the target alone"
REFUSALS = "A refusal is one sentence"
METRICS = "Metrics count every step once"
COMMANDS = "The commands work"
RELEASES = "vLLM 0.32 and 0.33"
DOCUMENTS = "The documents are true"

IDENTITY = "engine/test_identity.py::test_same_tokens_as_the_target_alone"
SAMPLES = "engine/test_sampling.py::test_samples_follow_the_targets_law"
ON_V2 = "engine/test_fast_children.py::test_on_v2"
SAME = "test_same_tokens_as_the_target_alone"

FAULTS = [
    Fault(
        GREEDY,
        "every draft token is accepted",
        f"{PACKAGE}/verify/rules.py",
        "in_a_row(drafts, drafts.tokens == best)",
        "in_a_row(drafts, drafts.tokens >= 0)",
        ("verify/test_rules.py::test_greedy_rule", f"{IDENTITY}[pair-batch 8]"),
    ),
    Fault(
        GREEDY,
        "every draft token of a greedy batch on V2 is accepted",
        f"{PACKAGE}/engine/verifier/rejection_sampler_v2.py",
        "agrees = tokens[:, :-1] == fed[:, 1:]",
        "agrees = fed[:, 1:] >= 0",
        (
            "engine/test_verification_v2.py::test_greedy_requests_emit_the_likeliest_tokens",
            f"{ON_V2}[identity_v2.py::{SAME}[batch 8]]",
        ),
    ),
    Fault(
        GREEDY,
        "draft tokens are compared with the logits before penalties and bad words",
        f"{PACKAGE}/engine/verifier/rejection_sampler_v1.py",
        "lambda: fast_argmax(target),",
        "lambda: fast_argmax(logits[metadata.target_logits_indices]),",
        (f"{IDENTITY}[pair-mixed parameters]",),
    ),
    Fault(
        LAW,
        "a draft token is accepted with twice the correct probability",
        f"{PACKAGE}/verify/rules.py",
        "(drafts.accept_noise() * mass < target)",
        "(drafts.accept_noise() * mass < 2 * target)",
        ("verify/test_rules.py::test_law_of_a_batch[token]", f"{SAMPLES}[tli-token-drafter]"),
    ),
    Fault(
        LAW,
        "the recovered token is sampled from the target's distribution without correction",
        f"{PACKAGE}/verify/drafts.py",
        "weights[0], value=-1)",
        "weights[0], value=0)",
        ("verify/test_rules.py::test_law_of_a_batch[token]",),
    ),
    Fault(
        LAW,
        "top-k is not applied to the rows of draft tokens",
        f"{PACKAGE}/engine/verifier/rejection_sampler_v1.py",
        "None if top_k is None else top_k[part],",
        "None,",
        (f"{SAMPLES}[push_forward-block-drafter]",),
    ),
    Fault(
        SEED,
        "all draft tokens of a request use the random numbers of the first position",
        f"{PACKAGE}/verify/rules.py",
        "race(target_probs, seeds, places + drafts.place_of)",
        "race(target_probs, seeds, places)",
        (
            "verify/test_rules.py::test_race_rule",
            "engine/test_races.py::test_drafters_change_nothing[long drafts]",
        ),
    ),
    Fault(
        FUZZY,
        "only half of the total variation is reported",
        f"{PACKAGE}/verify/fuzzy.py",
        'diverge(p, q, "tv") * near[part]',
        '0.5 * diverge(p, q, "tv") * near[part]',
        ("verify/test_rules.py::test_fuzzy_reports_what_it_gave_up",),
    ),
    Fault(
        TREES,
        "a node of a draft tree is accepted without its parent",
        f"{PACKAGE}/trees/walk.py",
        "reached = reached & reached[parents]",
        "reached = reached.clone()",
        ("trees/test_walk.py::test_the_walk_on_tensors",),
    ),
    Fault(
        TREES,
        "the KV of an accepted branch is not copied into the request's blocks",
        f"{PACKAGE}/engine/trees/branches.py",
        "self._copy(pairs)",
        "self._copy([])",
        (f"{ON_V2}[tree_runs.py::{SAME}[small blocks]]",),
    ),
    Fault(
        PARALLEL,
        "masks are read at the positions of the tokens before them",
        f"{PACKAGE}/engine/drafter/parallel.py",
        "places = plan.places[steps, :, own].T",
        "places = plan.places[steps - 1, :, own].T",
        (
            "engine/test_parallel_drafter.py::test_a_perfect_drafter_is_accepted_whole",
            "engine/test_kv_of_texts.py::test_kv_is_that_of_the_text[False-5-True-False]",
        ),
    ),
    Fault(
        PARALLEL,
        "draft tokens count as text that the drafter has read",
        f"{PACKAGE}/engine/drafter/decode_loop.py",
        "if not self.parallel:  # the last draft token",
        "if True:  # the last draft token",
        ("engine/test_kv_of_texts.py::test_kv_is_that_of_the_text[False-0-True-True]",),
    ),
    Fault(
        PROCESS,
        "a precomputed draft begins one token late",
        f"{PACKAGE}/engine/ahead/continuations.py",
        "return list(ids[index:]), known",
        "return list(ids[index + 1 :]), known",
        ("engine/test_continuations.py::test_continuations_are_found_as_by_a_naive_search",),
    ),
    Fault(
        PROCESS,
        "a drafter process that was killed is not started again",
        f"{PACKAGE}/engine/ahead/supervisor.py",
        "self._again = time.monotonic() + rest",
        "self._again = math.inf",
        ("engine/test_supervisor.py::test_a_process_that_never_loads_is_ended_and_started_again",),
    ),
    Fault(
        HARMLESS,
        "the drafter does not pause after an exception",
        f"{PACKAGE}/engine/drafting_rank.py",
        "self._rest = min(2**self._failures, _LONGEST_REST)",
        "self._rest = 0",
        ("engine/test_faults.py::test_drafter_that_raises",),
    ),
    Fault(
        HARMLESS,
        "logits that are not finite are neither counted nor logged",
        f"{PACKAGE}/engine/drafter/draft_batch.py",
        "        if not tokens.finite:\n",
        "        if False:\n",
        ("engine/test_faults.py::test_nan_logits",),
    ),
    Fault(
        UNCHANGED,
        "every speculative configuration is treated as ours",
        f"{PACKAGE}/options.py",
        "    if method in METHODS or given",
        "    if method or given",
        (
            "test_options.py::test_other_configurations_are_left_alone",
            "engine/test_frontend.py::test_users_who_do_not_ask_see_nothing",
        ),
    ),
    Fault(
        SPEED,
        "`goodput` never disables speculation",
        f"{PACKAGE}/lookahead/goodput.py",
        "self.off = gain <",
        "self.off = 0 * gain >",
        (
            "lookahead/test_goodput.py::test_a_drafter_that_becomes_useless_and_recovers",
            "lookahead/test_goodput.py::test_never_slower_and_as_fast_as_the_best_fixed",
        ),
    ),
    Fault(
        REFUSALS,
        "a threshold above 1 is accepted",
        f"{PACKAGE}/options.py",
        'between(0, 1, "a probability',
        'between(0, 9, "a probability',
        ("test_options.py::test_mistakes_are_refused_in_one_sentence",),
    ),
    Fault(
        METRICS,
        "each step reports the totals since the start",
        f"{PACKAGE}/engine/metrics/counters.py",
        "        self._last = now\n",
        "",
        (
            "engine/test_metrics.py::test_growth_is_what_came_since_the_last_time",
            "engine/test_metrics_engine.py::test_metrics_are_exactly_what_the_worker_counted",
        ),
    ),
    Fault(
        COMMANDS,
        "the acceptance length omits the target's own token",
        f"{PACKAGE}/bench/figures.py",
        "acceptance_length=1 + accepted / drafts if drafts else None",
        "acceptance_length=accepted / drafts if drafts else None",
        ("bench/test_bench_figures.py::test_acceptance_is_pooled_not_averaged",),
    ),
    Fault(
        COMMANDS,
        "wrong input ends with exit code 0",
        f"{PACKAGE}/cli/main.py",
        "        return 2\n",
        "        return 0\n",
        ("test_cli.py::test_wrong_options_are_refused",),
    ),
    Fault(
        RELEASES,
        "the ledger names a symbol that vLLM does not have",
        f"{PACKAGE}/engine/compat/ledger.toml",
        '"EngineArgs.create_engine_config" =',
        '"EngineArgs.make_engine_config" =',
        ("engine/test_compat.py::test_ledger_matches_the_installed_vllm",),
    ),
    Fault(
        DOCUMENTS,
        "the README names a key that does not exist",
        "README.md",
        "| `context` |",
        "| `contexts` |",
        ("test_docs.py::test_every_key_is_described_and_no_other",),
    ),
]


def rows() -> list[list[str]]:
    """The table of faults: promise, fault, tests."""
    return [[f.promise, f.what, ", ".join(f"`{t}`" for t in f.caught_by)] for f in FAULTS]


def missed(fault: Fault, copy: Path) -> list[str]:
    """Inject a fault into a copy of the repository. Return its tests that do not fail on it."""
    shutil.copytree(REPO, copy, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    file = copy / fault.file
    file.write_text(file.read_text().replace(fault.right, fault.wrong))
    kept = []
    for test in fault.caught_by:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not full"]
        done = subprocess.run(
            [*command, str(copy / "tests" / test)],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        print(f"  {test}: {'caught' if failed else 'NOT CAUGHT'}", flush=True)
        if not failed:
            print(done.stdout[-1000:], flush=True)
            kept.append(test)
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of promises or faults; all where none is given")
    parser.add_argument("--list", action="store_true", help="print the table and inject nothing")
    given = parser.parse_args()
    chosen = [f for f in FAULTS if all(w in f"{f.promise} {f.what}" for w in given.words)]
    if given.list:
        for row in rows():
            print(f"| {' | '.join(row)} |")
        return 0
    kept = []
    for fault in chosen:
        print(f"{fault.promise}: {fault.what}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            kept += missed(fault, Path(folder) / "repository")
    print(f"{len(chosen)} faults, {len(kept)} tests passed in spite of one")
    return 1 if kept or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
