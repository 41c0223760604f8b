"""Runs of Megatron whose speed was published, with the layout of each as far as it was told.

2021: README of April 2021 and arXiv:2104.04473 table 1 (float16, every layer recomputed, scores in memory).
The GPT-3 example did not tell its micro-batch; 1 is assumed.
2022: arXiv:2205.05198 tables 3 and 5 (float16, sequence parallelism and selective recomputation, or full).
2024: README of Megatron core 0.8 (bfloat16, fused attention, transfers of all axes overlapped). Neither the
micro-batch nor the chunks of its rows were told: both are the fastest that fit, by the planner itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mega_schema.parallel_layout import Layout
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import ModelSpec, gpt
from mega_train.planning.hardware import HARDWARE, Hardware
from mega_train.planning.sharded_sizes import ShardedModel
from mega_train.planning.workload import BF16, Implementation, Precision, Workload

# gradients too were float16, and the optimizer had a float32 copy of them
FP16_GRADIENTS = Precision(name="fp16", weight=2, gradient=2, main=8)

MEGATRON_2021 = Implementation(
    attention="scores",
    keeps_masks=True,
    whole_logits=True,
    regathers=False,
    sliced_p2p=True,
    overlaps_tp="none",
    overlaps_pp=False,
)
MEGATRON_2022 = Implementation(
    attention="scores", keeps_masks=True, whole_logits=True, sliced_p2p=True, overlaps_pp=False
)
MEGATRON_2024 = Implementation(
    whole_logits=True, overlaps_tp="both", overlaps_pp_fill=False, overlaps_reduce=True, overlaps_gather=True
)


@dataclass(frozen=True, slots=True)
class Row:
    """One published run.

    Attributes:
        machine: the planner's machine, by name or as constants of its own.
        utilisation: share of the peak; with recomputed work counted where `counted` says so.
        seconds: of a step, where those were published and the utilisation was not.
        software: the program that ran it.
        note: an assumption that the comparison makes.
        is_published_whole: whether micro-batch and chunks were published.
        fitted: whether a constant of the planner was fitted to it: every third run of a table.
    """

    table: str
    name: str
    machine: str | Hardware
    job: Workload
    utilisation: float | None = None
    counted: str = "mfu"
    seconds: float | None = None
    software: str = "Megatron-LM"
    note: str = ""
    is_published_whole: bool = True
    fitted: bool = False

    @property
    def hardware(self) -> Hardware:
        return HARDWARE[self.machine] if isinstance(self.machine, str) else self.machine


def model(layers: int, hidden: int, heads: int, vocab: int = 51200, max_seq_len: int = 2048) -> ModelSpec:
    return gpt(layers=layers, hidden=hidden, heads=heads, vocab=vocab, max_seq_len=max_seq_len)


def _weak_2021() -> list[Row]:
    # name, hidden, layers, heads, tp, pp, dp, batch, micro, chunks, TFLOP/s
    lines = (
        ("1.7B", 2304, 24, 24, 1, 1, 32, 512, 16, 1, 137),
        ("3.6B", 3072, 30, 32, 2, 1, 32, 512, 16, 1, 138),
        ("7.5B", 4096, 36, 32, 4, 1, 32, 512, 16, 1, 142),
        ("18.4B", 6144, 40, 48, 8, 1, 32, 1024, 8, 1, 135),
        ("39.1B", 8192, 48, 64, 8, 2, 32, 1536, 4, 1, 138),
        ("76.1B", 10240, 60, 80, 8, 4, 32, 1792, 2, 3, 140),
        ("145.6B", 12288, 80, 96, 8, 8, 24, 2304, 2, 2, 148),
        ("310.1B", 16384, 96, 128, 8, 16, 15, 2160, 1, 2, 155),
        ("529.6B", 20480, 105, 128, 8, 35, 9, 2520, 1, 3, 163),
        ("1008B", 25600, 128, 160, 8, 64, 6, 3072, 1, 1, 163),
        ("GPT-3 175B", 12288, 96, 96, 8, 16, 8, 1536, 1, 1, 138),
    )
    return [
        Row(
            "2021",
            name,
            "a100",
            Workload(
                model=ShardedModel.from_layout(
                    model(layers, hidden, heads), Layout(tp=tp, pp=pp, dp=dp, vp=vp)
                ),
                seq_length=2048,
                micro_batch_size=micro,
                global_batch_size=batch,
                precision=FP16_GRADIENTS,
                recompute=RecomputePolicy("full"),
                implementation=MEGATRON_2021,
            ),
            tflops / 312,
            "hfu",
        )
        for name, hidden, layers, heads, tp, pp, dp, batch, micro, vp, tflops in lines
    ]


def _recompute_2022() -> list[Row]:
    # ..., batch, micro, seconds of full recomputation, and of sequence parallelism with selective
    lines = (
        ("22B", 6144, 48, 64, 1, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 12288, 96, 96, 8, 1, 3, 64, 1, 18.13, 13.75),
        ("530B", 20480, 105, 128, 35, 1, 3, 280, 1, 49.05, 37.83),
        ("1T", 25600, 128, 160, 64, 1, 1, 512, 1, 94.42, 71.49),
    )
    rows = []
    for name, hidden, layers, heads, pp, dp, vp, batch, micro, slow, fast in lines:
        job = Workload(
            model=ShardedModel.from_layout(model(layers, hidden, heads), Layout(tp=8, pp=pp, dp=dp, vp=vp)),
            seq_length=2048,
            micro_batch_size=micro,
            global_batch_size=batch,
            precision=FP16_GRADIENTS,
            sequence=True,
            recompute=RecomputePolicy("selective"),
            implementation=MEGATRON_2022,
        )
        rows += [
            Row("2022", name, "a100", job, seconds=fast),
            Row("2022", f"{name} full", "a100", _full(job), seconds=slow),
        ]
        if name == "530B":
            layout = Layout(tp=8, pp=pp, dp=8, vp=vp)
            wide = replace(job, model=ShardedModel.from_layout(job.spec, layout), global_batch_size=8 * batch)
            rows += [
                Row("2022", "530B, 2240 GPUs", "a100", wide, 0.542),
                Row("2022", "530B full, 2240 GPUs", "a100", _full(wide), 0.421),
            ]
    return rows


def _full(job: Workload) -> Workload:
    return replace(job, sequence=False, recompute=RecomputePolicy("full"))


def _weak_2024() -> list[Row]:
    # name, heads, hidden, layers, tp, pp, dp, batch, TFLOP/s
    lines = (
        ("1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8),
        ("7.1B", 32, 4096, 30, 2, 1, 48, 192, 465.9),
        ("16B", 48, 6144, 32, 4, 1, 48, 192, 489.1),
        ("32B", 56, 7168, 48, 8, 1, 48, 192, 459.6),
        ("70B", 64, 8192, 84, 8, 2, 48, 384, 419.7),
        ("119B", 80, 10240, 92, 8, 4, 48, 768, 420.5),
        ("177B", 96, 12288, 96, 8, 6, 48, 1152, 432.8),
        ("314B", 128, 16384, 96, 8, 8, 48, 1536, 474.4),
        ("462B", 144, 18432, 112, 8, 16, 48, 3072, 459.9),
        ("177B, 96 GPUs", 96, 12288, 96, 8, 6, 2, 1152, 0.47 * 989),
        ("177B, 4608 GPUs", 96, 12288, 96, 8, 6, 96, 1152, 0.42 * 989),
    )
    return [
        Row(
            "2024",
            name,
            "h100",
            Workload(
                model=ShardedModel.from_layout(
                    model(layers, hidden, heads, vocab=131072, max_seq_len=4096), Layout(tp=tp, pp=pp, dp=dp)
                ),
                seq_length=4096,
                micro_batch_size=1,
                global_batch_size=batch,
                precision=BF16,
                sequence=tp > 1,
                zero=1,
                implementation=MEGATRON_2024,
            ),
            tflops / 989,
            is_published_whole=False,
        )
        for name, heads, hidden, layers, tp, pp, dp, batch, tflops in lines
    ]


def _every_third(rows: list[Row]) -> list[Row]:
    runs = list(dict.fromkeys(row.name for row in rows))
    return [replace(row, fitted=runs.index(row.name) % 3 == 1) for row in rows]


PUBLISHED = tuple(
    row for table in (_weak_2021(), _recompute_2022(), _weak_2024()) for row in _every_third(table)
)
