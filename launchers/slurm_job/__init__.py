"""The program of a Slurm batch job, on its first node: `python3 -m slurm_job RUN_DIR` in RUN_DIR/launch.

    nodes of the job, except excluded ones and those that fail the pre-flight -> first cluster.nnodes; others are spare
    srun node.sh on them  -> it ends well, or fails on nodes that all answer  -> the job ends
         ^                 -> nodes are lost -> they are excluded; enough others -> again, from the newest checkpoint
         |                                                          |
         +----------------------------------------------------------+--> too few -> the next job, without these nodes
    USR1     the time limit is near: a checkpoint, the next job of the chain, the end; or the job is preempted: a
             checkpoint, and into the queue again
    TERM     scancel, or no time is left: the end, and nothing is submitted

`megarl launch` copies this folder to the run folder. It needs only Python 3.9, so that it also runs outside megarl's
container; its files therefore import each other relatively.

    driver.py    the job
    nodes.py     tests of nodes
    files.py     RUN_DIR/launch, Slurm's commands, nodes that sbatch excludes
    guard.py     watches the driver from another node
"""
