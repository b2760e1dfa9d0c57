# SPDX-License-Identifier: Apache-2.0
"""Controllers compared in the same engines: the table that is made of it."""

from argparse import Namespace
from types import SimpleNamespace

from measure_lookahead import Bench, Run, _in_turn, report

from vllm_hetero_spec.bench.load import Load, Sample, Trace
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput


def run_of(
    number: int, controller: str, seconds: float, *, drafted: int = 0, temperature: float = 0.0
) -> Run:
    same = number == 0
    counts = 100, drafted, drafted // 2, drafted // 4
    return Run(4, temperature, number, controller, seconds, *counts, 0.25, 0.1, same)


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_controllers_are_compared_within_rounds() -> None:
    """An engine twice as slow says nothing of its controllers."""
    table = report(
        [
            run_of(0, "alone", 1.0), run_of(0, "k2", 0.5, drafted=80), run_of(0, "goodput", 0.4),
            run_of(1, "alone", 2.0), run_of(1, "k2", 1.0, drafted=60), run_of(1, "goodput", 0.8),
        ]
    )  # fmt: skip
    found = {line[2]: line[3:] for line in cells(table)[2:]}
    assert found["alone"][1:4] == ["1.000 ±0.000", "1.000 to 1.000", "0.500 ±0.000"]
    assert found["k2"][:4] == ["150.0", "2.000 ±0.000", "2.000 to 2.000", "1.000 ±0.000"]
    assert found["k2"][4:] == ["0.70", "0.35", "35", "0.25", "0.100", "1 of 2"]
    assert found["goodput"][:2] == ["187.5", "2.500 ±0.000"]
    assert found["goodput"][3] == "1.250 ±0.000"


def test_trees_are_compared_with_chains_load_by_load() -> None:
    seconds = {0.0: (0.5, 0.5), 1.0: (1.0, 1.25)}
    table = report(
        [
            run
            for temperature, trees in seconds.items()
            for number in range(2)
            for run in (
                run_of(number, "chains", 1.0, temperature=temperature),
                run_of(number, "trees", trees[number], drafted=8, temperature=temperature),
            )
        ]
    )
    title, _, *lines = cells(table)
    assert title[4:6] == ["of chains", "95 %"]
    assert [line[:3] for line in lines[1::2]] == [["4", "0.0", "trees"], ["4", "1.0", "trees"]]
    assert lines[1][4:6] == ["2.000 ±0.000", "2.000 to 2.000"]
    assert lines[3][4:6] == ["0.894 ±0.100", "0.800 to 1.000"]
    assert lines[3][title.index("trees")] == "4"


def test_every_controller_has_each_place_once() -> None:
    names = ["alone", "k2", "goodput", "fresh"]
    for first in (0, 4):
        orders = [_in_turn(names, number) for number in range(first, first + 4)]
        assert all(sorted(place) == sorted(names) for place in zip(*orders, strict=True))
        assert all(sorted(order) == sorted(names) for order in orders)
    assert _in_turn(names, 0)[::-1] == _in_turn(names, 4)


def test_chains_and_trees_begin_each_load_with_the_same_knowledge() -> None:
    options = SimpleNamespace(num_speculative_tokens=2, tree_width=3)
    drafting = SimpleNamespace(control=SimpleNamespace(can_stop_early=True))
    goodput = Goodput(Estimates.of(CostModel([(1, 0.1)], [(1, 0.01)]), 2))
    proposer = SimpleNamespace(controller=goodput, options=options, drafting=drafting)
    counters = {"trees": 0, "off_steps": 1, "steps": 2, "propose_seconds": 0.1}
    began: list[float] = []
    ended: list[float] = []

    def run(load: Load) -> Sample:
        costs = proposer.controller.known.costs
        began.append(costs.target(1, 1))
        proposer.controller.observe_step(1, 1, 0.1 + 0.001 * len(began))
        ended.append(costs.target(1, 1))
        traces = [Trace([load.seed or 0], "", 0.0, [], []) for _ in load.prompts]
        return Sample(traces, 1.0, draft_tokens=4, worker=counters)

    arguments = Namespace(
        tree_nodes=8, fixed=[], batches=[1, 2], temperatures=[0.0, 1.0], rounds=2, unmeasured=1,
        tokens=4, longest=4,
    )  # fmt: skip
    runs = Bench(arguments, proposer, run).rounds(0, ["a", "b"])
    assert began[::2] == began[1::2]
    assert began[2::2] == ended[:-2:2]
    assert len(set(began)) == 12
    assert goodput.known.costs.target(1, 1) == began[0]
    assert [run.controller for run in runs[:4]] == ["chains", "trees", "trees", "chains"]
    assert {(run.batch, run.temperature) for run in runs} == {
        (1, 0.0),
        (1, 1.0),
        (2, 0.0),
        (2, 1.0),
    }
    assert all(run.same and run.off == 0.5 for run in runs)
