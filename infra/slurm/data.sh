#!/usr/bin/env bash
# Run a mega-data command on a Slurm cluster: a job array per stage, each after the previous one, then one job that
# publishes the files, prints the result and removes the intermediate files:
#   infra/slurm/data.sh 16 "keys sort pairs paired sets groups filter" dedup --preset megatron --input shards --output kept
#   infra/slurm/data.sh 16 "extract join" extract --input crawl --output crawl.jsonl
# The first argument is the number of elements of each array, the second the stages in order. Options of sbatch are
# set by environment variables: SBATCH_PARTITION=cpu SBATCH_TIMELIMIT=4:00:00 infra/slurm/data.sh ...
# Run it again after a failure to resume: finished tasks are not repeated.
# Not run on a Slurm cluster. The tests run it with a fake sbatch that starts the elements as processes and kills some
# of them; shellcheck 0.11 reports nothing.
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
