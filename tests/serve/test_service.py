"""The service answers what the library answers, and lives on whatever it is sent."""

from __future__ import annotations

import json
import shutil
import time

import numpy as np
import polars as pl
import pytest
from served import fitted, ratings

from fisherfold.completion import MatrixCompletion
from fisherfold.serve.store import ModelStore, map_arrays, write_arrays


def rows_of(frame):
    return [dict(zip(frame.columns, row, strict=True)) for row in frame.rows()]


def lists(answer, *, without=("low", "high", "title")):
    assert answer.status_code == 200, answer.text
    rows = answer.json()["rows"]
    return [{k: v for k, v in row.items() if k not in without} for row in rows]


RATED = {"f1": 5.0, "f2": 1.0, "f3": 4.0}
BODY = [{"column": column, "value": value} for column, value in RATED.items()]


def test_predictions_and_intervals_are_the_library_s(client, model):
    pairs = [(0, "f1"), (5, "f7"), ("new", "f3")]
    body = {"pairs": [{"row": r, "column": c} for r, c in pairs], "coverage": 0.8}
    found = client.post("/predict", json=body).json()["predictions"]
    low, high = model.predict_interval(pairs, 0.8)
    expected = zip(model.predict(pairs), low, high, strict=True)
    assert [(p["prediction"], p["low"], p["high"]) for p in found] == list(expected)
    assert [(p["row"], p["column"]) for p in found] == pairs


@pytest.mark.parametrize("by", ["mean", "upper", "sample"])
def test_lists_are_the_library_s(client, model, by):
    options = {"k": 4, "candidates": [f"f{k}" for k in range(20)], "by": by, "seed": 3}
    found = client.post("/recommend", json={"ids": [3, 1], **options})
    assert lists(found) == rows_of(model.recommend([3, 1], **options))
    found = client.post("/recommend_new", json={"ratings": BODY, **options})
    assert lists(found) == rows_of(model.recommend_new(RATED, **options))


def test_lists_of_new_rows_have_the_intervals_of_ratings_to_come(client, model):
    found = client.post("/recommend_new", json={"ratings": BODY, "k": 5, "coverage": 0.5}).json()
    places = [row["film"] for row in found["rows"]]
    arguments = list(RATED), list(RATED.values()), places
    mean, std = model.predict_new(*arguments, return_std=True)
    half = 0.6744897501960817 * std  # the quartile of the normal distribution
    low, high = [row["low"] for row in found["rows"]], [row["high"] for row in found["rows"]]
    np.testing.assert_allclose(low, np.clip(mean - half, 1, 5))
    np.testing.assert_allclose(high, np.clip(mean + half, 1, 5))


def test_lists_leave_out_what_they_shall(client, model):
    left_out = model.recommend(3, 3)["film"].to_list()
    found = client.post("/recommend", json={"ids": [3], "k": 3, "exclude": left_out})
    assert lists(found) == rows_of(model.recommend(3, 3, exclude=left_out))
    new = client.post("/recommend_new", json={"ratings": BODY, "k": 3, "exclude": left_out})
    assert lists(new) == rows_of(model.recommend_new(RATED, 3, exclude=left_out))


def test_features_of_new_rows_are_taken(client_of, tmp_path):
    frame = ratings()
    ages = {"person": list(range(60)), "age": [20.0 + each % 7 for each in range(60)]}
    model = MatrixCompletion(2).fit(frame, row_features=pl.DataFrame(ages))
    model.save(tmp_path / "aged")
    body = {"ratings": BODY, "features": {"age": 25}, "k": 4}
    found = client_of(tmp_path / "aged").post("/recommend_new", json=body)
    assert lists(found) == rows_of(model.recommend_new(RATED, 4, features={"age": 25}))
    assert all(row["low"] <= row["prediction"] <= row["high"] for row in found.json()["rows"])
    other = client_of(tmp_path / "aged").post("/recommend_new", json=body | {"features": {"x": 1}})
    assert other.status_code == 422
    assert "age" in other.json()["detail"]


@pytest.mark.parametrize("of", ["columns", "rows"])
def test_what_is_similar_is_the_library_s(client, model, of):
    ids = ["f1", "f2"] if of == "columns" else [1, 2]
    found = client.post("/similar", json={"ids": ids, "k": 3, "of": of})
    assert lists(found) == rows_of(model.similar(ids, 3, of=of))


