"""Held-out accuracy and time of matrix completion on the same splits.

Peers come from `pip install cmfrec myfm cornac scikit-surprise lenskit "setuptools<81"`; those that
are missing are left out and named. Every tool runs in a process of its own with the same split,
thread count and float32 where it can. The seconds are those of `fit` from arrays of ids and values,
everything of the tool's own included (its data set object is counted too, in `load`). RMSE is that
of predictions clipped to the range of the ratings, on a random fifth.

Hyper-parameters were chosen on a tenth of the training part of seed 0 with `--tune` (the grids are
in GRIDS, the choices in CHOSEN) by each tool's own means; fisherfold's default has none. Results
are appended to a JSON lines file, so that the benchmark can be run in pieces.

Against: cmfrec, myFM, cornac, Surprise, LensKit
Takes: ten minutes; an hour with `--full`
Page: docs/benchmarks/completion.md
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections import defaultdict
from pathlib import Path

import numpy as np

from benchmarks._common import PACKAGES

SMOKE = (
    "--tools fisherfold fisherfold-point --seeds 0 --threads 1 --only movielens1m-5 jester1-5 "
    "--results {folder}/results.jsonl",
    "--coverage --results {folder}/results.jsonl --picture {folder}/picture.png",
)

RANKS = {"movielens1m": (5, 10), "jester1": (5, 10)}
MORE_RANKS = (20, 40)
SEEDS = (0, 1, 2)
GRIDS = {
    "cmfrec": {
        "lambda_": {"movielens1m": [5.0, 7.0, 10.0, 14.0, 20.0], "jester1": [80.0, 150.0, 300.0]}
    },
    "cmfrec-implicit": {
        "lambda_": {"movielens1m": [3.0, 5.0, 7.0, 10.0, 14.0], "jester1": [80.0, 150.0, 300.0]}
    },
    "cornac": {
        "lambda_reg": {"movielens1m": [0.03, 0.05, 0.08], "jester1": [0.05, 0.1, 0.2]},
        "learning_rate": {"movielens1m": [0.005, 0.01], "jester1": [0.0005, 0.001, 0.003]},
    },
    "surprise": {
        "reg_all": {"movielens1m": [0.05, 0.08], "jester1": [0.1, 0.3]},
        "lr_all": {"movielens1m": [0.005, 0.01], "jester1": [0.001, 0.003]},
    },
    "lenskit": {
        "regularization": {"movielens1m": [0.05, 0.1, 0.2], "jester1": [0.1, 0.25, 0.5, 1.0]}
    },
}
CHOSEN_FILE = Path(__file__).with_name("completion_chosen.json")
SWEEPS = {"myfm-gibbs": (100, 500), "myfm-vb": (20, 50)}


def ratings(name: str, seed: int):
    """Training and test parts of a random 80/20 split."""
    from fisherfold.datasets import load_ratings

    data = load_ratings(name)
    rows = np.asarray(data.rows, np.int32)
    columns = np.asarray(data.cols, np.int32)
    values = np.asarray(data.values, np.float32)
    order = np.random.default_rng(seed).permutation(len(values))
    cut = int(0.8 * len(values))
    return [(rows[part], columns[part], values[part]) for part in (order[:cut], order[cut:])]


def fit_fisherfold(train, rank, threads, seed, **options):
    from fisherfold import MatrixCompletion

    rows, columns, values = train
    model = MatrixCompletion(rank, n_jobs=threads, random_state=seed, **options)
    pairs = np.stack([rows, columns], axis=1)
    began = clock()
    model.fit(pairs, values)
    return lambda i, j: model.predict(np.stack([i, j], axis=1)), began, 0.0


def fit_cmfrec(train, rank, threads, seed, *, lambda_, implicit=False):
    from cmfrec import CMF
    from scipy.sparse import coo_matrix

    rows, columns, values = train
    model = CMF(
        k=rank,
        lambda_=lambda_,
        method="als",
        use_cg=False,
        niter=10,
        user_bias=True,
        item_bias=True,
        add_implicit_features=implicit,
        nthreads=threads,
        use_float=True,
        verbose=False,
        random_state=seed,
        precompute_for_predictions=False,
    )
    began = clock()
    model.fit(coo_matrix((values, (rows, columns))))
    known = int(rows.max()), int(columns.max())
    return lambda i, j: model.predict(np.minimum(i, known[0]), np.minimum(j, known[1])), began, 0.0


def fit_myfm(train, rank, threads, seed, *, kind, sweeps):
    import myfm
    from scipy.sparse import csr_matrix

    rows, columns, values = train
    sizes = int(rows.max()) + 1, int(columns.max()) + 1

    def design(i, j):
        i = np.minimum(i, sizes[0] - 1)
        j = np.minimum(j, sizes[1] - 1) + sizes[0]
        indices = np.stack([i, j], axis=1).ravel()
        return csr_matrix(
            (np.ones(len(indices)), indices, np.arange(0, len(indices) + 1, 2)),
            (len(i), sum(sizes)),
        )

    cls = myfm.MyFMRegressor if kind == "gibbs" else myfm.VariationalFMRegressor
    model = cls(rank=rank, random_seed=seed)
    groups = [0] * sizes[0] + [1] * sizes[1]
    X = design(rows, columns)
    began = clock()
    model.fit(X, values, n_iter=sweeps, grouping=groups)
    return lambda i, j: model.predict(design(i, j)), began, 0.0


def fit_cornac(train, rank, threads, seed, *, learning_rate, lambda_reg, epochs=50):
    from cornac.data import Dataset
    from cornac.models import MF

    rows, columns, values = train
    load = time.process_time()
    triples = list(zip(rows.tolist(), columns.tolist(), values.tolist(), strict=True))
    data = Dataset.from_uir(triples, seed=seed)
    load = time.process_time() - load
    model = MF(
        k=rank,
        max_iter=epochs,
        learning_rate=learning_rate,
        lambda_reg=lambda_reg,
        use_bias=True,
        early_stop=False,
        num_threads=threads,
        verbose=False,
        seed=seed,
    )
    began = clock()
    model.fit(data)

    def predict(i, j):
        user = np.array([data.uid_map.get(v, -1) for v in i.tolist()])
        item = np.array([data.iid_map.get(v, -1) for v in j.tolist()])
        known = (user >= 0) & (item >= 0)
        score = np.full(len(i), model.global_mean)
        score += np.where(user >= 0, model.u_biases[user], 0) + np.where(
            item >= 0, model.i_biases[item], 0
        )
        score[known] += (model.u_factors[user[known]] * model.i_factors[item[known]]).sum(axis=1)
        return score

    return predict, began, load


def fit_surprise(train, rank, threads, seed, *, lr_all, reg_all, epochs=40):
    import pandas as pd
    from surprise import SVD, Dataset, Reader

    rows, columns, values = train
    load = time.process_time()
    frame = pd.DataFrame({"u": rows, "i": columns, "r": values})
    data = Dataset.load_from_df(
        frame, Reader(rating_scale=(float(values.min()), float(values.max())))
    )
    data = data.build_full_trainset()
    load = time.process_time() - load
    model = SVD(n_factors=rank, n_epochs=epochs, lr_all=lr_all, reg_all=reg_all, random_state=seed)
    began = clock()
    model.fit(data)
    return (
        lambda i, j: np.array([model.predict(u, v).est for u, v in zip(i, j, strict=True)]),
        began,
        load,
    )


def fit_lenskit(train, rank, threads, seed, *, regularization, epochs=20):
    import pandas as pd
    from lenskit.als import BiasedMFScorer
    from lenskit.data import ItemList, from_interactions_df

    rows, columns, values = train
    load = time.process_time()
    frame = pd.DataFrame({"user_id": rows, "item_id": columns, "rating": values})
    data = from_interactions_df(frame)
    load = time.process_time() - load
    model = BiasedMFScorer(embedding_size=rank, epochs=epochs, regularization=regularization)
    began = clock()
    model.train(data)

    def predict(i, j):
        from lenskit.data import RecQuery

        out = np.full(len(i), values.mean(), dtype=np.float64)
        order = np.argsort(i, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(i[order])) + 1):
            scores = model(RecQuery(user_id=i[part[0]]), ItemList(item_ids=j[part])).scores("numpy")
            out[part] = np.where(np.isfinite(scores), scores, values.mean())
        return out

    return predict, began, load


TOOLS = {
    "fisherfold": (fit_fisherfold, {}),
    "fisherfold-nosets": (fit_fisherfold, {"rated_sets": False}),
    "fisherfold-point": (fit_fisherfold, {"inference": "point", "tol": 1e-4, "max_iter": 30}),
    "cmfrec": (fit_cmfrec, {}),
    "cmfrec-implicit": (fit_cmfrec, {"implicit": True}),
    "cornac": (fit_cornac, {}),
    "surprise": (fit_surprise, {}),
    "lenskit": (fit_lenskit, {}),
    "myfm-vb": (fit_myfm, {"kind": "vb"}),
    "myfm-gibbs": (fit_myfm, {"kind": "gibbs"}),
}
LABELS = {
    "fisherfold": "**fisherfold**, default",
    "fisherfold-nosets": "fisherfold, `rated_sets=False`",
    "fisherfold-point": 'fisherfold, `inference="point"`',
    "cmfrec": "cmfrec ALS, biases, Cholesky",
    "cmfrec-implicit": "cmfrec + implicit features",
    "cornac": "cornac MF (SGD)",
    "surprise": "Surprise SVD",
    "lenskit": "LensKit BiasedMF",
    "myfm-vb": "myFM variational",
    "myfm-gibbs": "myFM Gibbs",
}


def clock() -> tuple[float, float]:
    """CPU seconds of this process and its children, and wall seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime, time.perf_counter()


