"""A fit under torchrun that kills one of its own processes once: ``fit_and_die.py CHECKPOINT RESULT RANK PASS``.

The process with the number RANK kills itself after PASS passes unless it has been started again. Survivors print what
they raise.
"""

import os
import sys

import torch
from fits import counted, fitted, numbers

from fisherfold.distributed import RankLost, joined


def main() -> None:
    checkpoint, output, victim, moment = sys.argv[1:]
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    passes = counted(None if again else int(victim), int(moment))
    with joined() as group:
        try:
            model = fitted(checkpoint)
        except RankLost as error:
            print(f"rank {group.rank} says {error.ranks}: {error}", flush=True)
            os._exit(3)
        if group.is_first:
            torch.save(numbers(model), output)
    print(f"rank {group.rank} made {len(passes)} passes", flush=True)


if __name__ == "__main__":
    main()