def test_reasons_are_the_library_s(client, model):
    found = client.post("/explain", json={"row": 3, "column": "f1", "k": 3})
    assert lists(found) == rows_of(model.explain(3, "f1", 3))
    found = client.post("/explain", json={"ratings": BODY, "column": "f9", "k": 3})
    assert lists(found) == rows_of(model.explain(RATED, "f9", 3))


@pytest.mark.parametrize("kind", ["implicit", "items", "point"])
def test_other_models_are_served_too_without_intervals(client_of, tmp_path, kind):
    model = fitted(kind)
    model.save(tmp_path / kind)
    client = client_of(tmp_path / kind)
    assert client.get("/model").json()["intervals"] is False
    found = client.post("/recommend", json={"ids": [3], "k": 3})
    assert lists(found) == rows_of(model.recommend(3, 3))
    rated = {"f1": 1.0}
    found = client.post("/recommend_new", json={"ratings": [{"column": "f1", "value": 1}], "k": 3})
    assert lists(found, without=()) == rows_of(model.recommend_new(rated, 3))
    body = {"pairs": [{"row": 3, "column": "f1"}]}
    found = client.post("/predict", json=body).json()["predictions"][0]["prediction"]
    assert found == pytest.approx(float(model.predict([(3, "f1")])[0]))
    answer = client.post("/predict", json=body | {"coverage": 0.9})
    assert answer.status_code == 422


def test_life_version_and_description(client, model):
    assert client.get("/health").json() == {"status": "ok"}
    version = client.get("/ready").json()["version"]
    described = client.get("/model").json()
    assert (described["rows"], described["columns"]) == (60, 40)
    assert (described["low"], described["high"]) == (1.0, 5.0)
    metrics = client.get("/metrics").text
    assert f'fisherfold_model_info{{version="{version}"}} 1.0' in metrics
    assert 'fisherfold_requests_total{path="/health",status="200"}' in metrics
    assert 'fisherfold_request_seconds_bucket{le="0.01",path="/health"}' in metrics
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) >= {"/predict", "/recommend", "/recommend_new", "/similar", "/explain"}
    assert "/update" not in paths


def test_warnings_of_the_library_are_part_of_the_answer(client):
    body = {"ratings": [*BODY, {"column": "unknown", "value": 3}]}
    (warned,) = client.post("/recommend_new", json=body).json()["warnings"]
    assert "1 rated column id was not seen in fit and left out" in warned
    assert client.post("/recommend_new", json={"ratings": BODY}).json()["warnings"] == []


PAIR = {"row": 1, "column": "f1"}
BAD = [
    ("/predict", b"{", 400, "the body is not JSON"),
    ("/predict", b"\xff\xfe", 400, ""),
    ("/predict", b"[" * 100_000, 400, ""),
    ("/predict", b"[]", 422, "dictionary"),
    ("/predict", {"pairs": []}, 422, "at least 1 item"),
    ("/predict", {"pairs": [PAIR] * 10_001}, 422, "at most 10000 items"),
    ("/predict", {"pairs": [PAIR], "coverage": 1.5}, 422, "less than 1"),
    ("/predict", {"pairs": [PAIR], "other": 1}, 422, "other: Extra inputs"),
    ("/predict", {"pairs": [{"row": None, "column": 1}]}, 422, "pairs.0.row"),
    ("/recommend", {"ids": [1], "k": 10**9}, 422, "less than or equal to 1000"),
    ("/recommend", {"ids": [1] * 1000, "k": 1000}, 422, "more than 50,000 places"),
    ("/recommend", {"ids": [1], "by": "best"}, 422, "'mean', 'upper' or 'sample'"),
    ("/recommend", {"ids": [1], "candidates": ["zzz"]}, 422, "none of the candidates"),
    ("/recommend", {"ids": [1], "candidates": []}, 422, "none of the candidates"),
    ("/recommend", {"ids": [10**40]}, 422, "int value too large"),
    ("/recommend_new", {"ratings": [{"column": "zzz", "value": 1}]}, 422, "nothing is known"),
    ("/recommend_new", {"ratings": [{"column": "f1", "value": 1e300}]}, 422, ""),
    ("/recommend_new", b'{"ratings": [{"column": "f1", "value": NaN}]}', 422, "finite"),
    ("/recommend_new", {"ratings": [{"column": "f1", "value": "much"}]}, 422, "valid number"),
    ("/recommend_new", {"ratings": BODY, "features": {"age": 3}}, 422, "features"),
    ("/recommend_new", {"ratings": BODY + BODY}, 422, "rated twice"),
    ("/similar", {"ids": ["zzz"]}, 422, "1 column id was not seen in fit"),
    ("/explain", {"column": "f1"}, 422, "either a row of the fit or ratings"),
    ("/update", {"events": []}, 404, "Not Found"),
    ("/nothing", {}, 404, "Not Found"),
]