def chosen(tool: str, name: str, rank: int) -> dict:
    """The hyper-parameters that ``--tune`` found for this tool, data and rank."""
    if tool not in GRIDS:
        return {}
    return json.loads(CHOSEN_FILE.read_text())[f"{tool} {name} {rank}"]


def measure(tool, name, rank, seed, threads, sweeps, repeat, *, options=None, part=None):
    """Fit one tool and return its record; the fastest of ``repeat`` fits counts."""
    import torch

    torch.set_num_threads(threads)
    train, test = part or ratings(name, seed)
    fit, fixed = TOOLS[tool]
    options = {**fixed, **(chosen(tool, name, rank) if options is None else options)}
    if tool in SWEEPS:
        options["sweeps"] = sweeps
    best = None
    for _ in range(repeat):
        predict, began, load = fit(train, rank, threads, seed, **options)
        now = clock()
        seconds = (now[0] - began[0], now[1] - began[1], load)
        best = seconds if best is None or seconds[0] < best[0] else best
    low = train[2].min()
    high = train[2].max()
    error = np.clip(predict(test[0], test[1]), low, high) - test[2]
    return {
        "tool": tool,
        "data": name,
        "rank": rank,
        "seed": seed,
        "threads": threads,
        "sweeps": options.get("sweeps"),
        "rmse": float(np.sqrt(np.mean(error.astype(np.float64) ** 2))),
        "cpu": best[0],
        "wall": best[1],
        "load": best[2],
        "options": {k: v for k, v in options.items() if k != "kind"},
    }


