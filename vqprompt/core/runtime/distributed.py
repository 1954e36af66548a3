"""Several processes that learn together: what they share, what they exchange, and what happens when one is lost.

Every process goes through the same run with the same seeds. What is expensive is divided: the images of each training
batch, and the batches of features and tests. Everything else is done by every process.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, chain, islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vqprompt._version import __version__
from vqprompt.core.errors import UserError
from vqprompt.core.runtime.lifelines import Lifeline, ProcessLost, started_together

T = TypeVar("T")
EXCHANGED = 16  # batches that each process computes between two exchanges
JOINING = timedelta(minutes=5)
FOREVER = timedelta(days=7)  # a process may decode images for hours; lost ones are noticed by their lifelines


class Part:
    """The rows of a training batch that one process computes: `start` to `stop` − 1 of `size` images.

    If a batch has fewer images than there are processes, some processes have none. These compute the first row with
    weight 0, because they have to take part in every exchange.
    """

    def __init__(self, size: int, rank: int = 0, count: int = 1) -> None:
        self.size, self.start, self.stop = size, size * rank // count, size * (rank + 1) // count
        self.whole, self.own = count == 1, self.stop - self.start
        self.rows = slice(None) if self.whole else slice(self.start, self.stop) if self.own else slice(0, 1)

    def weigh(self, values: Tensor) -> Tensor:
        """Means over these rows, weighed so that they add up to means over the batch."""
        return values if self.whole else values * (self.own / self.size)

    def whole_batch(self, own: Tensor) -> Tensor:
        """Values of the whole batch [B, …] from those of these rows. Gradients flow back to every process."""
        if self.whole:
            return own
        whole = own.new_zeros(self.size, *own.shape[1:])
        whole[self.start : self.stop] = own[: self.own]
        return _Sum.apply(whole)  # type: ignore[no-untyped-call]


WHOLE = Part(1)  # of a batch of any size


class Ranks:
    """The processes of a run, as one of them sees them. By default a single one: it exchanges nothing and does not
    wait. Several are started by `torchrun` or by `vqprompt run --processes`."""

    def __init__(self, rank: int = 0, count: int = 1, lifeline: Lifeline | None = None) -> None:
        self.rank, self.count, self.lifeline = rank, count, lifeline
        self.place = int(os.environ.get("LOCAL_RANK", "0")) if count > 1 else 0  # among the processes of this machine

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0

    @property
    def first_here(self) -> bool:
        """Whether this process is the one that writes to this machine's cache."""
        return self.place == 0

    # ------------------------------------------------------------------ who computes what

    def part(self, size: int) -> Part:
        """What this process computes of a training batch of `size` images."""
        return Part(size, self.rank, self.count)

    def rows(self, number: int, size: int) -> slice:
        """Which rows of batch `number` this process computes, if all processes share each batch."""
        return self.part(size).rows

    def turn(self, number: int, size: int) -> slice:
        """Which rows of batch `number` this process computes, if the processes take turns: all rows or none."""
        return slice(0, size if number % self.count == self.rank else 0)

    def device(self, name: str) -> str:
        """The device that this process uses, given the one that was asked for."""
        if self.count == 1:
            return name
        if name in ("auto", "cuda") and torch.cuda.is_available():
            here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", str(self.count))), torch.cuda.device_count()
            if here > gpus:
                raise UserError(
                    f"{here} processes on {platform.node()}, which has {gpus} GPUs; start one process per GPU, or give "
                    "--device cpu"
                )
            torch.cuda.set_device(self.place)
            return f"cuda:{self.place}"
        if name not in ("auto", "cpu", "cuda"):
            raise UserError(
                f"device {name!r} with {self.count} processes: each takes a GPU of its own or the CPU; give auto, cuda "
                "or cpu"
            )
        return "cpu" if name == "auto" else name

    # ------------------------------------------------------------------ exchange

    def _exchange(self, exchange: Callable[..., object], *values: object) -> None:
        if self.count > 1:
            try:
                exchange(*values)
            except RuntimeError as error:  # another process closed the connection
                raise ProcessLost("another process of this run ended") from error

    def add_up(self, values: Tensor) -> Tensor:
        """The sum of all processes' values, which takes their place."""
        self._exchange(dist.all_reduce, values)
        return values

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over all processes."""
        if self.count > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            total = self.add_up(torch.cat([gradient.flatten() for gradient in gradients]))  # one exchange, not hundreds
            for gradient, values in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def in_order(self, computed: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """Rows of all batches [n, …]. computed: the batches that were this process's turn. sizes: of all batches."""
        if self.count == 1:
            return torch.cat(list(computed))
        # the first process always has a turn, others may have none
        like = self.from_first(lambda: (computed[0].shape[1:], computed[0].dtype, computed[0].device.type))
        whole = torch.zeros(sum(sizes), *like[0], dtype=like[1], device=like[2])
        for place, own in zip(torch.split(whole, list(sizes))[self.rank :: self.count], computed, strict=True):
            place.copy_(own)
        return self.add_up(whole)

    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the first process to all others."""
        for tensor in tensors if self.count > 1 else ():
            values = tensor.detach().contiguous()
            self._exchange(dist.broadcast, values, 0)
            tensor.detach().copy_(values)

    def from_first(self, make: Callable[[], T]) -> T:
        """The result of `make`, which only the first process calls."""
        made: list[Any] = [make() if self.first else None]
        self._exchange(dist.broadcast_object_list, made, 0)
        return cast(T, made[0])

    def gather(self, own: T) -> list[T]:
        """The values of all processes, in order."""
        values: list[Any] = [own] * self.count
        self._exchange(dist.all_gather_object, values, own)
        return values

    def all(self, yes: bool) -> bool:
        """Whether `yes` is true in every process. Waits for all of them."""
        return all(self.gather(yes))

    def refuse_differences(self, **own: object) -> None:
        """Raise if a process has other values than the first one."""
        everyone = self.gather((platform.node(), own))
        first_machine, first = everyone[0]
        for rank, (machine, values) in enumerate(everyone):
            for what, value in values.items():
                if value != first[what]:
                    raise UserError(
                        f"process {rank + 1} of {self.count} (on {machine}) differs from process 1 (on {first_machine})"
                        f" in the {what.replace('_', ' ')}: {value}, not {first[what]}; give all of them the same"
                    )

    @contextmanager
    def one_per_machine_first(self) -> Iterator[None]:
        """The first process of each machine goes first; the others follow when it has filled the cache."""
        if not self.first_here:
            self.all(True)
        yield
        if self.first_here:
            self.all(True)

    def leave(self) -> None:
        """All work is done."""
        if self.lifeline is not None:
            self.all(True)
            self.lifeline.let_go()
            dist.destroy_process_group()


ALONE = Ranks()


class ShardedRows:
    """Values of images [n, …] that are computed in batches when they are asked for, each batch by one process.

    sizes: of all batches. compute: yields the values of those that are this process's turn.
    """

    def __init__(self, ranks: Ranks, sizes: Sequence[int], compute: Callable[[], Iterator[Tensor]]) -> None:
        self.ranks, self.sizes, self._compute = ranks, sizes, compute

    def __len__(self) -> int:
        return sum(self.sizes)

    def then(self, work: Callable[[Tensor], Tensor]) -> ShardedRows:
        """What `work` makes of each batch of values."""
        return ShardedRows(self.ranks, self.sizes, lambda: map(work, self._compute()))

    def own(self) -> Iterator[tuple[slice, Tensor]]:
        """Batches that are this process's turn: which rows, and their values. Nothing is exchanged."""
        ends = list(accumulate(self.sizes))[self.ranks.rank :: self.ranks.count]
        for end, values in zip(ends, self._compute(), strict=True):
            yield slice(end - len(values), end), values

    def in_order(self) -> Iterator[Tensor]:
        """All rows in order, in every process, some batches at a time."""
        own, rank, count = self._compute(), self.ranks.rank, self.ranks.count
        for start in range(0, len(self.sizes), EXCHANGED * count):
            sizes = self.sizes[start : start + EXCHANGED * count]
            yield self.ranks.in_order(list(islice(own, len(sizes[rank::count]))), sizes)

    def whole(self) -> Tensor:
        """All rows at once, in every process."""
        pieces = self.in_order()
        first = next(pieces)
        whole, start = first.new_empty(len(self), *first.shape[1:]), 0
        for piece in chain([first], pieces):
            whole[start : start + len(piece)] = piece
            start += len(piece)
        return whole


