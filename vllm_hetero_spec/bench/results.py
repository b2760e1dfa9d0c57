# SPDX-License-Identifier: Apache-2.0
"""Results file of a benchmark: one JSON object per line, readable after any interruption.

The first line describes the suite and the machine. Each run appends a line, which is synchronized
to disk. A later session continues the file.
"""

import dataclasses
import fcntl
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from vllm_hetero_spec.bench.load import Sample, Trace
from vllm_hetero_spec.bench.plan import Cell, EngineId, Measurement
from vllm_hetero_spec.errors import ConfigError

FILE = "results.jsonl"
_FORMAT = 1


@dataclass(frozen=True)
class Recorded:
    run: Measurement
    session: int  # from 0
    sample: Sample


@dataclass
class Contents:
    header: dict[str, Any]  # the first line
    resumed: list[dict[str, Any]] = field(default_factory=list)  # provenance of later sessions
    samples: list[Recorded] = field(default_factory=list)  # in the order of the runs
    errors: dict[Cell, str] = field(default_factory=dict)  # cells that failed in their last run
    skipped: dict[Cell, str] = field(default_factory=dict)  # cells that cannot be measured
    whole_bytes: int = 0  # length of the file without an incomplete last line


class Results:
    """Results in memory, and in a file if there is a folder."""

    def __init__(
        self, folder: Path | None = None, header: dict[str, Any] | None = None, fresh: bool = False
    ) -> None:
        """Begin a file in a folder, or continue it; `fresh` keeps the old file as .bak.

        Raises:
            ConfigError: The file contains results of another suite, another process writes to it,
                or it cannot be written.
        """
        self._file: TextIO | None = None
        header = {"kind": "suite", "format": _FORMAT, **(header or {})}
        self.contents = Contents(header)
        if folder is None:
            return
        path = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _locked(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write results to {path}: {error.strerror}; choose another folder with "
                "--out."
            ) from error
        try:
            if fresh and path.stat().st_size:
                path.replace(path.with_name(FILE + ".bak"))
                self._file.close()
                self._file = _locked(path)
            if b"\n" in path.read_bytes():
                self.contents = read_results(folder)
                self._go_on(path, header)
            else:
                os.truncate(path, 0)
                self._append(header)
        except BaseException:
            self.close()
            raise

    def _go_on(self, path: Path, header: dict[str, Any]) -> None:
        before = self.contents.header
        if before["digest"] != header["digest"]:
            raise ConfigError(
                f"{path} holds results of another version of this suite (of {before['started']}): "
                "choose another folder with --out, or start over with --fresh, which keeps them "
                f"as {FILE}.bak."
            )
        os.truncate(path, self.contents.whole_bytes)
        session = {"kind": "session", **{k: header[k] for k in ("started", "provenance")}}
        self.contents.resumed.append(session)
        self._append(session)

    @property
    def done(self) -> set[Measurement]:
        return {recorded.run for recorded in self.contents.samples}

    def measured(self, run: Measurement, sample: Sample) -> None:
        self.contents.samples.append(Recorded(run, len(self.contents.resumed), sample))
        self.contents.errors.pop(run.cell, None)
        self._append(
            {
                "kind": "run",
                **run.cell.flat(),
                "wave": run.wave,
                "round": run.round,
                "at": round(time.time(), 3),
                "sample": _compact(sample),
            }
        )

    def failed(self, cell: Cell, sentence: str) -> None:
        self.contents.errors[cell] = sentence
        self._append({"kind": "error", **cell.flat(), "error": sentence})

    def skip(self, cell: Cell, reason: str) -> None:
        """Record the reason of a cell that cannot be measured, without repeating it."""
        if self.contents.skipped.get(cell) != reason:
            self.contents.skipped[cell] = reason
            self._append({"kind": "skipped", **cell.flat(), "reason": reason})

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._file is not None:
            self._file.close()

    def _append(self, record: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_results(folder: Path) -> Contents:
    """Read the results file of a folder, without an incomplete last line; or raise ConfigError."""
    path = folder / FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from error
    whole = data[: data.rfind(b"\n") + 1]
    contents: Contents | None = None
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record = json.loads(line)
            if contents is None:
                if (record["kind"], record["format"]) != ("suite", _FORMAT):
                    raise ValueError(record["kind"])
                contents = Contents(record, whole_bytes=len(whole))
            else:
                _add(contents, record)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} is no line of a results file of format {_FORMAT}."
            ) from error
    if contents is None:
        raise ConfigError(f"{path} is empty: nothing was measured yet.")
    return contents


def _add(contents: Contents, record: dict[str, Any]) -> None:
    if record["kind"] == "session":
        contents.resumed.append(record)
        return
    engine = EngineId(*(record[name] for name in EngineId._fields))
    cell = Cell(engine, *(record[name] for name in Cell._fields[1:]))
    if record["kind"] == "run":
        run = Measurement(cell, record["wave"], record["round"])
        plain = record["sample"]
        plain.pop("drafted_per_position", None)  # files of earlier versions have it
        sample = Sample(**{**plain, "traces": [Trace(**trace) for trace in plain["traces"]]})
        contents.samples.append(Recorded(run, len(contents.resumed), sample))
        contents.errors.pop(cell, None)
    elif record["kind"] == "error":
        contents.errors[cell] = record["error"]
    else:
        contents.skipped[cell] = record["reason"]


def _compact(sample: Sample) -> dict[str, Any]:
    """Convert a sample to plain data, with times rounded to microseconds and without texts."""
    plain = dataclasses.asdict(sample)
    for trace in plain["traces"]:
        trace["text"] = ""
        trace["sent"] = round(trace["sent"], 6)
        trace["times"] = [round(moment, 6) for moment in trace["times"]]
    return plain


def _locked(path: Path) -> TextIO:
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(f"another benchmark is writing to {path}.") from error
    return file