def tune(tool, name, rank):
    """Search a tool's grid on a tenth of the training part of seed 0."""
    train, _ = ratings(name, 0)
    order = np.random.default_rng(1).permutation(len(train[2]))
    cut = int(0.9 * len(order))
    inner = [tuple(column[part] for column in train) for part in (order[:cut], order[cut:])]
    grid = GRIDS[tool]
    results = []
    for values in itertools.product(*(grid[key][name] for key in grid)):
        options = dict(zip(grid, values, strict=True))
        record = measure(tool, name, rank, 0, 1, None, 1, options=options, part=inner)
        results.append((record["rmse"], options))
        print(
            f"tune {tool} {name} {rank} {options}: {record['rmse']:.4f} in {record['cpu']:.2f} s",
            flush=True,
        )
    return min(results, key=lambda r: r[0])[1]


def coverage(name, rank, seed):
    """How much of the test part the predictive intervals of the default cover."""
    from statistics import NormalDist

    from fisherfold import MatrixCompletion

    train, test = ratings(name, seed)
    model = MatrixCompletion(rank, clip=False).fit(np.stack(train[:2], axis=1), train[2])
    mean, std = model.predict(np.stack(test[:2], axis=1), return_std=True)
    error = np.abs(mean - test[2])
    levels = (0.5, 0.8, 0.9, 0.95)
    covered = [
        float(np.mean(error <= NormalDist().inv_cdf(0.5 + level / 2) * std)) for level in levels
    ]
    sure = std <= np.quantile(std, 0.1)
    rmse = [float(np.sqrt(np.mean(error[m] ** 2))) for m in (sure, np.ones_like(sure))]
    return {
        "coverage": True,
        "data": name,
        "rank": rank,
        "seed": seed,
        "levels": levels,
        "covered": covered,
        "rmse_sure": rmse[0],
        "rmse_all": rmse[1],
    }


def available(tool: str) -> bool:
    module = tool.split("-")[0]
    code = "import warnings; warnings.simplefilter('ignore'); import " + module
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def jobs(args):
    for name in RANKS:
        for rank in (*RANKS[name], *MORE_RANKS):
            for tool in args.tools:
                if rank in MORE_RANKS and not tool.startswith("fisherfold"):
                    continue
                for threads, seed in itertools.product(args.threads, args.seeds):
                    if tool in ("fisherfold-nosets", "surprise") and threads > 1:
                        continue  # the first is a variant, the second has no threads
                    sweeps = [None]
                    if tool in SWEEPS:
                        if threads > 1 or (seed and not args.full):
                            # myFM's core is sequential; slow ones get one seed unless all is wanted
                            continue
                        sweeps = SWEEPS[tool] if args.full else SWEEPS[tool][:1]
                    for count in sweeps:
                        yield {
                            "tool": tool,
                            "data": name,
                            "rank": rank,
                            "seed": seed,
                            "threads": threads,
                            "sweeps": count,
                        }


