# SPDX-License-Identifier: Apache-2.0
"""A drafter process that is started again where it ends, is silent for long, or never loaded."""

import logging
import math
import time

from vllm_hetero_spec.engine.ahead.answers import Failed, Ready
from vllm_hetero_spec.engine.ahead.deployment import Deployment
from vllm_hetero_spec.engine.ahead.drafter_process import LONGEST_START, DrafterProcess
from vllm_hetero_spec.engine.ahead.messages import UpdateBatch
from vllm_hetero_spec.engine.ahead.table import Counts, DraftTable

logger = logging.getLogger("vllm.hetero_spec")

# Seconds in which a process that has been sent something shows no sign of life before it is ended:
# more than its longest forward takes.
SILENCE = 30.0
# Seconds before it is started again: 1, 2, 4, ... up to so many.
_LONGEST_REST = 60.0
# A process that has lived so long has nothing to do with the end of the one before.
_HEALTHY = 60.0


class SupervisedProcess:
    """Keeps a drafter process alive; nothing but `start` waits for it.

    Args:
        deployment: What it runs.

    Attributes:
        life: Number of the present process: what was told to an earlier one is lost.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._process: DrafterProcess | None = None
        self._loaded = False
        self.life = 0
        self._past = Counts()  # of the processes that have ended
        self._failures = 0
        self._began = self._again = self._heard = 0.0
        self._beats, self._sent = 0, False  # beats when it was last looked; sent anything since?

    def start(self) -> Ready:
        """Start it for the first time, and wait until it is loaded.

        Raises:
            ConfigError: It cannot be.
        """
        self._launch()
        assert self._process is not None
        ready = self._process.wait()
        self._loaded = True
        return ready

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return self.life - 1

    @property
    def table(self) -> DraftTable:
        """What the present process drafts."""
        assert self._process is not None
        return self._process.table

    @property
    def counts(self) -> Counts:
        """What the present process has done."""
        return Counts() if self._process is None else self._process.table.counts

    @property
    def done(self) -> Counts:
        """What all of them have done so far; blocks are those of the present one."""
        sums = map(sum, zip(self._past, self.counts, strict=True))
        return Counts._make(sums)._replace(blocks=self.counts.blocks)

    @property
    def up(self) -> bool:
        """Whether it can be told anything: looks, and begins to start it again where it is time."""
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
        """Send a commit; False where it has to be sent again, or all that it says."""
        assert self._process is not None
        self._sent = True  # or it still has others to read
        try:
            return self._process.send(commit)
        except OSError as error:
            self._lose(error)
            return False

    def rest(self) -> None:
        """End it until `wake`."""
        self._end()
        self._again = math.inf

    def wake(self) -> None:
        """Begin to start it again where it rests."""
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
