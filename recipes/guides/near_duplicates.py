"""Near duplicates out of raw/*.jsonl, by datatrove: what stays is in filtered/, what goes in removed/."""

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

TASKS, CONFIG = 4, MinhashConfig()
STEPS = [
    (TASKS, [JsonlReader("raw"), MinhashDedupSignature("minhash/signatures", config=CONFIG)]),
    (CONFIG.num_buckets, [MinhashDedupBuckets("minhash/signatures", "minhash/buckets", config=CONFIG)]),
    (1, [MinhashDedupCluster("minhash/buckets", "minhash/remove", config=CONFIG)]),
    (
        TASKS,
        [
            JsonlReader("raw"),
            MinhashDedupFilter("minhash/remove", exclusion_writer=JsonlWriter("removed")),
            JsonlWriter("filtered"),
        ],
    ),
]

if __name__ == "__main__":
    for number, (tasks, pipeline) in enumerate(STEPS):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=2, logging_dir=f"logs/{number}").run()
