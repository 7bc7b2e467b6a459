"""Files of a run that a batch job started: RUN_DIR/launch."""

FOLDER = "launch"
#: Made by the job when its time limit is near; removed by the run when it has written a checkpoint since.
SAVE = "save"
