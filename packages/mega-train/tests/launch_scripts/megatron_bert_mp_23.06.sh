# After examples/pretrain_bert_distributed_with_mp.sh of Megatron-LM 23.06.
BERT_ARGS="
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 512
    --max-position-embeddings 512
    --micro-batch-size 2
    --global-batch-size 16
    --lr 0.0001
    --train-iters 1000000
    --lr-decay-iters 990000
    --lr-decay-style linear
    --min-lr 1.0e-5
    --weight-decay 1e-2
    --lr-warmup-fraction .01
    --clip-grad 1.0
    --fp16
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
torchrun --nproc_per_node 8 pretrain_bert.py $BERT_ARGS $DATA_ARGS $OUTPUT_ARGS \
    --distributed-backend nccl --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH
