"""Files by which a run is asked for a checkpoint: by a batch job that started it, in RUN_DIR/launch, or a launcher."""

FOLDER = "launch"
#: Made by the job when its time limit is near, or in RUN_DIR by a launcher that is interrupted; removed by the run when
#: it has written a checkpoint since.
SAVE = "save"
