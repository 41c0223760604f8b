"""Runs that other teams published, and FP8 runs of Megatron Bridge. No constant was fitted to any of them.

Each row names its software; `note` states an assumption. Seconds are compared, not utilisation, wherever a
source gives seconds or tokens per second, because teams count FLOPs in different ways. A run is one row.

BLOOM: arXiv:2211.05100 section 3.4 (TFLOP/s by Megatron's formula of 2021, which counts recomputation).
MT-NLG: arXiv:2201.11990 section 2.3. GPT-NeoX: arXiv:2204.06745 sections 3.2 and 3.3, seconds from the 1,830
hours of its 150,000 steps; its 117 TFLOP/s are the same step by its program's formula of that time (a token
has 6 FLOPs for each parameter and 60 s h L for attention, get_flops in megatron/utils.py). Llama 3.1:
arXiv:2407.21783 table 4 and section 3.3.2. Nemotron-4: arXiv:2406.11704 table 2. torchtitan:
docs/performance.md of December 2024. llm-foundry: scripts/train/benchmarking/README.md. KempnerForge:
benchmarks/mfu_scaling of April 2026. Megatron Bridge: docs/performance-summary.md, 25.11 and 26.02.
"""

from __future__ import annotations

from dataclasses import replace

from bench.published_runs import FP16_GRADIENTS, MEGATRON_2021, MEGATRON_2024, Row
from mega_schema.parallel_layout import Layout, split_layers
from mega_schema.recompute_policy import RecomputePolicy
from mega_schema.spec import gpt, llama
from mega_train.planning.hardware import GIB, HARDWARE
from mega_train.planning.sharded_sizes import ShardedModel
from mega_train.planning.workload import FP8, Implementation, Precision, Workload

# the clusters that are not the planner's own machines
JEAN_ZAY = replace(HARDWARE["a100"], name="A100 80GB, 4 x 100 Gbit/s a node", network=6.25e9)
A100_40GB = replace(
    HARDWARE["a100"],
    name="A100 40GB, 4 x 200 Gbit/s a node",
    memory=36 * GIB,
    bandwidth=1.555e12,
    network=12.5e9,
)
H100_HBM2E = replace(HARDWARE["h100"], name="H100 96GB HBM2e, 500 W", memory=92 * GIB, bandwidth=2.4e12)

# DeepSpeed's pipeline engine sends whole activations from every tensor-parallel rank, and each send and each
# receive blocks (deepspeed/runtime/pipe/schedule.py, TrainSchedule)
DEEPSPEED = replace(MEGATRON_2021, sliced_p2p=False, duplex_p2p=False)
FUSED = replace(MEGATRON_2024, fused=True)
# section 3.3.2 of Llama 3 hides the transfers of pp and dp, not those of tp; it frees the input and output of
# every stage. Its runs came before FlashAttention 3 (arXiv:2407.08608)
META = replace(
    FUSED,
    attention="flash-2",
    overlaps_tp="backward",
    overlaps_pp_fill=True,
    reduces_by_round=True,
    frees_stage_inputs=True,
)
FSDP_COMPILED = Implementation(fused=True, overlaps_reduce=True, overlaps_gather=True)
# torch's attention in 2024, and flash-attn, were FlashAttention 2
FSDP_2024 = replace(FSDP_COMPILED, attention="flash-2")
FSDP_EAGER = replace(FSDP_2024, fused=False, eager=True)
BF16_STATE = Precision(name="bf16 state", weight=2, gradient=2, main=0, moments=4)

FULL = RecomputePolicy("full")
LLAMA_8B = llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, max_seq_len=8192)
LLAMA_70B = llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, max_seq_len=8192)
LLAMA_405B = llama(
    layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, max_seq_len=131072
)


def megatron_tflops(job: Workload, tflops: float) -> float:
    """Compute the seconds of a step from TFLOP/s per GPU (arXiv:2104.04473 eq. 3, full recomputation)."""
    spec, tokens = job.spec, job.global_batch_size * job.seq_length
    s, h, layers, vocab = job.seq_length, spec.hidden, spec.layers, spec.vocab
    flops = 96 * tokens * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h))
    return flops / (job.layout.world * tflops * 1e12)


