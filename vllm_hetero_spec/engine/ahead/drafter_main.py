# SPDX-License-Identifier: Apache-2.0
"""Entry point of the drafter process: `python -m ... SOCKET MEMORY [CORE...]`.

It reads a `Deployment` from standard input, loads the drafter as a vLLM worker with one rank, and
drafts until the engine closes the socket. It moves to its cores before it imports torch, because
torch counts the available cores on import.
"""

import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_hetero_spec.engine.ahead.deployment import Deployment
    from vllm_hetero_spec.engine.ahead.messages import Ready
    from vllm_hetero_spec.engine.ahead.server import DraftingServer
    from vllm_hetero_spec.engine.ahead.table import DraftTable

# Share of device memory that must be free when the drafter process starts.
_LEAST_MEMORY = 0.01
# Process title after vLLM's prefix "VLLM::".
_TITLE = "HeteroDrafter"


def main() -> None:
    """Load the drafter, report the result to the engine, and draft."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles it and closes the socket
    messages, memory = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=end_with, args=[messages], daemon=True).start()
    cores = set(map(int, sys.argv[3:]))
    if cores:
        os.sched_setaffinity(0, cores)
    from vllm_hetero_spec.engine.ahead.messages import Failed, encode
    from vllm_hetero_spec.errors import ConfigError

    with contextlib.suppress(ConnectionError):  # the engine may end during loading
        try:
            server, ready = load(sys.stdin.buffer.read(), memory)
        except ConfigError as error:
            messages.send(encode(Failed(str(error))))
        else:
            messages.send(encode(ready))
            serve(server, messages)
    # No clean-up: a process group may search for its deleted folder for minutes when it ends.
    os._exit(0)


def end_with(messages: socket.socket) -> None:
    """End this process when the engine closes its socket, also while it loads or hangs."""
    closed = select.poll()
    closed.register(messages, 0)  # for a hang-up only
    closed.poll()
    os._exit(0)


def load(deployment: bytes, memory: int) -> "tuple[DraftingServer, Ready]":
    """Load the drafter; `memory` is the file descriptor of the table for its drafts.

    Raises:
        ConfigError: The drafter cannot be loaded.
    """
    from vllm.plugins import load_general_plugins

    from vllm_hetero_spec.engine.ahead.table import DraftTable
    from vllm_hetero_spec.errors import ConfigError, one_line

    given: Deployment | None = None
    try:
        load_general_plugins()  # as in vLLM's workers; registers models of other packages
        from vllm_hetero_spec.engine.drafter.loading import faults_named

        given = pickle.loads(deployment)
        # Rendezvous of the process group. Removed after loading, so that a killed process leaves
        # no folder behind.
        folders = tempfile.TemporaryDirectory()
        with faults_named(given.drafter_config), folders as folder:
            return _load(given, DraftTable(memory, *given.table_shape), folder)
    except ConfigError:
        raise
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {one_line(error)}"
        placed = given is not None and given.options.drafter_device is not None
        device = ', or "drafter_device" if that is the reason' if placed else ""
        raise ConfigError(
            f"the drafter cannot be loaded in a process of its own ({why}); leave out "
            f'"draft_ahead"{device}.'
        ) from error


def _load(
    deployment: "Deployment", table: "DraftTable", folder: str
) -> "tuple[DraftingServer, Ready]":
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_hetero_spec.engine.ahead.messages import Ready
    from vllm_hetero_spec.engine.ahead.server import RIVALS, DraftingServer
    from vllm_hetero_spec.engine.drafter.decode_loop import Drafter
    from vllm_hetero_spec.engine.drafter.kv_pool import KVPool
    from vllm_hetero_spec.engine.drafter.method import first_token_sampling
    from vllm_hetero_spec.engine.drafter.model import DrafterModel
    from vllm_hetero_spec.engine.drafter.parallel import make_parallel, without_mask
    from vllm_hetero_spec.engine.drafter.recording import Recording
    from vllm_hetero_spec.engine.drafter.token_picking import PickConfig
    from vllm_hetero_spec.engine.seam.drafter_config import (
        drafter_vllm_config,
        drafting_mode,
        kv_budget,
        stand_alone,
    )
    from vllm_hetero_spec.engine.seam.drafter_model import parallel_mask

    given, options, target = deployment, deployment.options, deployment.vllm_config
    most_rows, scheduler = given.most_rows, target.scheduler_config
    scheduler.max_num_seqs = most_rows  # sizes the buffers of attention and of CUDA graphs
    config = drafter_vllm_config(target, given.drafter_config, options, solo=True)
    stand_alone(config.parallel_config)
    # vLLM checks that this share is free; the target may use the rest of the device. The size of
    # the KV pool comes from `kv_budget`.
    config.cache_config.gpu_memory_utilization = _LEAST_MEMORY
    device = torch.device(given.device)
    # A process group of one rank needs no network: file rendezvous and the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    current_platform.register_triton_kernel_overrides()  # as vLLM does before it builds a worker
    with set_current_vllm_config(config):
        worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)(
            vllm_config=config,
            local_rank=device.index or 0,
            rank=0,
            distributed_init_method=f"file://{folder}/rendezvous",
            is_driver_worker=True,
        )
        worker.init_device()
    length = given.drafter_config.max_model_len
    model = DrafterModel(config, worker.device, lambda of: kv_budget(options, target, length, of))
    tokens, device = given.tokens, worker.device
    mask = parallel_mask(given.drafter_config, options)
    rules = PickConfig(
        vocab_size=given.vocab_size,
        banned=torch.tensor(sorted(given.banned), dtype=torch.long, device=device),
        ends=given.ends,
        sampling=None if tokens is None else first_token_sampling(tokens, device),
        confidences=True,
        beside=RIVALS,
    )
    if mask is not None:
        rules = without_mask(rules, mask)
    drafter = Drafter(model, rules, options.num_speculative_tokens, most_rows)
    if mask is not None:  # chains have tokens for two drafts
        make_parallel(drafter, mask, places=1 + given.longest // 2)
    recording = Recording(drafter, drafting_mode(options, target), measured=False)
    recording.read_most(given.most_tokens, most_rows)
    recording.record()
    pool = KVPool(model.num_blocks, model.block_size, model.clean_blocks)
    server = DraftingServer(drafter, pool, table, given.ends, given.most_tokens, most_rows)
    return server, Ready(model.num_blocks, model.block_size)


def serve(server: "DraftingServer", messages: socket.socket) -> None:
    """Draft until the engine closes the socket."""
    from vllm.utils.system_utils import set_process_title

    from vllm_hetero_spec.engine.ahead.messages import LONGEST, update_batch_of

    set_process_title(_TITLE)
    there = select.poll()
    there.register(messages, select.POLLIN)
    while True:
        while there.poll(0 if server.busy else None):
            message = messages.recv(LONGEST)
            if not message:
                return
            server.take(update_batch_of(message))
        server.advance()


if __name__ == "__main__":
    main()
