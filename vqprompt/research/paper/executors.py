"""`--on`: where the runs of a grid are done."""

from __future__ import annotations

from vqprompt.core.errors import UserError
from vqprompt.research.paper.work import Executor

PLACES = "local, ray, ray=HOST:PORT, slurm or slurm=PARTITION"


def find_executor(
    on: str = "local", workers: int | None = None, cpus: int | None = None, gpus: float | None = None
) -> Executor:
    """workers: the most runs at a time. cpus, gpus: per run, on other machines."""
    kind, equals, address = on.partition("=")
    if (equals and not address) or kind not in ("local", "ray", "slurm") or (kind == "local" and equals):
        raise UserError(f"--on {on}: expected {PLACES}")
    if kind == "local":
        if cpus is not None or gpus is not None:
            raise UserError(
                "--cpus and --gpus are for other machines (--on ray, --on slurm); on this one, --workers divides them"
            )
        from vqprompt.research.paper.pool import LocalExecutor

        return LocalExecutor(workers)
    if gpus is not None and not 0 <= gpus <= 1024:
        raise UserError(f"--gpus {gpus:g}: expected GPUs per run, such as 1, 0.25 or 0")
    if gpus is not None and gpus > 1:
        raise UserError(f"--gpus {gpus:g}: a run uses one GPU at most; give 1, or a fraction to let several share one")
    if kind == "ray":
        from vqprompt.research.paper.on_ray import RayExecutor

        return RayExecutor(address or None, cpus, gpus, workers)
    from vqprompt.research.paper.on_slurm import SlurmExecutor

    return SlurmExecutor(address or None, cpus, gpus, workers)
