#!/bin/bash
# A corpus without duplicates: four jobs, each of which waits for the one before.
#
#   recipes/slurm/build-dedup.sh /data/raw --tokenizer /data/tokenizer --out /data/shards
#
# All nodes need these paths. NUM_JOBS is the size of the arrays (16); the bytes do not depend on it.
set -euo pipefail

num_jobs=${NUM_JOBS:-16}
cpus=${CPUS_PER_JOB:-16}
build="tokshard build $(printf '%q ' "$@")--dedup exact --workers $cpus"
# shellcheck disable=SC2016 # each job expands these
share='--job-index $SLURM_ARRAY_TASK_ID --num-jobs $SLURM_ARRAY_TASK_COUNT'
out=$(while (($#)); do case $1 in --out) echo "$2" ;; --out=*) echo "${1#--out=}" ;; esac; shift; done)

submit() { sbatch --parsable --requeue --cpus-per-task="$cpus" "$@"; }

hash=$(submit --job-name=tokshard-hash --array="0-$((num_jobs - 1))" --wrap="$build --stage hash $share")
duplicates=$(submit --job-name=tokshard-duplicates --dependency="afterok:$hash" --wrap="$build --stage duplicates")
write=$(submit --job-name=tokshard-write --dependency="afterok:$duplicates" --array="0-$((num_jobs - 1))" \
    --wrap="$build --stage write $share")
submit --job-name=tokshard-commit --dependency="afterok:$write" --wrap="tokshard build --commit $(printf %q "$out")"
