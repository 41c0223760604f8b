"""Command lines and configurations of Megatron-LM, DeepSpeed and fairseq, translated into ours."""
