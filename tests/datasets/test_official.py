"""The readers of the official formats, on small files that the tests write in those formats."""

import errno
import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import platformdirs
import pooch
import pytest
from typer.testing import CliRunner

from fisherfold import datasets
from fisherfold.cli import app
from fisherfold.datasets import download, local, official, records


def zipped(path, **members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(f"folder/{name.replace('__', '.').replace('_dash_', '-')}", content)
    return path


def test_movielens_1m_is_sorted_by_user_and_movie(tmp_path):
    text = "2::10::3::978300760\n1::7::5::978300760\n1::3::4::978302109\n"
    for path in (zipped(tmp_path / "ml-1m.zip", ratings__dat=text), tmp_path / "ratings.dat"):
        if path.suffix == ".dat":
            path.write_text(text)
        arrays = official.movielens1m(path)
        assert arrays["user_id"].tolist() == [1, 1, 2]
        assert arrays["movie_id"].tolist() == [3, 7, 10]
        assert arrays["rating"].tolist() == [4, 5, 3]
        assert arrays["rating"].dtype == np.uint8


def test_movielens_100k_folds_come_from_the_test_parts(tmp_path):
    lines = [f"{user}\t{user + 1}\t3\t88125094{user}" for user in range(1, 6)]
    tests = {f"u{k}__test": lines[k - 1] + "\n" for k in range(1, 6)}
    path = zipped(tmp_path / "ml-100k.zip", u__data="\n".join(lines) + "\n", **tests)
    arrays = official.movielens100k(path)
    assert arrays["test_fold"].tolist() == [1, 2, 3, 4, 5]
    assert arrays["timestamp"].dtype == np.int32


def test_text_that_is_not_ratings_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"ratings.dat should hold 4 integers a line"):
        official.movielens1m(zipped(tmp_path / "ml-1m.zip", ratings__dat="1::2::good::3\n"))
    with pytest.raises(ValueError, match=r"ml.zip holds no file ratings.dat"):
        official.movielens1m(zipped(tmp_path / "ml.zip", other__dat="1"))


def test_jester_sheet_saved_as_csv(tmp_path):
    line = ",".join(["2", "-7.82", "4.03", *["99"] * 98])
    (tmp_path / "jester.csv").write_text(f"{line}\n" * 3)
    arrays = official.jester1(tmp_path / "jester.csv")
    assert arrays["ratings_x100"].shape == (3, 100)
    assert arrays["ratings_x100"][0, :3].tolist() == [-782, 403, 9900]


def test_a_spreadsheet_is_answered_with_what_to_do(tmp_path):
    path = zipped(tmp_path / "jester.zip", jester_dash_data_dash_1__xls=b"1")
    with pytest.raises(ValueError, match=r"jester.zip holds a spreadsheet: .* save it as CSV"):
        official.jester1(path)


def test_sarcos_matrix(tmp_path):
    from scipy.io import savemat

    values = np.round(np.random.default_rng(0).normal(size=(4, 28)), 6)
    savemat(tmp_path / "sarcos_inv_test.mat", {"sarcos_inv_test": values})
    assert np.array_equal(
        official.sarcos_test(tmp_path / "sarcos_inv_test.mat")["micro"] / 1e6, values
    )


def test_an_archive_that_claims_too_much_in_sum_is_rejected_before_it_is_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(official, "ARCHIVE_LIMIT", 10 * 2**20)
    members = {f"other{k}__dat": bytes(4 * 2**20) for k in range(3)}
    with pytest.raises(ValueError, match="claims more than 10 MiB"):
        official.movielens1m(zipped(tmp_path / "ml-1m.zip", ratings__dat="1::2::3::4", **members))