def _bloom() -> Row:
    spec = gpt(
        layers=70, hidden=14336, heads=112, vocab=250880, max_seq_len=2048, positions="alibi", embed_norm=True
    )
    layout = Layout(tp=4, pp=12, dp=8, layers_per_stage=split_layers(70, pp=12, embedding=True, head=True))
    job = Workload(
        model=ShardedModel.from_layout(spec, layout),
        seq_length=2048,
        micro_batch_size=2,
        global_batch_size=2048,
        recompute=FULL,
        zero=1,
        implementation=DEEPSPEED,
    )
    seconds = megatron_tflops(job, 156)
    return Row("BLOOM", "176B, 384 GPUs", JEAN_ZAY, job, seconds=seconds, software="Megatron-DeepSpeed")


def _mt_nlg() -> list[Row]:
    spec = gpt(layers=105, hidden=20480, heads=128, vocab=51200, max_seq_len=2048)
    return [
        Row(
            "MT-NLG",
            f"530B, {280 * dp} GPUs",
            HARDWARE["a100"],
            Workload(
                model=ShardedModel.from_layout(spec, Layout(tp=8, pp=35, dp=dp)),
                seq_length=2048,
                micro_batch_size=1,
                global_batch_size=1920,
                recompute=FULL,
                zero=1,
                implementation=DEEPSPEED,
            ),
            seconds=seconds,
            software="Megatron-DeepSpeed",
        )
        for dp, seconds in ((8, 60.1), (10, 50.2), (12, 44.4))
    ]


def _neox() -> Row:
    spec = gpt(
        layers=44,
        hidden=6144,
        heads=64,
        vocab=50432,
        max_seq_len=2048,
        positions="rope",
        rotary_fraction=0.25,
        parallel_residual=True,
        tied=False,
    )
    job = Workload(
        model=ShardedModel.from_layout(spec, Layout(tp=2, pp=4, dp=12)),
        seq_length=2048,
        micro_batch_size=4,
        global_batch_size=1536,
        precision=FP16_GRADIENTS,
        recompute=FULL,
        zero=1,
        implementation=DEEPSPEED,
    )
    seconds = 1830 * 3600 / 150_000
    return Row("GPT-NeoX", "20B, 96 GPUs", A100_40GB, job, seconds=seconds, software="GPT-NeoX, DeepSpeed")


def _llama_405b() -> list[Row]:
    """Return the runs: one layer per virtual stage, embedding and head in their own (section 3.3.2)."""
    layers = split_layers(126, pp=16, vp=8, embedding=True, head=True)
    lines = (  # cp, dp, sequence, samples a data-parallel rank, TFLOP/s a GPU
        (1, 64, 8192, 32, 430, ""),
        (1, 128, 8192, 16, 400, ""),
        (16, 8, 131072, 16, 380, "counts attention in full; counted causal its step is 10.9 s"),
    )
    rows = []
    for cp, dp, length, samples, tflops, note in lines:
        layout = Layout(tp=8, pp=16, dp=dp, cp=cp, vp=8, layers_per_stage=layers)
        job = Workload(
            model=ShardedModel.from_layout(LLAMA_405B, layout),
            seq_length=length,
            micro_batch_size=1,
            global_batch_size=dp * samples,
            sequence=True,
            zero=2,
            implementation=META,
        )
        name = f"405B, {layout.world} GPUs" + (f", {length} tokens" if cp > 1 else "")
        utilisation = tflops / 989
        rows.append(
            Row("Llama 3.1", name, HARDWARE["h100"], job, utilisation, software="Meta's own", note=note)
        )
    return rows