def run(args) -> None:
    done = {_key(r) for r in _records(args.results) if "tool" in r}
    missing = [tool for tool in args.tools if not available(tool)]
    for tool in missing:
        print(f"left out: {tool} (pip install {PACKAGES.get(tool, tool.partition('-')[0])})")
    args.tools = [tool for tool in args.tools if tool not in missing]
    began = time.perf_counter()
    failed = False
    for job in jobs(args):
        name = f"{job['data']}-{job['rank']}"
        if _key(job) in done or (args.only and name not in args.only):
            continue
        if args.budget and time.perf_counter() - began > args.budget:
            print("the budget of seconds is spent; run again to go on")
            return
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(job["threads"]))}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks",
            "run",
            "completion",
            "--one",
            json.dumps(job),
            "--repeat",
            str(args.repeat),
        ]
        reply = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        if reply.returncode:
            print(f"{name} {job['tool']} failed: {reply.stderr.strip().splitlines()[-1:]}")
            failed = True
            continue
        record = json.loads(reply.stdout.splitlines()[-1])
        with args.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{name:15s} {job['tool']:18s} seed {job['seed']} threads {job['threads']} rmse "
            f"{record['rmse']:.4f} cpu {record['cpu']:.2f} wall {record['wall']:.2f}",
            flush=True,
        )
    if failed:
        raise SystemExit(1)


_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)


def _key(record) -> tuple:
    return tuple(record.get(k) for k in ("tool", "data", "rank", "seed", "threads", "sweeps"))


def _records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(args) -> None:
    """Print the tables in Markdown and draw the frontier."""
    records = _records(args.results)
    groups = defaultdict(list)
    for r in records:
        if "tool" in r:
            groups[r["data"], r["rank"], r["threads"], r["tool"], r["sweeps"]].append(r)
    for name in RANKS if groups else ():
        for rank in RANKS[name]:
            print(f"\n### {name}, rank {rank}\n")
            print(
                "| tool | RMSE | Δ, same seeds | CPU s | wall s | loading s | CPU ratio | 2 "
                "threads: CPU s, wall s |"
            )
            print("|---|---|---|---|---|---|---|---|")
            mine = groups[name, rank, 1, "fisherfold", None]
            ours = _mean(mine)
            rows = [
                (key, _mean(rs)) for key, rs in groups.items() if key[:3] == (name, rank, 1) and rs
            ]
            for key, m in sorted(rows, key=lambda row: row[1]["rmse"]):
                two = groups.get((name, rank, 2, *key[3:]))
                pair = _mean(two) if two else None
                sweeps = f", {key[4]} sweeps" if key[4] else ""
                count = "" if m["n"] == len(SEEDS) else f" ({m['n']} seed{'s' * (m['n'] > 1)})"
                error = f"{m['rmse']:.4f}" + (f" ± {m['se']:.4f}" if m["n"] > 1 else "") + count
                seeds = {r["seed"] for r in groups[key]}
                same = [r for r in mine if r["seed"] in seeds]
                common = {r["seed"] for r in same}
                theirs = [r for r in groups[key] if r["seed"] in common]
                gap = f"{_mean(theirs)['rmse'] - _mean(same)['rmse']:+.4f}" if same else "-"
                cells = [LABELS[key[3]] + sweeps, error, gap]
                cells += [f"{m[k]:.2f}" for k in ("cpu", "wall", "load")] + [
                    f"{m['cpu'] / ours['cpu']:.1f}"
                ]
                cells += ["-" if pair is None else f"{pair['cpu']:.2f}, {pair['wall']:.2f}"]
                print("| " + " | ".join(cells) + " |")
        print(f"\n### {name}, more factors (fisherfold)\n")
        print("| rank | RMSE | CPU s | wall s on 2 threads |\n|---|---|---|---|")
        for rank in (*RANKS[name], *MORE_RANKS):
            one, two = (groups[name, rank, k, "fisherfold", None] for k in (1, 2))
            if one:
                wall = f"{_mean(two)['wall']:.2f}" if two else "-"
                print(f"| {rank} | {_mean(one)['rmse']:.4f} | {_mean(one)['cpu']:.2f} | {wall} |")
    print("\n### Coverage of the predictive intervals\n")
    print(
        "| data | rank | 50 % | 80 % | 90 % | 95 % | RMSE, surest tenth | RMSE, all |\n"
        + 8 * "|---"
        + "|"
    )
    for r in records:
        if r.get("coverage"):
            cells = " | ".join(f"{100 * c:.1f}" for c in r["covered"])
            print(
                f"| {r['data']} | {r['rank']} | {cells} | {r['rmse_sure']:.3f} | "
                f"{r['rmse_all']:.3f} |"
            )
    if groups:
        picture(groups, args.picture)


