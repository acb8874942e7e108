"""The service as a process: limits under load, exchanges without a lost request, an orderly end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from served import Process, fitted, service

from fisherfold.completion import MatrixCompletion
from fisherfold.serve.run import _listen

PAIRS = [{"row": k, "column": f"f{k}"} for k in range(20)]
ASKED = [(k, f"f{k}") for k in range(20)]


def until(true, seconds=30):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_answers_and_ends_in_order(folder, model):
    with service(folder, token="secret") as found:
        status, answer = found.ask("predict", {"pairs": PAIRS})
        assert status == 200
        predictions = [each["prediction"] for each in answer["predictions"]]
        np.testing.assert_allclose(predictions, model.predict(ASKED))
        # a million ids; the body is refused before it is read
        status, answer = found.ask("recommend", {"ids": list(range(10**6))})
        assert (status, answer["detail"]) == (413, "a body may have at most 1,048,576 bytes")
        code, log = found.stop()
    assert code == 0, log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {line["path"] for line in lines if line["message"] == "request"} == {
        "/predict",
        "/recommend",
    }


def test_small_answers_do_not_wait_for_acknowledgements():
    with (
        _listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def run(*words, **environment):
    command = [sys.executable, "-m", "fisherfold", "serve", *map(str, words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | environment,
    )


@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_a_sentence(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            ([tmp_path / "nothing"], "there is no model in the folder"),
            ([folder, "--port", port], f"cannot listen at 127.0.0.1, port {port}"),
            ([folder, "--titles", tmp_path / "no.csv"], "no.csv"),
            ([folder, "--allow-updates", "--workers", 2], "needs a single worker"),
            ([folder, "--host", "999.1.1.1"], "cannot listen at 999.1.1.1"),
        ]
        for words, sentence in cases:
            ended = run(*words)
            assert ended.returncode == 2, ended.stderr
            assert sentence in " ".join(ended.stderr.split())
            assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("token", "warns"), [(None, True), ("secret", False)])
def test_it_warns_where_it_is_open_to_others(folder, token, warns):
    found = Process(folder, "--host", "0.0.0.0", token=token)
    code, log = found.stop()
    assert code == 0
    assert ("everybody who reaches 0.0.0.0" in log) == warns


@pytest.mark.slow
def test_more_requests_than_the_queue_holds_get_429(folder):
    with service(folder, "--queue-limit", 2) as found:
        ids = list(range(60)) * 10
        with ThreadPoolExecutor(16) as threads:
            asked = [threads.submit(found.ask, "recommend", {"ids": ids}) for _ in range(64)]
            statuses = [each.result()[0] for each in asked]
        assert set(statuses) == {200, 429}
        assert found.ask("predict", {"pairs": PAIRS})[0] == 200
        _, text = found.ask("metrics")
        assert 'fisherfold_requests_total{path="/recommend",status="429"}' in text


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exchange_under_load_loses_no_request_and_mixes_no_answer(folder, model, workers):
    other = fitted(seed=1)
    truths = [tuple(each.predict(ASKED)) for each in (model, other)]
    versions: dict[str, set[tuple[float, ...]]] = {}
    failed = []
    stop = threading.Event()

    def ask():
        while not stop.is_set():
            status, answer = found.ask("predict", {"pairs": PAIRS})
            if status != 200:
                failed.append(answer)
                continue
            values = tuple(each["prediction"] for each in answer["predictions"])
            versions.setdefault(answer["version"], set()).add(values)

    with service(folder, "--reload-seconds", 0.1, "--workers", workers) as found:
        if workers > 1:  # all have begun
            until(lambda: len(children_of(found.process.pid)) == workers, seconds=90)
        assert found.ask("health")[0] == 200
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for each in threads:
            each.start()
        for turn in range(10):
            (other if turn % 2 == 0 else model).save(folder)
            time.sleep(0.5)
        stop.set()
        for each in threads:
            each.join()
        code, log = found.stop()
    assert code == 0, log
    assert failed == []
    assert len(versions) == 2
    assert all(len(answers) == 1 for answers in versions.values())
    assert {next(iter(answers)) for answers in versions.values()} == set(truths)


@pytest.mark.slow
def test_a_damaged_or_vanished_folder_leaves_the_old_model(folder, model):
    with service(folder, "--reload-seconds", 0.1) as found:
        version = found.ask("ready")[1]["version"]
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        until(lambda: found.ask("ready")[1]["refused"])
        assert found.ask("predict", {"pairs": PAIRS})[1]["version"] == version
        assert 'fisherfold_reloads_total{outcome="refused"} 1.0' in found.ask("metrics")[1]
        folder.rename(folder.with_name("away"))
        until(lambda: "there is no model" in found.ask("ready")[1]["refused"])
        assert found.ask("predict", {"pairs": PAIRS})[0] == 200
        model.save(folder)
        until(lambda: found.ask("ready")[1]["refused"] == "")


@pytest.mark.slow
def test_what_is_under_way_at_the_end_is_answered(folder):
    found = Process(folder)
    assert found.ask("health")[0] == 200
    body = {"ids": list(range(60)) * 10, "k": 40}
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(found.ask, "recommend", body) for _ in range(4)]
        time.sleep(0.05)
        code, _ = found.stop()
        answered = [each.exception() is None for each in asked]
    assert code == 0
    assert any(answered)


@pytest.mark.slow
def test_a_killed_worker_is_replaced(folder):
    with service(folder, "--workers", 2) as found:
        until(lambda: len(children_of(found.process.pid)) == 2, seconds=90)
        children = children_of(found.process.pid)
        os.kill(children[0], signal.SIGKILL)
        until(lambda: len(set(children_of(found.process.pid)) - set(children)) == 1, seconds=90)
        until(lambda: found.ask("predict", {"pairs": PAIRS})[0] == 200)
        assert found.stop()[0] == 0


def children_of(process):
    """Workers of a service, which map an array file."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(each) for each in found if mapped(int(each))]


def mapped(process):
    """Bytes of memory of a process that hold the mapped arrays: resident, and its share (PSS)."""
    try:
        lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
    except OSError:
        return ()
    resident = share = 0
    inside = False
    for line in lines:
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = ".arrays" in line
        elif inside and first == "Rss:":
            resident += int(line.split()[1]) * 1024
        elif inside and first == "Pss:":
            share += int(line.split()[1]) * 1024
    return (resident, share) if resident else ()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's smaps")
def test_workers_share_the_memory_of_the_model(tmp_path):
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.integers(0, 20_000, 200_000), rng.integers(0, 5_000, 200_000)], axis=1)
    model = MatrixCompletion(12, max_iter=1).fit(pairs, rng.normal(size=200_000))
    model.save(tmp_path / "large")
    with service(tmp_path / "large", "--workers", 2) as found:
        until(lambda: len(children_of(found.process.pid)) == 2, seconds=90)
        body = {"ids": list(range(500)), "k": 10}
        for _ in range(20):
            assert found.ask("recommend", body)[0] == 200
        pages = [mapped(each) for each in children_of(found.process.pid)]
        size = (tmp_path / "large" / "model.safetensors").stat().st_size
    resident, share = (sum(part) for part in zip(*pages, strict=True))
    assert resident > size  # both have it
    assert share < 1.1 * size  # it is there once