@pytest.mark.parametrize(("path", "body", "status", "sentence"), BAD)
def test_bad_input_gets_a_sentence_and_the_service_lives_on(client, path, body, status, sentence):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    if status != 200:
        assert sentence in answer.json()["detail"]
        assert "Traceback" not in answer.text
    assert client.post("/predict", json={"pairs": [PAIR]}).status_code == 200


def test_a_model_that_was_told_so_refuses_unknown_ids(client_of, model, tmp_path):
    strict = MatrixCompletion(**model.get_params() | {"unseen": "error"})
    strict._adopt(model.model_)
    strict.names_, strict.frame_ = model.names_, model.frame_
    strict.save(tmp_path / "strict")
    answer = client_of(tmp_path / "strict").post("/recommend", json={"ids": ["zzz"]})
    assert answer.status_code == 422
    assert "zzz" in answer.json()["detail"]


def test_a_token_is_asked_of_all_but_the_page_and_the_signs_of_life(client_of, folder):
    client = client_of(folder, token="secret")
    assert client.get("/health").status_code == 200
    assert client.get("/").status_code == 200
    body = {"pairs": [PAIR]}
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
        answer = client.post("/predict", json=body, headers=headers)
        assert answer.status_code == 401
        assert "Authorization: Bearer TOKEN" in answer.json()["detail"]
    assert client.get("/metrics").status_code == 401
    right = {"Authorization": "Bearer secret"}
    assert client.post("/predict", json=body, headers=right).status_code == 200


def test_bodies_have_a_limit_with_and_without_a_length(client_of, folder):
    client = client_of(folder, body_limit=2000)
    answer = client.post("/predict", content=b"x" * 3000)
    assert (answer.status_code, answer.json()["detail"]) == (
        413,
        "a body may have at most 2,000 bytes",
    )
    chunks = (b"x" * 500 for _ in range(6))
    assert client.post("/predict", content=chunks).status_code == 413


def test_answers_have_a_time_limit(client_of, folder):
    client = client_of(folder, time_limit=0.2)
    service = client.app.state.service
    model = service.store.current.model
    predict = model.predict

    def slowly(pairs):
        time.sleep(0.6)
        return predict(pairs)

    model.predict = slowly
    answer = client.post("/predict", json={"pairs": [PAIR]})
    assert answer.status_code == 503
    assert "longer than 0.2 s" in answer.json()["detail"]
    model.predict = predict
    time.sleep(0.6)
    assert client.post("/predict", json={"pairs": [PAIR]}).status_code == 200


def test_a_replaced_folder_is_taken_and_a_damaged_one_refused(model, folder, tmp_path):
    (scratch := tmp_path / "scratch").mkdir()
    store = ModelStore(folder, scratch)
    first = store.current
    assert not store.refresh()
    other = fitted(seed=1)
    other.save(folder)
    assert store.refresh()
    assert store.current.name != first.name
    pairs = [(1, "f1"), (2, "f5")]
    np.testing.assert_array_equal(store.current.model.predict(pairs), other.predict(pairs))
    np.testing.assert_array_equal(first.model.predict(pairs), model.predict(pairs))
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-10] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert not store.refresh()
    assert "damaged" in store.refused or "checksum" in store.refused
    shutil.rmtree(folder)
    assert not store.refresh()
    assert "there is no model in the folder" in store.refused
    np.testing.assert_array_equal(store.current.model.predict(pairs), other.predict(pairs))
    model.save(folder)
    assert store.refresh()
    assert (store.current.name, store.refused) == (first.name, "")
    assert len(list(scratch.glob("*.arrays"))) == 1


