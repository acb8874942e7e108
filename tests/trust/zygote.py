"""A process that has imported everything and forks a child for every line it reads: one command of fisherfold each.

A line is JSON: the words of the command, and limits. The number of the child is written at once; after a
further line, its exit status when it has ended. A child starts in milliseconds, so that it can be killed many times.
"""

import importlib
import json
import os
import resource
import sys

import torch

from fisherfold.cli import main

torch.set_num_threads(1)

for name in (
    "completion.rating_model",
    "completion.cross_validation",
    "subspace.regressor",
    "subspace.files",
):
    importlib.import_module(f"fisherfold.{name}")


def child(order):
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if order.get("largest_file"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["largest_file"],) * 2)
    code = 1
    try:
        sys.argv = ["fisherfold", *order["args"]]
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        child(order)
    print(pid, flush=True)
    sys.stdin.readline()  # until the child is waited for, its number belongs to nobody else
    print(os.waitpid(pid, 0)[1], flush=True)
