"""Files that ask a run for a checkpoint: written into RUN_DIR/launch by its batch job, or by a launcher."""

FOLDER = "launch"
#: Written by the job when its time limit is near, or into RUN_DIR by an interrupted launcher; the run removes it once
#: it has written a checkpoint.
SAVE = "save"