def _mean(records) -> dict:
    rmse = np.array([r["rmse"] for r in records])
    first = {key: float(np.mean([r[key] for r in records])) for key in ("cpu", "wall", "load")}
    se = float(rmse.std(ddof=1) / np.sqrt(len(rmse))) if len(rmse) > 1 else float("nan")
    return {"rmse": float(rmse.mean()), "se": se, "n": len(rmse), **first}


def picture(groups, path: Path) -> None:
    """CPU seconds against held-out error, one panel per data set and rank."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5), constrained_layout=True)
    for axis, (name, rank) in zip(
        axes.flat, ((n, r) for n in RANKS for r in RANKS[n]), strict=True
    ):
        points = [
            (key, _mean(rs)) for key, rs in groups.items() if key[:3] == (name, rank, 1) and rs
        ]
        for key, m in points:
            mine = key[3].startswith("fisherfold")
            axis.scatter(
                m["cpu"],
                m["rmse"],
                s=70 if mine else 40,
                color="tab:red" if mine else "tab:blue",
                marker="*" if mine else "o",
                zorder=3,
            )
            label = key[3] + (f" {key[4]}" if key[4] else "")
            left = key[3] in (
                "myfm-vb",
                "cornac",
                "fisherfold-point",
            )  # beside their neighbours, not over them
            below = key[3] in ("cmfrec", "fisherfold", "fisherfold-point")
            axis.annotate(
                label,
                (m["cpu"], m["rmse"]),
                xytext=(-6 if left else 6, -11 if below else 4),
                fontsize=8,
                textcoords="offset points",
                ha="right" if left else "left",
            )
        axis.set_xscale("log")
        axis.margins(y=0.12)
        reach = [m["cpu"] for _, m in points] or [1.0]
        axis.set_xlim(min(reach) / 2, 5 * max(reach))
        ticks = [
            t
            for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
            if min(reach) / 2 <= t <= 5 * max(reach)
        ]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_title(f"{name}, rank {rank}")
        axis.set_xlabel("CPU seconds of fit, one thread")
        axis.set_ylabel("held-out RMSE")
        axis.grid(alpha=0.3, which="both")
    figure.suptitle("Accuracy and time of matrix completion (lower left is better)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"\npicture: {path}")


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--tools", nargs="+", default=list(TOOLS), choices=list(TOOLS))
    parser.add_argument("--only", nargs="+", help="for example movielens1m-10")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--repeat", type=int, default=1, help="fits per process; the fastest counts"
    )
    parser.add_argument("--budget", type=float, help="stop after so many seconds")
    parser.add_argument(
        "--full", action="store_true", help="all sweeps and seeds of the Bayesian peers"
    )
    parser.add_argument("--results", type=Path, default=Path("completion-results.jsonl"))
    parser.add_argument("--picture", type=Path, default=Path("docs/img/completion-frontier.png"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--one", help=SUPPRESS)


def main(given: Namespace) -> None:
    if given.one:
        job = json.loads(given.one)
        record = measure(
            job["tool"],
            job["data"],
            job["rank"],
            job["seed"],
            job["threads"],
            job["sweeps"],
            given.repeat,
        )
        print(json.dumps(record))
    elif given.tune:
        found = json.loads(CHOSEN_FILE.read_text()) if CHOSEN_FILE.exists() else {}
        for tool, name in itertools.product(
            [t for t in given.tools if t in GRIDS and available(t)], RANKS
        ):
            for rank in RANKS[name]:
                if f"{tool} {name} {rank}" not in found and (
                    not given.only or f"{name}-{rank}" in given.only
                ):
                    found[f"{tool} {name} {rank}"] = tune(tool, name, rank)
                    CHOSEN_FILE.write_text(json.dumps(found, indent=1) + "\n")
    elif given.coverage:
        with given.results.open("a") as file:
            for name in RANKS:
                for rank in RANKS[name]:
                    file.write(json.dumps(coverage(name, rank, 0)) + "\n")
    elif not given.report:
        run(given)
    if given.report or given.coverage:
        report(given)
