#!/usr/bin/env bash
# A command of mega-data on a Slurm cluster: a job array per stage, each after the one before, then one job
# that finds every task done, gives the files their names, tells the result and clears the intermediate files:
#   infra/slurm/data.sh 16 "keys pairs sets groups filter" dedup --preset megatron --input shards --output kept
#   infra/slurm/data.sh 16 "extract join" extract --input crawl --output crawl.jsonl
# The first word is the number of elements of each array, the second the stages in their order. Options of sbatch
# go through its environment: SBATCH_PARTITION=cpu SBATCH_TIMELIMIT=4:00:00 infra/slurm/data.sh ...
# Called again after an element failed, it goes on: tasks that are done stay done.
# Not run under a Slurm: none was at hand. The tests run it with an sbatch that starts the elements as processes,
# some of which they kill; shellcheck 0.11 has nothing to say.
set -euo pipefail

elements=$1
stages=$2
shift 2
job=$(dirname "$0")/data.sbatch
after=()
for stage in $stages; do
    id=$(sbatch --parsable "${after[@]}" --array "0-$((elements - 1))" "$job" "$@" \
        --executor slurm-array --stage "$stage")
    after=(--dependency "afterok:${id%%;*}" --kill-on-invalid-dep yes)
done
sbatch "${after[@]}" "$job" "$@"