def test_an_archive_gives_no_more_bytes_than_it_claims(tmp_path):
    """A member with a claim of four bytes, in both headers, over a megabyte."""
    path = zipped(tmp_path / "ml-1m.zip", ratings__dat=b"1::2::3::4\n" * 2**17)
    content = path.read_bytes()
    path.write_bytes(content.replace((11 * 2**17).to_bytes(4, "little"), (4).to_bytes(4, "little")))
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC"):
        official.movielens1m(path)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A record of three ratings in place of MovieLens-1M, an empty cache and no data folder."""
    arrays = official.movielens1m(
        zipped(tmp_path / "ml-1m.zip", ratings__dat="1::1::5::0\n1::2::3::0\n2::1::4::0\n")
    )
    digests = {
        key: records.ArrayRecord(
            str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest()
        )
        for key, array in arrays.items()
    }
    whole = records.REGISTRY["movielens1m"]
    entry = replace(whole, arrays=digests)
    for module in (download, local):
        monkeypatch.setattr(module, "record", lambda name: entry)
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FISHERFOLD_DATA", raising=False)
    return tmp_path / "ml-1m.zip"


def test_fetch_verifies_keeps_and_finds_a_set_again(tiny):
    said = []
    folder = datasets.fetch("movielens1m", source=tiny, say=said.append)
    assert "no redistribution" in said[0]
    assert datasets.where("movielens1m") == folder
    assert datasets.load("movielens1m").values.tolist() == [5, 3, 4]
    datasets.verify("movielens1m")
    assert datasets.fetch("movielens1m", say=said.append) == folder
    assert said[-1] == "movielens1m is already there"
    assert [file.name for file in folder.iterdir()] == ["movielens1m.npz"]


def test_a_download_is_verified_and_kept(tiny, monkeypatch):
    monkeypatch.setattr(download, "_download", lambda name, folder: tiny)
    assert (datasets.fetch("movielens1m") / "movielens1m.npz").is_file()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("no route to host"), "OSError"), (OSError(errno.ENOSPC, "disk full"), "disk full")],
)
def test_a_download_that_fails_says_what_else_can_be_done(tiny, monkeypatch, error, reason):
    def retrieve(*_, **__):
        raise error

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    with pytest.raises(
        ConnectionError, match=rf"ml-1m.zip cannot be downloaded \({reason}\).* --from FILE"
    ):
        datasets.fetch("movielens1m")
    assert datasets.where("movielens1m") is None


def test_a_cache_that_cannot_be_made_is_one_sentence(tiny, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"^cannot write .*cache: .*Not a directory$"):
        datasets.fetch("movielens1m", source=tiny)


def test_a_download_that_is_no_data_is_not_read_again(tiny, monkeypatch):
    """A page of a proxy in place of the archive: the next try downloads."""
    answers = [b"<html>please log in</html>", tiny.read_bytes()]

    def answer(self, url, output_file, *_, **__):
        Path(output_file).write_bytes(answers.pop(0))

    monkeypatch.setattr(pooch.HTTPDownloader, "__call__", answer)
    with pytest.raises(ValueError, match=r"ratings.dat should hold 4 integers"):
        datasets.fetch("movielens1m")
    assert (datasets.fetch("movielens1m") / "movielens1m.npz").is_file()


@pytest.mark.parametrize("name", ["movielens100k", "movielens1m", "jester1", "sarcos_test"])
@pytest.mark.parametrize("form", ["page", "short", "other"])
def test_a_file_that_is_damaged_or_something_else_is_named(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FISHERFOLD_DATA", raising=False)
    file = zipped(tmp_path / "given.zip", other=bytes(range(256)) * 9)
    if form != "other":
        file.write_bytes(
            b"<html>please log in</html>" if form == "page" else file.read_bytes()[:-40]
        )
    with pytest.raises(
        ValueError, match=r"given.zip cannot be read as (the official|a MATLAB) file"
    ):
        datasets.fetch(name, source=file)


def test_changed_data_is_refused_and_nothing_is_kept(tiny, tmp_path):
    other = zipped(tmp_path / "other.zip", ratings__dat="1::1::5::0\n1::2::3::0\n2::1::1::0\n")
    with pytest.raises(ValueError, match=r"array 'rating' has the sha256 .*, expected"):
        datasets.fetch("movielens1m", source=other)
    assert datasets.where("movielens1m") is None


def test_a_set_without_official_file_says_where_to_put_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FISHERFOLD_CACHE", str(tmp_path))
    monkeypatch.delenv("FISHERFOLD_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match=r"letter is not offered for download .* FISHERFOLD_DATA"
    ):
        datasets.fetch("letter")


def test_a_user_without_home_and_account_needs_no_cache(monkeypatch):
    """Containers with arbitrary user ids: 0.1.0 failed in ``info``, ``datasets`` and ``reproduce``."""
    monkeypatch.delenv("FISHERFOLD_CACHE", raising=False)

    def no_home(_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_cache_path", no_home)
    assert datasets.where("letter") is not None or not os.environ.get("FISHERFOLD_DATA")
    for words in (["info"], ["datasets", "list"], ["datasets", "info", "letter"]):
        assert CliRunner().invoke(app, [*words, "--json"]).exit_code == 0
