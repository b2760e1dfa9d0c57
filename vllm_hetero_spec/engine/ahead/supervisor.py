# SPDX-License-Identifier: Apache-2.0
"""Restarts of a drafter process that has ended, hangs or has not loaded."""

import logging
import math
import time

from vllm_hetero_spec.engine.ahead.answers import Failed, Ready
from vllm_hetero_spec.engine.ahead.deployment import Deployment
from vllm_hetero_spec.engine.ahead.drafter_process import LONGEST_START, DrafterProcess
from vllm_hetero_spec.engine.ahead.messages import UpdateBatch
from vllm_hetero_spec.engine.ahead.table import Counts, DraftTable

logger = logging.getLogger("vllm.hetero_spec")

# Seconds after which a process that was sent something and shows no sign of life is ended. Its
# longest forward takes less.
SILENCE = 30.0
# Seconds; the delay of a restart doubles from 1 up to this.
_LONGEST_REST = 60.0
# Seconds; after so long a life the delay begins at 1 again.
_HEALTHY = 60.0


class SupervisedProcess:
    """Keeps a drafter process alive. Only `start` waits for it.

    Attributes:
        life: Number of the current process. What was sent to an earlier one is lost.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._process: DrafterProcess | None = None
        self._loaded = False
        self.life = 0
        self._past = Counts()  # sums over processes that have ended
        self._failures = 0
        self._began = self._again = self._heard = 0.0
        self._beats, self._sent = 0, False  # at the last check; True if something was sent since

    def start(self) -> Ready:
        """Start the first process, and wait until the drafter is loaded. Raises `ConfigError`."""
        self._launch()
        assert self._process is not None
        ready = self._process.wait()
        self._loaded = True
        return ready

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return self.life - 1

    @property
    def table(self) -> DraftTable:
        """Drafts of the current process."""
        assert self._process is not None
        return self._process.table

    @property
    def counts(self) -> Counts:
        """Counts of the current process."""
        return Counts() if self._process is None else self._process.table.counts

    @property
    def done(self) -> Counts:
        """Sums over all processes; `blocks` is that of the current one."""
        sums = map(sum, zip(self._past, self.counts, strict=True))
        return Counts._make(sums)._replace(blocks=self.counts.blocks)

    @property
    def up(self) -> bool:
        """True if the process accepts updates. Reading it may begin a restart that is due."""
        now = time.monotonic()
        try:
            if self._process is None:
                if now >= self._again:
                    self._launch()
            else:
                self._watch(self._process, now)
        except OSError as error:
            self._lose(error)
        return self._loaded

    def send(self, commit: UpdateBatch) -> bool:
        """Send an update. Return False if it was not sent. A restart loses all earlier ones."""
        assert self._process is not None
        self._sent = True  # if this fails, earlier ones are still unread
        try:
            return self._process.send(commit)
        except OSError as error:
            self._lose(error)
            return False

    def rest(self) -> None:
        """End the process until `wake`."""
        self._end()
        self._again = math.inf

    def wake(self) -> None:
        """Begin to start the process again after `rest`."""
        if self._again == math.inf:
            self._again = 0.0
            _ = self.up

    def _launch(self) -> None:
        self._began = self._heard = time.monotonic()
        self._process, self._sent = DrafterProcess(self._deployment), False
        self.life += 1

    def _watch(self, process: DrafterProcess, now: float) -> None:
        answer = process.answer()
        if isinstance(answer, Failed):
            raise ConnectionError(answer.sentence)
        if answer is not None:
            self._loaded = True
        if not self._loaded and now - self._began > LONGEST_START:
            raise ConnectionError(f"the drafter's process did not load in {LONGEST_START:.0f} s")
        beats = process.table.counts.beats
        if beats != self._beats or not self._sent:
            self._beats, self._heard, self._sent = beats, now, False
        if now - self._heard > SILENCE:
            raise ConnectionError(f"the drafter's process was silent for {SILENCE:.0f} s")

    def _lose(self, error: OSError) -> None:
        if time.monotonic() - self._began > _HEALTHY:
            self._failures = 0
        rest = min(2.0**self._failures, _LONGEST_REST)
        logger.warning(
            "Drafter process failed (%s); restarting in %.0f s. Requests continue without drafts.",
            error,
            rest,
        )
        self._failures += 1
        self._again = time.monotonic() + rest
        self._end()

    def _end(self) -> None:
        self._past = self.done
        if self._process is not None:
            self._process.close()
        self._process, self._loaded = None, False