def test_mapped_arrays_are_those_that_were_written(tmp_path):
    import torch

    arrays = {
        "a": torch.arange(7, dtype=torch.float32),
        "b": torch.ones(3, 5, dtype=torch.float64),
        "none": torch.zeros(0, dtype=torch.int64),
        "c": torch.tensor([True, False]),
    }
    write_arrays(tmp_path / "x.arrays", arrays, {"name": "é"})
    found, meta = map_arrays(tmp_path / "x.arrays")
    assert meta == {"name": "é"}
    assert all(torch.equal(found[name], arrays[name]) for name in arrays)
    found["a"][0] = 9  # a page of this process alone
    assert map_arrays(tmp_path / "x.arrays")[0]["a"][0] == 0


def test_updates_are_taken_once_and_saved(client_of, model, folder):
    client = client_of(folder, updates=True)
    before = client.get("/ready").json()["version"]
    events = [{"row": 1, "column": f"f{k}", "value": 5, "key": f"e{k}"} for k in range(3)]
    first = client.post("/update", json={"events": events}).json()
    assert first["version"] != before
    assert client.post("/update", json={"events": events}).json()["version"] == first["version"]
    pairs = [(1, "f1"), (2, "f5")]
    expected = fitted().partial_fit(
        [(1, f"f{k}") for k in range(3)], [5.0] * 3, ids=[f"e{k}" for k in range(3)]
    )
    np.testing.assert_allclose(
        MatrixCompletion.load(folder).predict(pairs), expected.predict(pairs)
    )
    body = {"pairs": [{"row": r, "column": c} for r, c in pairs]}
    answered = [p["prediction"] for p in client.post("/predict", json=body).json()["predictions"]]
    np.testing.assert_allclose(answered, expected.predict(pairs))
    other = [events[0] | {"value": 1}]
    answer = client.post("/update", json={"events": other})
    assert answer.status_code == 422
    assert "a key names one value for ever" in answer.json()["detail"]
    np.testing.assert_allclose(
        MatrixCompletion.load(folder).predict(pairs), expected.predict(pairs)
    )


def test_models_without_keys_take_no_updates(client_of, tmp_path):
    fitted("items").save(tmp_path / "items")
    client = client_of(tmp_path / "items", updates=True)
    event = {"row": 1, "column": "f1", "value": 1, "key": "a"}
    answer = client.post("/update", json={"events": [event]})
    assert answer.status_code == 422
    assert "ItemToItem keeps no keys of events" in answer.json()["detail"]


def test_titles_are_searched_and_shown(client_of, folder, tmp_path):
    titles = tmp_path / "titles.csv"
    titles.write_text("id,title\nf1,The Matrix\nf2,Toy Story\nf3,Story of the Toys\nzz,Toy Box\n")
    client = client_of(folder, titles=str(titles))
    found = client.get("/search", params={"q": "story toy"}).json()["found"]
    assert [each["id"] for each in found] == ["f2", "f3"]
    assert client.get("/search", params={"q": "F1"}).json()["found"] == [
        {"id": "f1", "title": "The Matrix"}
    ]
    rows = client.post("/recommend", json={"ids": [1], "candidates": ["f1", "f2", "f3"]}).json()
    assert {row["film"]: row["title"] for row in rows["rows"]}.items() <= {
        "f1": "The Matrix",
        "f2": "Toy Story",
        "f3": "Story of the Toys",
    }.items()


def test_log_lines_are_json_and_hold_ids_only_if_asked(client_of, folder, capsys):
    import logging

    from fisherfold.serve.limits import JsonLines

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(json.loads(JsonLines().format(record)))
    logger = logging.getLogger("fisherfold.serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for log_ids in (False, True):
            client = client_of(folder, log_ids=log_ids)
            client.post("/recommend", json={"ids": [31, 7]})
    finally:
        logger.removeHandler(handler)
    asked = [line for line in lines if line.get("path") == "/recommend"]
    assert [line.get("ids") for line in asked] == [None, [31, 7]]
    assert asked[0]["status"] == 200
    assert asked[0]["ms"] > 0


def test_the_page_may_load_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    for path in ("/", "/page.js", "/page.css"):
        assert "http" not in client.get(path).text.replace("http-equiv", "")
