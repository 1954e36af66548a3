"""Child processes that begin at once: forked from a process that has imported PyTorch, not spawned.

A spawned one imports it first, which takes seconds. Like a spawned one, it inherits nothing of the test's memory, and
has the environment of the moment it was made.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = [
    "torch._dynamo",
    "vqprompt.research.paper.pool",
    "vqprompt.product.serve.jobs",
    "vqprompt.product.model.model",
]


class WarmProcess(ForkServerProcess):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.environment = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class WarmContext(ForkServerContext):
    Process = WarmProcess


def warm_instead_of_spawned() -> Callable[..., BaseContext]:
    """For multiprocessing.get_context."""
    plain, warm = multiprocessing.get_context, WarmContext()
    warm.set_forkserver_preload(IMPORTED)
    return lambda method=None: warm if method == "spawn" else plain(method)
