# SPDX-License-Identifier: Apache-2.0
"""Controllers compared in the same engines: the table that is made of it."""

from measure_lookahead import Run, _in_turn, report


def run_of(number: int, controller: str, seconds: float, *, drafted: int = 0) -> Run:
    return Run(4, number, controller, seconds, 100, drafted, drafted // 2, 0.1, number == 0)


def test_controllers_are_compared_within_rounds() -> None:
    """An engine twice as slow says nothing of its controllers."""
    table = report(
        [
            run_of(0, "alone", 1.0), run_of(0, "k2", 0.5, drafted=80), run_of(0, "goodput", 0.4),
            run_of(1, "alone", 2.0), run_of(1, "k2", 1.0, drafted=60), run_of(1, "goodput", 0.8),
        ]
    )  # fmt: skip
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found = {line[1]: line[2:] for line in cells}
    assert found["alone"][1:3] == ["1.000 ±0.000", "0.500 ±0.000"]
    assert found["k2"][:3] == ["150.0", "2.000 ±0.000", "1.000 ±0.000"]
    assert found["k2"][3:] == ["0.70", "0.35", "0.100", "1 of 2"]
    assert found["goodput"][:3] == ["187.5", "2.500 ±0.000", "1.250 ±0.000"]


def test_every_controller_has_each_place_once() -> None:
    names = ["alone", "k2", "goodput", "fresh"]
    for first in (0, 4):
        orders = [_in_turn(names, number) for number in range(first, first + 4)]
        assert all(sorted(place) == sorted(names) for place in zip(*orders, strict=True))
        assert all(sorted(order) == sorted(names) for order in orders)
    assert _in_turn(names, 0)[::-1] == _in_turn(names, 4)
