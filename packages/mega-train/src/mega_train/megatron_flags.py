"""Flags of Megatron's launch scripts that `mega-train` does not have, and what becomes of each.

Those of Megatron-LM up to core 0.9, of BigScience's and DeepSpeed's forks, and fairseq's for megatron_11b; of
data preparation, serving and evaluating only what a training script may hold. A key that ends with a hyphen
stands for every flag that begins so. A flag that we come to have leaves these tables; a test sees to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_KERNELS = "--kernels auto takes the fused kernels a machine has"
_PROCESSES = "the device decides how processes meet, gloo on CPUs and NCCL on GPUs"
_TRAVELS = "messages between pipeline stages travel while ranks compute"
_SELF_TOLD = "a checkpoint says what it holds"
_FLOAT32 = "scores, softmax and loss are computed in float32"
_OVERLAPS = "torch's symmetric memory overlaps what it can"
_ALLOCATOR = "Python and torch free memory themselves"
_RECORD = "the numbers lie in events.jsonl, under --save"
_SCALED = "of FP8: a scale is found in the tensor it is for, each time, with no history and no margin"
_DEALT = "initial values and every update are the same on all replicas"

# a run is the same without these: they are left out, with a line that says so
NEEDLESS: Mapping[str, str] = MappingProxyType(
    {
        "--use-flash-attn": _KERNELS,
        "--transformer-impl": _KERNELS,
        "--no-masked-softmax-fusion": _KERNELS,
        "--no-bias-swiglu-fusion": _KERNELS,
        "--no-bias-dropout-fusion": _KERNELS,
        "--no-rope-fusion": _KERNELS,
        "--no-persist-layer-norm": _KERNELS,
        "--cross-entropy-loss-fusion": _KERNELS,
        "--use-mcore-models": "there is one model of each family",
        "--use-legacy-models": "there is one model of each family",
        "--no-async-tensor-model-parallel-allreduce": _KERNELS,
        "--distributed-backend": _PROCESSES,
        "--lazy-mpu-init": _PROCESSES,
        "--overlap-p2p-communication": _TRAVELS,
        "--no-overlap-p2p-communication": _TRAVELS,
        "--local-rank": _PROCESSES,
        "--local_rank": _PROCESSES,
        "--use-cpu-initialization": "initial values never depend on the layout",
        "--accumulate-allreduce-grads-in-fp32": "gradients are summed in float32",
        "--no-contiguous-buffers-in-local-ddp": "gradients lie in buckets",
        "--zero-contigious-gradients": "gradients lie in buckets",
        "--zero-reduce-scatter": "--zero-stage 1 to 3 reduce and scatter",
        "--num-workers": "samples are read from a memory map, by the process that needs them",
        "--data-impl": "a dataset says which form it has",
        "--use-checkpoint-args": _SELF_TOLD,
        "--ckpt-format": _SELF_TOLD,
        "--auto-detect-ckpt-format": _SELF_TOLD,
        "--use-dist-ckpt": _SELF_TOLD,
        "--log-throughput": "every line of the log has TFLOP/s and tokens/s",
        "--log-progress": "events.jsonl, under --save, says how far a run has come",
        "--log-learning-rate-to-tensorboard": "the learning rate is always there",
        "--log-loss-scale-to-tensorboard": "the loss scale is always there",
        "--no-barrier-with-level-1-timing": "ranks never wait for each other to be timed",
        "--config-logger-dir": "events.jsonl, under --save, holds the configuration",
        "--logging-level": "what a person should know is always told",
        "--log-level": "what a person should know is always told",
        "--log-level-replica": "the first rank speaks for all",
        "--enable-ft-package": "a watchdog tells of ranks that hang or are lost",
        "--one-logger-": "the numbers lie in events.jsonl, under --save",
        "--app-tag-run-": "the numbers lie in events.jsonl, under --save",
        "--check-for-nan-in-loss-and-grad": "always checked; --on-non-finite says what follows",
        "--check-for-nan": "always checked; --on-non-finite says what follows",
        "--use-contiguous-buffers-in-ddp": "gradients lie in buckets",
        "--ddp-average-in-collective": "gradients are summed, then scaled",
        "--no-align-grad-reduce": "every stage sends its gradients as they are made",
        "--no-align-param-gather": "every stage gathers its weights as it needs them",
        "--no-scatter-gather-tensors-in-pipeline": _TRAVELS,
        "--use-ring-exchange-p2p": _TRAVELS,
        "--nccl-communicator-config-path": "NCCL reads NCCL_* from the environment",
        "--abort-on-unmet-fused-kernel-constraints": _KERNELS,
        "--disable-tp-comm-": _OVERLAPS,
        "--tp-comm-overlap-": _OVERLAPS,
        "--defer-embedding-wgrad-compute": "--pipeline-schedule zero-bubble puts weight gradients off",
        "--wgrad-deferral-limit": "--pipeline-schedule zero-bubble puts weight gradients off",
        "--apply-query-key-layer-scaling": _FLOAT32,
        "--no-query-key-layer-scaling": _FLOAT32,
        "--attention-softmax-in-fp32": _FLOAT32,
        "--fp16-lm-cross-entropy": _FLOAT32,
        "--fp8-margin": _SCALED,
        "--fp8-interval": _SCALED,
        "--fp8-amax-history-len": _SCALED,
        "--fp8-amax-compute-algo": _SCALED,
        "--embedding-weights-in-fp32": "main weights are float32, the embedding's too",
        "--synchronize-each-layer": "nothing has to be waited for after a layer",
        "--contigious-checkpointing": _ALLOCATOR,
        "--deepspeed-activation-checkpointing": "--checkpoint-activations does it",
        "--profile-backward": "backward is timed with the rest",
        "--empty-unused-memory-level": _ALLOCATOR,
        "--manual-gc": _ALLOCATOR,
        "--manual-gc-interval": _ALLOCATOR,
        "--no-manual-gc-eval": _ALLOCATOR,
        "--no-clone-scatter-output-in-embedding": _ALLOCATOR,
        "--use-pin-memory": _ALLOCATOR,
        "--scattered-embeddings": "--sequence-parallel shares the embedding's tokens",
        "--split-transformers": "the feed-forward keeps next to nothing of its own",
        "--memory-centric-tiled-linear": "linears are cut over tp",
        "--tile-factor": "linears are cut over tp",
        "--sync-tp-duplicated-parameters": "what ranks of tp hold alike gets the same gradient, bit for bit",
        "--check-weight-hash-across-dp-replicas-interval": _DEALT,
        "--data-parallel-random-init": _DEALT,
        "--no-initialization": "weights that are loaded are not drawn first",
        "--deepspeed": "--zero-stage and --deepspeed_config say what of it is wanted",
        "--no-create-attention-mask-in-dataloader": "attention knows who sees whom without a mask",
        "--valid-num-workers": "samples are read from a memory map, by the process that needs them",
        "--return-data-index": "the samples of a step follow from the samples consumed",
        "--train-sync-interval": "ranks never drift apart by more than a step",
        "--ckpt-fully-parallel-load": _SELF_TOLD,
        "--ckpt-fully-parallel-save": "every rank writes its part",
        "--ckpt-assume-constant-structure": _SELF_TOLD,
        "--dist-ckpt-strictness": "a checkpoint with another model's parameters is refused",
        "--dist-ckpt-format": _SELF_TOLD,
        "--universal-checkpoint": "every checkpoint loads on every layout",
        "--no-save-rng": "choices are drawn from the seed, so there is no state to save",
        "--log-path": _RECORD,
        "--adlr-autoresume": "SIGTERM saves and leaves with code 143",
        "--adlr-autoresume-interval": "SIGTERM saves and leaves with code 143",
        "--decoder-seq-length": "of encoder-decoder models",
        "--inference-batch-times-seqlen-threshold": "of serving",
        "--max-tokens-to-oom": "of serving",
        "--bert-no-binary-head": "of BERT",
        "--mask-prob": "of BERT and T5",
        "--short-seq-prob": "of BERT and T5",
        "--no-epoch-checkpoints": "--save-interval says when",
    }
)

# other spellings of ours: words to put in the flag's place, before its value where it has one
ALIKE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
        "--squared-relu": ("--activation", "squared_relu"),
        "--openai-gelu": ("--activation", "gelu_tanh"),
        "--onnx-safe": ("--activation", "gelu_erf"),
        "--fp8-e4m3": ("--fp8-format", "e4m3"),
        "--fp8-hybrid": ("--fp8-format", "hybrid"),
        "--layernorm-epsilon": ("--norm-epsilon",),
        "--encoder-seq-length": ("--seq-length",),
        "--encoder-num-layers": ("--num-layers",),
        "--model-parallel-size": ("--tensor-model-parallel-size",),
        "--batch-size": ("--micro-batch-size",),
        "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
        "--activations-checkpoint-num-layers": ("--recompute-num-layers",),
        "--checkpoint-num-layers": ("--recompute-num-layers",),
        "--distribute-checkpointed-activations": ("--distribute-saved-activations",),
        "--partition-activations": ("--distribute-saved-activations",),
        "--warmup": ("--lr-warmup-fraction",),
        "--use-checkpoint-lr-scheduler": ("--use-checkpoint-opt_param-scheduler",),
        "--override-lr-scheduler": ("--override-opt_param-scheduler",),
        "--zero-reduce-bucket-size": ("--ddp-bucket-size",),
        "--no-log-learning-rate-to-tensorboard": ("--no-log-learnig-rate-to-tensorboard",),
        "--persistent-save-interval": ("--save-interval",),
        "--save-retain-interval": ("--keep-every",),
        # fairseq's
        "--max-update": ("--train-iters",),
        "--tokens-per-sample": ("--seq-length",),
        "--max-sentences": ("--micro-batch-size",),
        "--warmup-updates": ("--lr-warmup-iters",),
        "--warmup-init-lr": ("--lr-warmup-init",),
        "--clip-norm": ("--clip-grad",),
        "--dropout": ("--hidden-dropout",),
        "--memory-efficient-fp16": ("--fp16",),
        "--save-dir": ("--save",),
    }
)

# what a value of a flag means, where it does not mean itself; of a flag of ours all other values do
MEANS: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--position-embedding-type": MappingProxyType(
            {
                "absolute": ("--position-embedding-type", "learned_absolute"),
                "rotary": ("--position-embedding-type", "rope"),
            }
        ),
        "--DDP-impl": MappingProxyType({"FSDP": ("--zero-stage", "3")}),
        "--model-type": MappingProxyType({"GPT": ()}),
        "--remote-device": MappingProxyType({"none": ()}),
        "--mlp-type": MappingProxyType({"standard": ()}),
        "--fp8-recipe": MappingProxyType({"tensorwise": ()}),
        # fairseq's
        "--arch": MappingProxyType({"transformer_lm_megatron_11b": ("--preset", "megatron-11b")}),
        "--task": MappingProxyType({"language_modeling": ()}),
        "--sample-break-mode": MappingProxyType({"none": ()}),
        "--criterion": MappingProxyType({"vocab_parallel_cross_entropy": (), "cross_entropy": ()}),
        "--lr-scheduler": MappingProxyType(
            {
                "inverse_sqrt": ("--lr-decay-style", "inverse-square-root"),
                "fixed": ("--lr-decay-style", "constant"),
            }
        ),
    }
)

# what `familiar` reads with others of the same line in view
READ: Mapping[str, str] = MappingProxyType(
    {
        "--no-position-embedding": "is read as --position-embedding-type none; beside rotary ones as nothing",
        "--group-query-attention": "is read as --num-query-groups 1 where that is not given",
        "--adam-betas": "is read as --adam-beta1 and --adam-beta2",
        "--share-decoder-input-output-embed": "is so unless --arch stands without it",
        "--deepspeed_config": "is read for batch, ZeRO stage, clipping and precision",
        "--deepspeed-config": "is read as --deepspeed_config",
    }
)

# refused: what to say in their place
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "--log-straggler": "--timing-log-level 1 --timing-log-option all",
        "--ckpt-step": "--load RUN/iter_NNNNNNN",
        "--zero-allgather-bucket-size": "--ddp-bucket-size says both",
        "--pad-vocab-size-to": "--make-vocab-size-divisible-by",
        "--distributed-world-size": "torchrun --nproc-per-node N",
        "--sequence-parallel-size": "--context-parallel-size",
        "--exit-on-missing-checkpoint": "--load RUN where --save is another folder: then nothing begins anew",
        "--non-persistent-": "--save-interval N --keep-last 1",
        "--train-tokens": "--train-samples N, the tokens over --seq-length",
        "--lr-decay-tokens": "--lr-decay-samples N, the tokens over --seq-length",
        "--lr-warmup-tokens": "--lr-warmup-samples N, the tokens over --seq-length",
        "--pp-partition-method": "--account-for-embedding-in-pipeline-split",
        "--standalone-embedding-stage": "--account-for-embedding-in-pipeline-split",
        "--yaml-cfg": "--config run.toml",
        "--test-mode": "--deterministic-mode",
        "--inference": "mega-serve",
        "--append-eod": "mega-data preprocess --append-eod",
        "--s3-cache-path": "a corpus on this machine's disks",
        "--train-data-exact-num-epochs": "--train-samples N",
        "--data-efficiency-curriculum-learning": "--curriculum-start-length and --curriculum-steps",
    }
)

# refused: what a run would need and cannot have yet, with the nearest there is
ABSENT: Mapping[str, str] = MappingProxyType(
    {
        "--num-experts": "",
        "--expert-model-parallel-size": "",
        "--expert-interval": "",
        "--moe-": "",
        "--topk": "",
        "--disable-moe-token-dropping": "",
        "--use-tutel": "",
        "--fp8-param-gather": "leave it out; weights travel in bfloat16",
        "--fp32-residual-connection": "leave it out",
        "--use-tp-pp-dp-mapping": "leave it out; ranks are numbered tp, cp, dp, pp",
        "--overlap-param-gather-with-optimizer-step": "--overlap-param-gather",
        "--no-save-optim": "mega-ckpt reshard --no-optim makes a copy without it",
        "--cpu-optimizer": "--zero-stage 1",
        "--cpu_torch_adam": "--zero-stage 1",
        "--use-bnb": "--optimizer adam",
        "--use-bnb-optimizer": "--optimizer adam",
        "--checkpoint-in-cpu": "--distribute-saved-activations",
        "--mock-data": "mega-data sample",
        "--sample-rate": "--train-samples",
        "--loss-on-targets-only": "--sft",
        "--reweight-loss-based-on-position-frequency": "leave it out",
        "--train-idx-path": "--data-cache-path keeps the order that is made",
        "--train-doc-idx-path": "--data-cache-path keeps the order that is made",
        "--train-sample-idx-path": "--data-cache-path keeps the order that is made",
        "--train-shuffle-idx-path": "--data-cache-path keeps the order that is made",
        "--spec": "--preset",
        "--random-ltd": "leave it out",
        "--kd": "",
        "--kd-": "",
        "--mos": "",
        "--load-teacher": "",
        "--num-layers-teacher": "",
        # other families
        "--decoder-num-layers": "--num-layers",
        "--encoder-tensor-model-parallel-size": "--tensor-model-parallel-size",
        "--encoder-pipeline-model-parallel-size": "--pipeline-model-parallel-size",
        "--pipeline-model-parallel-split-rank": "--pipeline-model-parallel-size",
        "--noise-density": "",
        "--mean-noise-span-length": "",
        "--retro": "",
        "--retro-": "",
        "--retriever-": "",
        "--ict-": "",
        "--biencoder-": "",
        "--bert-": "",
        "--indexer-": "",
        "--block-data-path": "",
        "--evidence-data-path": "",
        "--titles-data-path": "",
        "--embedding-path": "",
        "--vision-": "",
        "--img-": "",
        "--patch-dim": "",
        "--num-classes": "",
        "--hybrid-": "",
    }
)
