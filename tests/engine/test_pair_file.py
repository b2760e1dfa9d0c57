# SPDX-License-Identifier: Apache-2.0
"""Estimates of a pair are kept on disk, by set-up, never partially, and soon enough."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import engine, proposer_of, slem
from scenarios import Outputs, generate, greedy

from vllm_hetero_spec.engine import pair_file, step_timing
from vllm_hetero_spec.engine.pair_file import PairFile
from vllm_hetero_spec.lookahead.acceptance import Observation
from vllm_hetero_spec.lookahead.costs import CostModel
from vllm_hetero_spec.lookahead.estimates import Estimates
from vllm_hetero_spec.lookahead.goodput import Goodput


def known() -> Estimates:
    return Estimates.of(CostModel([(1, 0.1), (8, 0.2)], [(1, 0.01)]), 4)


def learn(of: Estimates, drafts: int) -> None:
    for _ in range(drafts):
        of.acceptance.observe(Observation(4, 3, [0.9] * 4, 4), random=False)
    of.acceptance.learn()


def test_it_is_kept_by_what_it_depends_on(tmp_path: Path) -> None:
    PairFile(tmp_path / "pairs", "pair", 32).write(known())
    again = PairFile(tmp_path / "pairs", "pair", 32).read(4)
    assert again is not None
    assert again.costs.target(1, 1) == pytest.approx(known().costs.target(1, 1))
    assert PairFile(tmp_path / "pairs", "pair", 64).read(4) is None
    assert PairFile(None, "pair", 32).read(4) is None


@pytest.mark.parametrize("text", ["", "{}", '{"version": 1}', "[1", "null", '{"version": 99}'])
def test_a_spoilt_file_is_measured_anew(tmp_path: Path, text: str, caplog: Any) -> None:
    PairFile(tmp_path, "pair").write(known())
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert PairFile(tmp_path, "pair").read(4) is None
    assert len([message for message in caplog.messages if "measuring again" in message]) == 1


def test_a_folder_that_cannot_be_looked_into_is_told(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    """An exception would let other ranks wait forever. A missing file causes no log line."""
    assert PairFile(tmp_path, "pair").read(4) is None
    assert not caplog.messages

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("stat", "open", "read_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert PairFile(tmp_path, "pair").read(4) is None
    (told,) = caplog.messages
    assert "Permission denied" in told
    assert "measuring again" in told


def test_a_folder_that_cannot_be_written_to_is_logged_once(tmp_path: Path, caplog: Any) -> None:
    """It raises no exception at the start, while requests are served, or at the end."""
    (tmp_path / "file").write_text("")
    pair = PairFile(tmp_path / "file" / "pairs", "pair")
    for _ in range(3):
        pair.write(known())
    (told,) = caplog.messages
    assert f"kept in {tmp_path / 'file' / 'pairs'} (Not a directory), and" in told
    assert told.endswith("set XDG_CACHE_HOME to a folder that can be written to.")


def test_engines_that_write_at_once_leave_it_whole(tmp_path: Path, caplog: Any) -> None:
    """This also holds if they have the same process id, as in containers that share a folder."""
    caplog.set_level("INFO", logger="vllm.hetero_spec")
    writers = [PairFile(tmp_path, "pair") for _ in range(4)]
    with ThreadPoolExecutor(len(writers)) as pool:
        for _ in pool.map(lambda n: writers[n % len(writers)].write(known()), range(200)):
            assert PairFile(tmp_path, "pair").read(4) is not None
    assert not caplog.messages
    assert len(list(tmp_path.iterdir())) == 1


def test_it_is_written_now_and_then_and_at_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    class Owner:
        pass

    def drafts() -> int:
        (path,) = tmp_path.iterdir()  # no partial file is left
        return int(json.loads(path.read_text())["acceptance"]["drafts"])

    now = [0.0]
    monkeypatch.setattr(pair_file.time, "monotonic", lambda: now[0])
    owner, of = Owner(), known()
    file, other = PairFile(tmp_path, "pair"), PairFile(tmp_path, "pair")
    file.write(of)
    file.write_if_due()  # no estimates are registered yet
    file.save_on_exit(of, owner)
    learn(of, 5)
    file.write_if_due()
    assert drafts() == 0
    now[0] += 5.0
    file.write_if_due()
    assert drafts() == 5
    other.write(known())  # another engine
    assert drafts() == 0
    learn(of, 2)
    file.write_if_due()
    assert drafts() == 0
    now[0] += 10.0
    file.write_if_due()
    assert drafts() == 7
    learn(of, 1)
    del owner
    gc.collect()
    assert drafts() == 8


def test_a_server_that_is_killed_early_has_kept_something(tmp_path: Path, monkeypatch: Any) -> None:
    """The file is written soon after the start, and later less often."""
    now, written = [0.0], []
    monkeypatch.setattr(pair_file.time, "monotonic", lambda: now[0])
    file, of = PairFile(tmp_path, "pair"), known()
    file.save_on_exit(of, owner := PairFile(None))
    write = file.write

    def counted(known: Estimates) -> None:
        written.append(now[0])
        write(known)

    monkeypatch.setattr(file, "write", counted)
    for now[0] in range(300):
        file.write_if_due()
    assert written == [5, 15, 35, 75, 135, 195, 255]
    assert PairFile(tmp_path, "pair").read(4) is not None
    assert owner is not None


# ---- engines -------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.engine
def test_a_second_start_goes_on_where_the_first_ended(
    demo_pair: Path, texts: list[str], alone: Outputs, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    """It has the estimates from all drafts of the first start, and times no steps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Costs do not change, so drafting continues even if a busy machine has slow steps.
    monkeypatch.setattr(CostModel, "observe_target", lambda *_: None)
    monkeypatch.setattr(CostModel, "observe_drafting", lambda *_, **__: None)
    timed: list[int] = []

    def time_steps(step: Any, largest: int, agree: Any = bool) -> step_timing.Points:
        timed.append(largest)
        drafter = len(timed) % 2 == 0
        return [(1, 0.002), (32, 0.002)] if drafter else [(1, 0.02), (160, 0.04)]

    monkeypatch.setattr(step_timing, "time_steps", time_steps)
    caplog.set_level("INFO", logger="vllm.hetero_spec")

    def serve(**changes: Any) -> tuple[int, int]:
        """Return the number of observed drafts at the start and at the end."""
        # The target is its own drafter, so drafts pay on every machine.
        spec = slem(demo_pair / "target", 6, controller="goodput", **changes)
        with engine(demo_pair / "target", spec) as llm:
            controller = proposer_of(llm).drafting.control.controller
            assert isinstance(controller, Goodput)
            at_start = controller.known.acceptance.drafts
            for index, text in enumerate(texts[:6]):
                assert generate(llm, [text], greedy()) == {"0": alone[str(index)]}
            return at_start, controller.known.acceptance.drafts

    def went_on() -> int:
        gc.collect()
        return sum("starts from the estimates" in message for message in caplog.messages)

    at_start, learnt = serve()
    assert (at_start, len(timed), went_on()) == (0, 2, 0)
    assert learnt > 0
    assert serve()[0] == learnt
    assert (len(timed), went_on()) == (2, 1)  # nothing was timed
    assert serve(verification="block")[0] == 0  # another set-up
    assert (len(timed), went_on()) == (4, 1)
    for path in (tmp_path / "vllm_hetero_spec" / "pairs").iterdir():
        path.write_text("{")
    assert serve()[0] == 0  # like the first start
    assert (len(timed), went_on()) == (6, 1)
