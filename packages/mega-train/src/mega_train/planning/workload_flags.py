"""Format the flags that give a run the layout of a workload."""

from __future__ import annotations

from mega_train.planning.workload import Workload


def to_flags(workload: Workload) -> str:
    """Format the flags that give a run the layout of a workload."""
    layout, recompute = workload.layout, workload.recompute
    full = recompute.granularity == "full"
    flags = {
        "--tensor-model-parallel-size": layout.tp if layout.tp > 1 else None,
        "--sequence-parallel": "" if workload.sequence else None,
        "--tp-comm-overlap": ""
        if workload.sequence and workload.implementation.overlaps_tp == "both"
        else None,
        "--context-parallel-size": layout.cp if layout.cp > 1 else None,
        "--pipeline-model-parallel-size": layout.pp if layout.pp > 1 else None,
        "--pipeline-schedule": workload.schedule if layout.pp > 1 and workload.schedule != "1f1b" else None,
        "--num-layers-per-virtual-pipeline-stage": (
            workload.spec.layers // (layout.pp * layout.vp) if layout.vp > 1 else None
        ),
        "--micro-batch-size": workload.micro_batch_size,
        "--global-batch-size": workload.global_batch_size,
        "--use-distributed-optimizer": "" if workload.zero else None,
        "--overlap-grad-reduce": "" if workload.zero and workload.implementation.overlaps_reduce else None,
        "--overlap-param-gather": "" if workload.zero and workload.implementation.overlaps_gather else None,
        "--recompute-granularity": recompute.granularity,
        "--recompute-modules": " ".join(recompute.modules) if recompute.is_custom else None,
        "--recompute-method": recompute.method if full else None,
        "--recompute-num-layers": recompute.layers if full else None,
    }
    return " ".join(f"{flag} {value}".rstrip() for flag, value in flags.items() if value is not None)
