"""A fit under torchrun that kills one of its own processes once: ``fit_and_die.py FILE CHECKPOINT MODEL RANK PASS``.

The process with the number RANK kills itself after PASS passes unless it has been started again. Survivors print what
they raise.
"""

import os
import signal
import sys

from fisherfold import MatrixCompletion
from fisherfold.distributed import RankLost, joined
from fisherfold.estimators.checkpoint import FitCheckpoint


def main() -> None:
    file, checkpoint, output, victim, moment = sys.argv[1:]
    save, passes = FitCheckpoint.save, []

    def save_and_die(self: FitCheckpoint, *state: object) -> None:
        save(self, *state)
        passes.append(1)
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if not again and os.environ["RANK"] == victim and len(passes) == int(moment):
            os.kill(os.getpid(), signal.SIGKILL)

    FitCheckpoint.save = save_and_die
    with joined() as group:
        model = MatrixCompletion(rank=2, max_iter=8, tol=0.0, checkpoint=checkpoint)
        try:
            model.fit_file_share(file)
        except RankLost as error:
            print(f"rank {group.rank} says {error.ranks}: {error}", flush=True)
            os._exit(3)
        if group.is_first:
            model.save(output)
    print(f"rank {group.rank} made {len(passes)} passes", flush=True)


if __name__ == "__main__":
    main()