def _nemotron() -> list[Row]:
    spec = gpt(
        layers=96,
        hidden=18432,
        heads=96,
        kv_heads=8,
        ffn=73728,
        vocab=256000,
        max_seq_len=4096,
        activation="squared_relu",
        positions="rope",
        rotary_fraction=0.5,
        tied=False,
        bias=False,
        qkv_bias=False,
    )
    return [
        Row(
            "Nemotron-4",
            f"340B, {96 * dp} GPUs",
            HARDWARE["h100"],
            Workload(
                model=ShardedModel.from_layout(spec, Layout(tp=8, pp=12, dp=dp, vp=8)),
                seq_length=4096,
                micro_batch_size=1,
                global_batch_size=samples,
                sequence=True,
                zero=1,
                implementation=FUSED,
            ),
            seconds=seconds,
            software="Megatron Core 2024",
        )
        for dp, samples, seconds in ((16, 768, 10.3), (32, 1536, 10.3), (64, 2304, 8.0))
    ]


def _fsdp() -> list[Row]:
    # torchtitan's selective recomputation keeps every other matrix product, here every other layer
    titan = Workload(
        model=ShardedModel.from_layout(LLAMA_8B, Layout(dp=8)),
        seq_length=8192,
        micro_batch_size=2,
        global_batch_size=16,
        recompute=RecomputePolicy("full", "block", 16),
        zero=3,
        implementation=FSDP_2024,
    )
    mpt = gpt(
        layers=32,
        hidden=4096,
        heads=32,
        vocab=50368,
        max_seq_len=2048,
        positions="alibi",
        bias=False,
        qkv_bias=False,
    )
    foundry = Workload(
        model=ShardedModel.from_layout(mpt, Layout(dp=8)),
        seq_length=2048,
        micro_batch_size=8,
        global_batch_size=64,
        zero=3,
        implementation=FSDP_2024,
    )
    kempner = Workload(
        model=ShardedModel.from_layout(LLAMA_8B, Layout()),
        seq_length=4096,
        micro_batch_size=4,
        global_batch_size=4,
        precision=BF16_STATE,
        recompute=FULL,
        implementation=FSDP_COMPILED,
    )
    return [
        Row(
            "torchtitan",
            "8B eager, 8 GPUs",
            H100_HBM2E,
            replace(titan, implementation=FSDP_EAGER),
            seconds=2 * 8192 / 5762,
            software="FSDP2",
        ),
        Row(
            "torchtitan", "8B, 8 GPUs", H100_HBM2E, titan, seconds=2 * 8192 / 6667, software="FSDP2, compiled"
        ),
        Row(
            "llm-foundry", "7B, 8 GPUs", HARDWARE["h100"], foundry, seconds=8 * 2048 / 10643, software="FSDP"
        ),
        Row(
            "KempnerForge",
            "8B, one H200",
            HARDWARE["h200"],
            kempner,
            seconds=4 * 4096 / 10471,
            software="compiled",
        ),
    ]


def _bridge() -> list[Row]:
    """Return H100 runs of the newest container of each model: FP8 linears, bfloat16 head and attention."""
    ends = split_layers(126, pp=8, vp=8, embedding=True, head=True)
    lines = (  # model, layout, samples a step, tokens/s a GPU, stage of ZeRO
        ("8B, 8 GPUs", LLAMA_8B, Layout(dp=8), 128, 14451, 3),
        ("70B, 64 GPUs", LLAMA_70B, Layout(tp=4, pp=8, dp=2, vp=5), 256, 1621, 1),
        (
            "405B, 1024 GPUs",
            LLAMA_405B,
            Layout(tp=8, pp=8, cp=2, dp=8, vp=8, layers_per_stage=ends),
            1536,
            311,
            1,
        ),
    )
    return [
        Row(
            "Megatron Bridge",
            f"{name}, FP8",
            HARDWARE["h100"],
            Workload(
                model=ShardedModel.from_layout(spec, layout),
                seq_length=8192,
                micro_batch_size=1,
                global_batch_size=samples,
                precision=FP8,
                sequence=layout.tp > 1,
                zero=zero,
                implementation=FUSED,
            ),
            seconds=samples * 8192 / (layout.world * rate),
            software="Megatron Core 2025",
        )
        for name, spec, layout, samples, rate, zero in lines
    ]


OTHERS = (_bloom(), *_mt_nlg(), _neox(), *_llama_405b(), *_nemotron(), *_fsdp(), *_bridge())
