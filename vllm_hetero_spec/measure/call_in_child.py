# SPDX-License-Identifier: Apache-2.0
"""One call in a process of its own, whose memory is free again when it has answered."""

import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from vllm_hetero_spec.measure.load import MeasurementError

_Answer = TypeVar("_Answer")


def in_child(function: Callable[..., _Answer], *arguments: Any) -> _Answer:
    """Call a function of a module and wait for its answer.

    Args:
        function: Found by its name in the child, which starts afresh.
        arguments: Pickled, as is the answer.

    Raises:
        MeasurementError: The function raised, or its process was ended, as for lack of memory.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        answer: _Answer | MeasurementError = ours.recv()
    except EOFError:
        process.join()
        raise MeasurementError(f"its process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answer, MeasurementError):
        raise answer
    return answer


def _answer(parent: Connection, function: Callable[..., Any], arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends this
    try:
        answer = function(*arguments)
    except Exception as error:  # of any library, about models of the user's
        answer = MeasurementError(f"{type(error).__name__}: {' '.join(str(error).split())}")
    parent.send(answer)
