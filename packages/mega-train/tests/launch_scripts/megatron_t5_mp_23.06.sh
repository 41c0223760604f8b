# After examples/pretrain_t5_distributed_with_mp.sh of Megatron-LM 23.06.
T5_ARGS="
    --tensor-model-parallel-size 2
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --kv-channels 64
    --ffn-hidden-size 3072
    --encoder-seq-length 512
    --decoder-seq-length 128
    --max-position-embeddings 512
    --micro-batch-size 16
    --global-batch-size 128
    --lr 0.0001
    --train-iters 1000000
    --lr-decay-iters 1000000
    --lr-decay-style linear
    --min-lr 0.00001
    --weight-decay 1e-2
    --lr-warmup-fraction .01
    --clip-grad 1.0
    --fp16
    --vocab-extra-ids 100
"
DATA_ARGS="
    --data-path $SENTENCES_PATH
    --vocab-file $BERT_VOCAB_FILE
    --data-impl mmap
    --split 949,50,1
"
OUTPUT_ARGS="
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --eval-iters 10
"
torchrun --nproc_per_node 8 pretrain_t5.py $T5_ARGS $DATA_ARGS $OUTPUT_ARGS \
    --distributed-backend nccl --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
