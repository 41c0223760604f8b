# After the prefix language model of BigScience's tests/test_training.py, which has no other script for it.
config_json=$WORK/ds_config.json
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": 1,
  "train_batch_size": 16,
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
python pretrain_prefix_lm.py \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --distributed-backend nccl \
    --num-layers 2 \
    --hidden-size 64 \
    --num-attention-heads 2 \
    --seq-length 128 \
    --max-position-embeddings 1024 \
    --micro-batch-size 1 \
    --rampup-batch-size 2 2 200 \
    --global-batch-size 16 \
    --train-samples 200 \
    --loss-on-targets-only \
    --reweight-loss-based-on-position-frequency \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --adam-eps 1e-8 \
    --lr 1e-4 \
    --lr-warmup-samples 5 \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    --fp16 \
    --log-interval 5 \
    --save-interval 10 \
    --eval-interval 10 \
    --eval-iters 5 \
    --checkpoint-activations \
    --exit-interval 10 \
    --merge-file $MERGE_FILE \
    --vocab-file $VOCAB_FILE \
    --log-path $WORK/logs \
    --save $CHECKPOINT_PATH \
    --load $CHECKPOINT_PATH \
    --data-path $DATA_PATH \
    --tensorboard-dir $TENSORBOARD_PATH \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --log-level debug \
    --deepspeed \
    --deepspeed_config $config_json \
    --zero-stage 1 \
    --deepspeed-activation-checkpointing
