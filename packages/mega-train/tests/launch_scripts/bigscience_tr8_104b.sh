# After tr8-104B-wide of BigScience.
config_json=$WORK/ds_config.json
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 1,
  "train_batch_size": 2048,
  "gradient_clipping": 1.0,
  "zero_optimization": { "stage": 1 },
  "fp16": {
    "enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
    "initial_scale_power": 12
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
EOT
python pretrain_gpt.py \
    --tensor-model-parallel-size 4 \
    --pipeline-model-parallel-size 32 \
    --num-layers 64 \
    --hidden-size 11600 \
    --num-attention-heads 80 \
    --seq-length 2048 \
    --max-position-embeddings 2048 \
    --micro-batch-size 1 \
    --rampup-batch-size 16 16 6_000_000 \
    --global-batch-size 2048 \
    --train-samples 300_000_000 \
    --vocab-file $VOCAB_FILE \
    --merge-file $MERGE_FILE \
    --loss-scale 12 \
    --clip-grad 1.0 \
    --fp16 \
    --checkpoint-activations \
    --seed 43 \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --adam-eps 1e-8 \
    --lr 6e-5 \
    --min-lr 6e-6 \
    --lr-decay-style cosine \
    --lr-decay-samples 126_953_125 \
    --lr-warmup-samples 216_320 \
    --weight-decay 1e-1 \
    --exit-duration-in-mins 1190 \
    --log-interval 1 \
    --save-interval 300 \
    --eval-interval 1000 \
    --eval-iters 5 \
    --codecarbon-dir $WORK/codecarbon \
    --tensorboard-dir $TENSORBOARD_PATH \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --save $CHECKPOINT_PATH \
    --load $CHECKPOINT_PATH \
    --data-path $DATA_PATH \
    --data-impl mmap \
    --split 900,100,0 \
    --distributed-backend nccl \
    --deepspeed \
    --deepspeed_config $config_json \
    --zero-stage 1 \
    --deepspeed-activation-checkpointing
