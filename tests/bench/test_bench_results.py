# SPDX-License-Identifier: Apache-2.0
"""The results file: repair after a crash, refusals, and the copy of an old file."""

import json
from pathlib import Path

import pytest
from bench_fakes import HEADER

from vllm_hetero_spec.bench.load import Sample, Trace
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement
from vllm_hetero_spec.bench.results import FILE, Results, read_results
from vllm_hetero_spec.errors import ConfigError

CELL = Cell(EngineId("t", "slem", "d", 4), "code", 8, 0.7)
RUN = Measurement(CELL, 1, 2)
SAMPLE = Sample(
    traces=[Trace([5, 6, 7], "abc", 0.1234567, [0.25, 0.5000004], [1, 2])],
    seconds=0.5000004,
    drafts=3,
    draft_tokens=5,
    accepted_tokens=2,
    accepted_per_position=[2, 0],
    worker={"drafter_tokens": 6, "skipped": {"no_text": 1}},
    peak_memory_bytes=123,
)


def begin(folder: Path, **options: bool) -> Results:
    return Results(folder, HEADER, **options)


def record(folder: Path, *runs: Measurement) -> None:
    """Write results with SAMPLE for each run."""
    results = begin(folder)
    for run in runs:
        results.measured(run, SAMPLE)
    results.close()


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    record(tmp_path / "deep" / "folder", RUN)
    (found,) = read_results(tmp_path / "deep" / "folder").samples
    assert (found.run, found.session) == (RUN, 0)
    assert found.sample.traces[0].token_ids == [5, 6, 7]
    assert found.sample.traces[0].text == ""  # the ids are enough
    assert found.sample.traces[0].times == [0.25, 0.5]  # to the microsecond
    assert found.sample.traces[0].counts == [1, 2]
    expected = vars(SAMPLE) | {"traces": found.sample.traces}
    assert vars(found.sample) == expected


def test_a_figure_of_earlier_versions_is_ignored(tmp_path: Path) -> None:
    record(tmp_path, RUN)
    file = tmp_path / FILE
    file.write_text(file.read_text().replace('"drafts"', '"drafted_per_position": [3], "drafts"'))
    assert read_results(tmp_path).samples[0].sample.drafts == 3


def test_every_line_is_written_at_once(tmp_path: Path) -> None:
    results = begin(tmp_path)
    results.measured(RUN, SAMPLE)
    assert len(read_results(tmp_path).samples) == 1
    results.failed(CELL, "dead")
    assert read_results(tmp_path).errors == {CELL: "dead"}
    results.close()


def test_the_first_line_describes_the_suite(tmp_path: Path) -> None:
    begin(tmp_path).close()
    first = json.loads((tmp_path / FILE).read_text().splitlines()[0])
    assert first["kind"] == "suite"
    assert {key: first[key] for key in HEADER} == HEADER


def test_a_line_cut_short_is_dropped_and_overwritten(tmp_path: Path) -> None:
    record(tmp_path, RUN, RUN._replace(round=3))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-30])
    assert [r.run.round for r in read_results(tmp_path).samples] == [2]
    record(tmp_path, RUN._replace(round=4))
    contents = read_results(tmp_path)
    assert [(r.run.round, r.session) for r in contents.samples] == [(2, 0), (4, 1)]
    assert len(contents.resumed) == 1


def test_a_first_line_cut_short_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"kind": "sui')
    record(tmp_path)
    assert read_results(tmp_path).header["digest"] == HEADER["digest"]


def test_another_suite_is_refused(tmp_path: Path) -> None:
    begin(tmp_path).close()
    with pytest.raises(ConfigError, match=r"another version of this suite .* --fresh") as refused:
        Results(tmp_path, HEADER | {"digest": "other"})
    assert "\n" not in str(refused.value)
    begin(tmp_path).close()  # the refused call closed the file


def test_fresh_keeps_the_old_file(tmp_path: Path) -> None:
    record(tmp_path, RUN)
    old = (tmp_path / FILE).read_bytes()
    begin(tmp_path, fresh=True).close()
    assert read_results(tmp_path).samples == []
    assert (tmp_path / (FILE + ".bak")).read_bytes() == old


def test_two_benchmarks_do_not_share_a_file(tmp_path: Path) -> None:
    results = begin(tmp_path)
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="another benchmark is writing"):
            begin(tmp_path, fresh=fresh)
    results.close()
    assert read_results(tmp_path).resumed == []


def test_a_measured_cell_has_not_failed(tmp_path: Path) -> None:
    results = begin(tmp_path)
    results.failed(CELL, "dead")
    results.measured(RUN, SAMPLE)
    assert results.contents.errors == read_results(tmp_path).errors == {}
    results.close()


def test_results_in_memory_keep_texts_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = Results()
    results.measured(RUN, SAMPLE)
    results.failed(CELL, "dead")
    results.close()
    assert results.done == {RUN}
    assert results.contents.samples[0].sample.traces[0].text == "abc"
    assert results.contents.errors == {CELL: "dead"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("[]\n", "line 1 is no line of a results file"),
        ('{"kind": "suite", "format": 99}\n', "line 1 is no line of a results file"),
        ('{"kind": "suite", "format": 1}\n{"kind": "run"}\n', "line 2 is no line"),
        ('{"kind": "suite", "format": 1}\nnonsense\n{}\n', "line 2 is no line"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_results(tmp_path)