class _Sum(torch.autograd.Function):
    """The sum over all processes. Each of them computes the same loss of it, weighted by its share, so that gradients
    are added up too."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return _joined.add_up(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _joined.add_up(gradient.clone(memory_format=torch.contiguous_format))


# ---------------------------------------------------------------------------------------------- join

_joined = ALONE


def joined() -> Ranks:
    """The processes that this one works with; before `join`, only itself."""
    return _joined


def join(report: Callable[[str], None] = lambda reason: print(reason, file=sys.stderr)) -> Ranks:
    """Meet the other processes, if there are any. Learners that are made afterwards learn together.

    report: prints that a process was lost; called at most once, then this process ends.
    """
    global _joined
    if started_together() > 1 and _joined is ALONE:
        # PyTorch imports it when it needs it; its functions would keep the group that exists then as a default, so that
        # the group's threads still ran while Python ends, and aborted one process in a while
        import torch.distributed.nn.functional

        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            store, rank, count = next(dist.rendezvous("env://", timeout=JOINING))  # type: ignore[attr-defined]
            dist.init_process_group(backend, timeout=FOREVER, store=store, rank=rank, world_size=count)
            lifeline = Lifeline(rank, count, JOINING, report)
        except (RuntimeError, ValueError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
            seconds, reason = JOINING.total_seconds(), str(error).splitlines()[0]
            raise UserError(
                f"the {started_together()} processes of this run did not meet at {where} within {seconds:.0f} seconds "
                f"({reason}); start all of them with the address of the first"
            ) from None
        _joined = Ranks(rank, count, lifeline)
        _joined.refuse_differences(version_of_vqprompt=__version__, version_of_PyTorch=torch.__version__)
    return _joined
